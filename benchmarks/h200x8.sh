#!/usr/bin/env bash
# Eight replicas on one host with eight H200s: what docs/benchmarks.md has under "One host". Full-size S2 Pro, random weights.
#
#   benchmarks/h200x8.sh OUT list      the parts
#   benchmarks/h200x8.sh OUT PART...   these; loads that OUT has already are not measured again
#   benchmarks/h200x8.sh OUT all       every part that LIMIT leaves time for; the same line again goes on with the rest
#   benchmarks/h200x8.sh OUT report    summary.json, table.md and plot.svg of what is there (also at the end of each run)
#
# Variables. Machine: PYTHON, WHEELS and NOTE as in h200.sh, DEVICE (cuda), ENGINES (8), WORKERS (4: HTTP processes of a server of
# all replicas), SPLITS (2: servers whose last GPU has the codecs of their others), PROCESSES (16, of clients; a multiple of
# SPLITS), MODEL (s2-pro, or for a rehearsal duetts-mini or tiny), SEATS and SERVE (flags of duetts serve), PROFILE.
# Loads: LOADS (of T), LISTENERS (of S), KILL_LOAD, EACH (seconds of a run), REPEATS, LEAST (answers of each client), FRAMES (of
# each answer; 0 as the workload has it). One replica gets a part of these loads, or of T ONE_LOADS. LIMIT: seconds for everything (570). PORT (8017): of
# the first server; others follow.
#
# A rehearsal on a CPU: DEVICE=cpu MODEL=tiny PROCESSES=4 LOADS=8,16 LISTENERS=4,8 KILL_LOAD=16 EACH=3 FRAMES=12 SEATS='--max-num-seqs 4'
set -u
cd "$(dirname "$0")/.."
OUT=${1:?where to is missing}
shift
PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda} LIMIT=${LIMIT:-570} MODEL=${MODEL:-s2-pro} NOTE=${NOTE:-}
ENGINES=${ENGINES:-8} WORKERS=${WORKERS:-4} SPLITS=${SPLITS:-2} PROCESSES=${PROCESSES:-16} PROFILE=${PROFILE:-fish_qwen3_omni_8gpu}
LOADS=${LOADS:-8,64,256,1024,2048} LISTENERS=${LISTENERS:-1024,2048,2560,3072,3584} KILL_LOAD=${KILL_LOAD:-256}
EACH=${EACH:-20} REPEATS=${REPEATS:-1} LEAST=${LEAST:-2} FRAMES=${FRAMES:-0}
read -ra SEATS <<<"${SEATS:---max-num-seqs 512 --kv-positions 524288}" # 77 GB of keys and values on each GPU
read -ra SERVE <<<"${SERVE:-}"
PARTS=(limits one eight half kill single split)
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
LOG=$OUT/log.txt PORT=${PORT:-8017} WATCH='' SERVERS=() URLS=()
. benchmarks/h200_common.sh
FOLDER='' DUMMY=(--load-format dummy) SHORT=''
[ "$REPEATS" -lt 3 ] && SHORT=--short

host() { "$PYTHON" benchmarks/host.py "$@"; }

trap end EXIT
trap 'exit 143' TERM INT

prepare() {
    ulimit -n "$(ulimit -Hn)" # each client has a connection, and the server one for each of them
    say "open files: $(ulimit -n), cores: $(nproc), GPUs: $(nvidia-smi -L 2>/dev/null | wc -l)"
    install_wheels
    FOLDER=$WORK/model
    case $MODEL in
        s2-pro) "$PYTHON" benchmarks/model_folder.py "$FOLDER" || exit 1 ;;
        tiny) DUMMY=(); "$PYTHON" benchmarks/model_folder.py "$FOLDER" --tiny || exit 1 ;;
        *) FOLDER=$MODEL ;;
    esac
    watch_cards
    say "prepared"
}

# begin FIRST COUNT FLAGS...: a server on the GPUs from FIRST on. `ready` waits for all of them.
begin() {
    local first=$1 count=$2 port=$((PORT + ${#SERVERS[@]})) gpus=''
    shift 2
    [ "$DEVICE" = cuda ] && gpus=$(seq -s, "$first" $((first + count - 1)))
    env ${gpus:+CUDA_VISIBLE_DEVICES=$gpus} "$PYTHON" -m duetts serve "$FOLDER" --served-model-name "$MODEL" --port $port --device "$DEVICE" \
        --default-voice none --log-requests off --max-queue 2048 --reference-queue 1024 "${SEATS[@]}" "${DUMMY[@]}" "${SERVE[@]}" \
        "$@" >>"$OUT/server.log" 2>&1 &
    SERVERS+=($!)
    URLS+=(--url "http://127.0.0.1:$port")
}

ready() {
    local began=$SECONDS number url
    for number in "${!SERVERS[@]}"; do
        url=http://127.0.0.1:$((PORT + number))
        until "$PYTHON" -c "from urllib.request import urlopen; urlopen('$url/ready', timeout=5)" 2>/dev/null; do
            kill -0 "${SERVERS[$number]}" 2>/dev/null || { say "a server has ended"; tail -5 "$OUT/server.log" | tee -a "$LOG"; return 1; }
            [ "$(left)" -lt 20 ] && { say "the servers are not ready in time"; return 1; }
            sleep 0.2
        done
    done
    say "${#SERVERS[@]} servers are ready after $((SECONDS - began)) s"
}

stop() {
    local each
    for each in "${SERVERS[@]}"; do kill "$each" 2>/dev/null; done
    for each in "${SERVERS[@]}"; do
        for _ in $(seq 100); do kill -0 "$each" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$each" 2>/dev/null
        wait "$each" 2>/dev/null
    done
    SERVERS=() URLS=()
}

# start CONFIGURATION FLAGS...: its servers, ready, or a failure.
start() {
    local kind=$1 number each
    shift
    case $kind in
        one) begin 0 1 --profile none --engines 1 "$@" ;;
        eight) begin 0 "$ENGINES" --profile "$PROFILE" --engines "$ENGINES" --workers "$WORKERS" "$@" ;;
        single) begin 0 "$ENGINES" --profile "$PROFILE" --engines "$ENGINES" --workers 1 "$@" ;;
        split)
            each=$((ENGINES / SPLITS))
            for number in $(seq 0 $((SPLITS - 1))); do
                begin $((number * each)) $each --profile none --engines $((each - 1)) --codec-device "$(codecs $((each - 1)))" "$@"
            done
            ;;
    esac
    ready || { stop; return 1; }
}

