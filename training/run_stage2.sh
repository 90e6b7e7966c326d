#!/usr/bin/env bash
# Stage 2 on one GPU: the language model. The fast teacher's audio is made again in the background, turned into codes and
# deleted; the slow teacher's codes are carried. In parts, as stage 1: work goes on in the background between parts, and a
# part that finds it stopped starts it again where it was.
#
#   python -m training.lm.carry --stage1 DIR --out CARRIED   # before, where stage 1's results are
#   training/run_stage2.sh first SECONDS   # unpack, check, held-out clips, start audio, codes and training, watch
#   training/run_stage2.sh next  SECONDS   # watch
#   training/run_stage2.sh last  SECONDS   # watch until training is done, then samples
#
# Results (averaged bf16 weights in files below 16 MiB, samples as codes, one log) are in $OUT whenever a part ends.
# Settings by environment: CARRIED, MINUTES of training in all, HOURS of the fast teacher's audio, ROOM for everything big.
set -euo pipefail
part=${1:?first, next or last} limit=${2:?seconds}
began=$SECONDS
: "${OUT:?the folder for results}" "${MINUTES:=21.5}" "${HOURS:=200}" "${ROOM:=/tmp/duetts-stage2}" "${CARRIED:=scratch/stage2}"
cores=$(nproc)
mkdir -p "$OUT" "$ROOM/site" "$ROOM/code" "$ROOM/codes" "$ROOM/audio"
OUT=$(cd "$OUT" && pwd) CARRIED=$(cd "$CARRIED" && pwd)
export PYTHONUNBUFFERED=1 PYTHONPATH=$ROOM/site:src:. TORCHINDUCTOR_CACHE_DIR=$ROOM/inductor TOKENIZERS_PARALLELISM=false

fail() { echo "FAILED: $*" >&2; exit 1; }
left() { echo $((limit - (SECONDS - began))); }

unpack() {  # wheels are zip files; each is unpacked once
    for wheel in "$CARRIED"/wheels/*.whl; do
        [ -e "$wheel" ] || continue
        mark=$ROOM/site/.$(basename "$wheel")
        [ -e "$mark" ] && continue
        python3 -m zipfile -e "$wheel" "$ROOM/site"
        touch "$mark"
    done
}

alive() { [ -e "$ROOM/$1.pid" ] && kill -0 "$(cat "$ROOM/$1.pid")" 2>/dev/null; }

start() {  # start NAME COMMAND...: in a session of its own, unless it runs or has finished
    local name=$1; shift
    if alive "$name" || [ -e "$ROOM/$name.done" ]; then return; fi
    setsid nohup bash -c 'name=$1; shift; "$@" >>"$name.log" 2>&1 && touch "$name.done" || echo "$name: exit $?" >>"$name.log"' \
        _ "$ROOM/$name" "$@" </dev/null >/dev/null 2>&1 &
    echo $! >"$ROOM/$name.pid"
}

start_all() {
    start heart env OMP_NUM_THREADS=1 python3 -m training.data.generate --lines "$lines" --out "$ROOM/audio" \
        --kind heart --hours "$HOURS" --workers $((cores > 6 ? cores - 4 : 1))
    start encode env OMP_NUM_THREADS=2 python3 -m training.lm.encode --audio "$ROOM/audio" --codec "$CARRIED/codec" \
        --out "$ROOM/codes" --delete --until "$ROOM/heart.done"
    local resume=()
    [ ! -e "$CARRIED/weights" ] || resume=(--resume "$CARRIED/weights")
    start train python3 -m training.lm.train --lines "$lines" --codes "$ROOM/codes" "$CARRIED/codes" \
        --codec "$CARRIED/codec" --run "$ROOM/run" --minutes "$MINUTES" "${resume[@]}" ${TRAIN_OPTIONS:---compile}
}

collect() {  # weights and one log into $OUT
    cp "$ROOM"/run/export/* "$OUT/" 2>/dev/null || true
    tail -n +1 "$ROOM"/*.log >"$OUT/stage2.log" 2>/dev/null || true
}
trap collect EXIT

show() {  # what the logs gained since they were last shown
    local name count
    for name in heart encode train; do
        [ -e "$ROOM/$name.log" ] || continue
        count=$(cat "$ROOM/$name.shown" 2>/dev/null || echo 0)
        tail -n +$((count + 1)) "$ROOM/$name.log" | tee "$ROOM/new"
        echo $((count + $(wc -l <"$ROOM/new"))) >"$ROOM/$name.shown"
    done
}

watch() {  # until so many seconds are left, or training is done
    restarts=0
    while [ "$(left)" -gt "$1" ]; do
        sleep 5
        show
        if [ -e "$ROOM/train.done" ]; then return 0; fi
        if ! alive train || ! { alive encode || [ -e "$ROOM/encode.done" ]; }; then
            sleep 1
            if [ -e "$ROOM/train.done" ]; then show; return 0; fi
            restarts=$((restarts + 1))
            show
            [ "$restarts" -le 3 ] || fail "training or encoding stopped again and again in this part; see the lines above"
            echo "something stopped; starting it from its last state"
        fi
        start_all
    done
}

sample() {  # held-out sentences, as codes
    [ -e "$ROOM/run/export/progress.json" ] || fail "no weights were saved"
    python3 -m training.lm.sample --lines "$lines" --codes "$ROOM/codes" "$CARRIED/codes" --weights "$ROOM/run/export" --out "$ROOM/samples" \
        --count "${SAMPLES:-20}" --clones "${CLONES:-16}"
    cp "$ROOM"/samples/* "$OUT/"
}

[ -e "$CARRIED/lines.txt.xz" ] || fail "$CARRIED is not complete: training.lm.carry makes it"
if [ "$part" = first ] || [ ! -e "$ROOM/code/training" ]; then  # what runs on must not change under it
    rm -rf "$ROOM/code" "$ROOM/carried"
    mkdir "$ROOM/code"
    cp -r src training "$ROOM/code/"
    cp -r "$CARRIED" "$ROOM/carried"
fi
CARRIED=$ROOM/carried lines=$ROOM/carried/lines.txt.xz
unpack
cd "$ROOM/code"
case $part in
first)
    python3 -m training.check_machine "$lines" ${CHECK_OPTIONS:-}
    OMP_NUM_THREADS=1 python3 -m training.data.generate --lines "$lines" --out "$ROOM/held" --kind held-heart \
        --hours "${HELD_HOURS:-0.3}" --nice 0
    python3 -m training.lm.encode --audio "$ROOM/held" --codec "$CARRIED/codec" --out "$ROOM/codes" --once
    start_all
    watch 12
    ;;
next)
    start_all
    watch 12
    ;;
last)
    start_all
    watch 75
    [ -e "$ROOM/train.done" ] || echo "training is not done; the samples are those of its last saved state"
    sample
    ;;
*) fail "unknown part $part" ;;
esac
collect
ls -l "$OUT"
echo "part $part took $((SECONDS - began)) s"
