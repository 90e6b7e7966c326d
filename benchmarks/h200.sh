#!/usr/bin/env bash
# The benchmark of docs/benchmarks.md on full-size S2 Pro with random weights. Results are in OUT from the first minute on.
#
#   benchmarks/h200.sh OUT short     all of it in its short form, within 10 minutes
#   benchmarks/h200.sh OUT list      the parts of the full form
#   benchmarks/h200.sh OUT part N    one of them, within 10 minutes; run those that are missing, in any order
#
# Variables: PYTHON (python3), WHEELS (a folder or tar file of wheels to install from; nothing else is asked), DEVICE (cuda),
# SERVE (more flags of duetts serve), PARTS_FLAGS (of duetts bench K), PEAK (T's best audio-s/s, which some parts of P need),
# NOTE (what the results should say, for example a commit), LIMIT (seconds for everything, 570), SECONDS_EACH (length of a run
# of the full form, 60). TRIAL=1: the same lines in small, on the CPU with the tiny model.
set -u
cd "$(dirname "$0")/.."
OUT=${1:?where to is missing} WHAT=${2:-short} PART=${3:-}
PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda} LIMIT=${LIMIT:-570} EACH=${SECONDS_EACH:-60} TRIAL=${TRIAL:-}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
LOG=$OUT/log.txt PORT=8017 SERVER='' WATCH=''
. benchmarks/h200_common.sh
FOLDER='' SMALL=() DUMMY=(--load-format dummy)
SEATS=(--max-num-seqs 512 --kv-positions 524288)  # 77 GB of keys and values: 1,024 positions for each of 512 listeners
[ -n "$TRIAL" ] && DEVICE=cpu EACH=1 DUMMY=() SEATS=(--max-num-seqs 4) SMALL=(--frames 6 --least 1 --most 1 --repeats 1 --loads 1,2)

# The full form: three runs of each load, streams and complete answers. A part has what fits into 10 minutes.
FULL=("L1 L2")
for load in 1 2 4 8 16 32 64 128 192 256; do FULL+=("T --loads $load" "C1 --loads $load" "C2 --loads $load"); done
for rates in 2,4 8,16 25%,50% 75%,90%; do FULL+=("P --loads $rates"); done
FULL+=("S --loads 256 --seconds 20" "G --loads 1 --most 3" "G --loads 16 --most 3" "G --loads 64 --most 3" "B" "K")

trap end EXIT
trap 'exit 143' TERM INT

prepare() {
    install_wheels
    FOLDER=$WORK/model
    "$PYTHON" benchmarks/model_folder.py "$FOLDER" ${TRIAL:+--tiny} || exit 1
    watch_cards
    say "prepared"
}

# part SECONDS NAME COMMAND...: a time limit of its own, and never beyond the whole one.
part() {
    local limit=$1 name=$2 began=$SECONDS code=0
    shift 2
    [ "$(left)" -lt "$limit" ] && limit=$(left)
    [ "$limit" -lt 5 ] && { say "$name: no time is left"; return 1; }
    timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$LOG"
    code=${PIPESTATUS[0]}
    say "$name: code $code after $((SECONDS - began)) s of $limit"
    return "$code"
}

# serve FLAGS...: a server that is ready, or a failure.
serve() {
    local began=$SECONDS
    "$PYTHON" -m duetts serve "$FOLDER" --served-model-name s2-pro --port $PORT --default-voice none --profile none --log-requests off \
        --max-queue 1024 --reference-queue 1024 "${SEATS[@]}" "$@" >>"$OUT/server.log" 2>&1 &
    SERVER=$!
    until "$PYTHON" -c "from urllib.request import urlopen; urlopen('http://127.0.0.1:$PORT/ready', timeout=2)" 2>/dev/null; do
        kill -0 $SERVER 2>/dev/null || { say "the server has ended"; tail -5 "$OUT/server.log" | tee -a "$LOG"; SERVER=''; return 1; }
        [ "$(left)" -lt 20 ] && { say "the server is not ready in time"; return 1; }
        sleep 0.2
    done
    say "the server is ready after $((SECONDS - began)) s"
}

stop() {
    [ -z "$SERVER" ] && return
    kill "$SERVER" 2>/dev/null
    for _ in $(seq 100); do kill -0 "$SERVER" 2>/dev/null || break; sleep 0.1; done
    kill -9 "$SERVER" 2>/dev/null
    wait "$SERVER" 2>/dev/null
    SERVER=''
}

# ask SECONDS FILE WORKLOADS AND FLAGS...: added to what the file has.
ask() {
    local limit=$1 file=$2
    shift 2
    part "$limit" "$*" "$PYTHON" -m duetts bench "$@" "${SMALL[@]}" --url "http://127.0.0.1:$PORT" --append --note "${NOTE:-}" \
        --output "$OUT/$file"
}

alone() {
    local limit=$1 file=$2
    shift 2
    part "$limit" "K $*" "$PYTHON" -m duetts bench K --model "$FOLDER" --device "$DEVICE" "${DUMMY[@]}" ${PARTS_FLAGS:-} \
        --note "${NOTE:-}" --output "$OUT/$file" "$@" ${TRIAL:+--loads 1,2 --contexts 32 --seconds 0.1}
}

short() {
    prepare
    alone 100 K.json --short --loads 1,8,32,64,128,256 --contexts 500 --chunks 2,16 --seconds 0.3
    if serve --device "$DEVICE" "${DUMMY[@]}" ${SERVE:-}; then
        local one=(--short --repeats 1 --streams-only)
        ask 40 short.json L1 L2 "${one[@]}" --seconds 8
        ask 130 short.json T "${one[@]}" --loads 1,16,64,128,256 --seconds 8 --least 2
        ask 110 short.json S "${one[@]}" --loads 128,256,384,512 --frames 108 --seconds 5 --least 1
        ask 20 short.json B "${one[@]}"
        ask 30 short.json C2 "${one[@]}" --loads 64 --seconds 8 --least 2
        ask 50 short.json C1 "${one[@]}" --loads 16,64 --seconds 8 --least 2
        ask 40 short.json G "${one[@]}" --loads 16 --least 1 --most 1
        ask 60 short.json P "${one[@]}" --loads 4,16 --seconds 12
        stop
    fi
    serve --engine null && ask 30 null.json T --short --repeats 1 --streams-only --loads 64,256 --seconds 5
    stop
    "$PYTHON" benchmarks/null_server.py --port $PORT >>"$OUT/server.log" 2>&1 &
    SERVER=$!
    sleep 1
    ask 20 null_client.json T --short --repeats 1 --streams-only --loads 64,256 --seconds 4
}

full() {
    local line=${FULL[$1]:?there is no such part} file
    file=$(printf 'part-%02d.json' "$1")
    prepare
    if [ "$line" = K ]; then
        alone 500 "$file" --seconds 1
        return
    fi
    serve --device "$DEVICE" "${DUMMY[@]}" ${SERVE:-} || return 1
    # shellcheck disable=SC2086
    ask "$LIMIT" "$file" --seconds "$EACH" ${PEAK:+--peak "$PEAK"} $line
}

case $WHAT in
    short) short ;;
    list) for number in "${!FULL[@]}"; do echo "$number  ${FULL[$number]}"; done; trap - EXIT; rm -rf "$WORK" ;;
    part) full "$PART" ;;
    *) echo "short, list or part N" >&2; exit 2 ;;
esac