codecs() { if [ "$DEVICE" = cuda ]; then echo "cuda:$1"; else echo cpu; fi; }

# due FILE WORKLOAD LOADS: whether the file does not have all of them.
due() { [ -n "$(host missing "$OUT/$1.json" "$2" "$3" --repeats "$REPEATS")" ] || { say "$2 of $1: all there"; return 1; }; }

# ask FILE WORKLOAD LOADS FLAGS...: those loads that the file does not have, one after another, while there is time.
ask() {
    local file=$OUT/$1.json workload=$2 loads=$3 load began code
    shift 3
    loads=$(host missing "$file" "$workload" "$loads" --repeats "$REPEATS") || return 1
    for load in ${loads//,/ }; do
        [ "$(left)" -lt $((2 * EACH * REPEATS + 25)) ] && { say "$workload $load: no time is left"; return 1; }
        began=$SECONDS
        timeout -k 5 "$(left)" "$PYTHON" -m duetts bench "$workload" --loads "$load,$load" "${URLS[@]}" --processes "$PROCESSES" \
            --seconds "$EACH" --repeats "$REPEATS" --least "$LEAST" --frames "$FRAMES" --streams-only $SHORT --append --note "$NOTE" \
            --output "$file" "$@" 2>&1 | tee -a "$LOG"
        code=${PIPESTATUS[0]}
        say "$workload $load: code $code after $((SECONDS - began)) s"
    done
}

# some LOADS: the part of each that one replica gets.
some() {
    local load found=()
    for load in ${1//,/ }; do found+=($((load >= ENGINES ? load / ENGINES : 1))); done
    printf '%s\n' "${found[@]}" | sort -nu | paste -sd,
}

# A server of silence for each client process, so that these are not the limit.
silence() {
    local number
    for number in $(seq 0 $((PROCESSES - 1))); do
        "$PYTHON" benchmarks/null_server.py --port $((PORT + number)) >>"$OUT/server.log" 2>&1 &
        SERVERS+=($!)
        URLS+=(--url "http://127.0.0.1:$((PORT + number))")
    done
    sleep 2
}

# What carries nothing: clients against as many servers of silence, and our servers with engines that compute nothing.
limits() {
    local kind EACH=$((EACH < 5 ? EACH : 5))
    due null_client T "$LOADS" && silence && ask null_client T "$LOADS"
    stop
    for kind in eight single; do
        due null_$kind T "$LOADS" && start $kind --engine null && ask null_$kind T "$LOADS"
        stop
    done
}

configuration() {
    local kind=$1 loads=$LOADS listeners=$LISTENERS
    [ "$kind" = one ] && loads=${ONE_LOADS:-$(some "$LOADS")} listeners=$(some "$LISTENERS")
    [ "$kind" = split ] && [ $((ENGINES / SPLITS)) -lt 2 ] && { say "split: skipped, there is no GPU for codecs"; return; }
    due "$kind" T "$loads" || due "$kind" S "$listeners" || return 0
    start "$kind" || return 1
    ask "$kind" T "$loads"
    ask "$kind" S "$listeners"
    stop
}

# First audio of listeners when half as many are there as can be.
half() {
    local listeners
    listeners=$(host half "$OUT/eight.json")
    [ "${listeners:-0}" -ge 1 ] || { say "half: skipped, no number of listeners was served well"; return; }
    due half S "$listeners" || return 0
    start eight || return 1
    ask half S "$listeners"
    stop
}

# One replica dies in the middle of a run. Its streams are lost, no others are, and it comes back.
killed() {
    local event="$((EACH / 2)):$PYTHON benchmarks/host.py kill http://127.0.0.1:$PORT"
    due kill T "$KILL_LOAD" || return 0
    start eight || return 1
    EACH=$((EACH + 10)) ask kill T "$KILL_LOAD" --event "$event ${SERVERS[0]}"
    stop
}

part() {
    case $1 in
        limits) limits ;;
        half) half ;;
        kill) killed ;;
        *) configuration "$1" ;;
    esac
}

[ $# -eq 0 ] && set -- list
[ "$1" = list ] && { printf '%s\n' "${PARTS[@]}"; trap - EXIT; rm -rf "$WORK"; exit; }
[ "$1" = all ] && set -- "${PARTS[@]}"
[ "$1" = report ] && set --
for name in "$@"; do
    [[ " ${PARTS[*]} " = *" $name "* ]] || { echo "there are ${PARTS[*]}, all, list and report" >&2; exit 2; }
done
[ $# -gt 0 ] && prepare
for name in "$@"; do
    if [ "$(left)" -lt 90 ]; then say "$name: skipped, no time is left"; else part "$name"; fi
done
host report "$OUT" --engines "$ENGINES" | tee -a "$LOG"
