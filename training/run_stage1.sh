#!/usr/bin/env bash
# Stage 1 on one GPU: audio from the teachers, codec phase A, codes. In parts, because a rented machine may give few minutes at
# a time and take few files at once: work goes on in the background between parts, and a part that finds it stopped starts it
# again where it was.
#
#   training/run_stage1.sh first  SECONDS   # unpack, check, start audio and training, watch
#   training/run_stage1.sh next   SECONDS   # unpack what came since (the second teacher), watch
#   training/run_stage1.sh last   SECONDS   # watch until training is done, then codes
#
# Results (weights in bf16, codes, one log) are in $OUT whenever a part ends, however it ends. Settings by environment:
# MINUTES of training in all, HOURS and BLEND_HOURS of audio of the two teachers, WEIGHTS to start from (a folder), ROOM for
# everything big, CODE where src and training lie.
set -euo pipefail
part=${1:?first, next or last} limit=${2:?seconds}
began=$SECONDS
: "${OUT:?the folder for results}" "${MINUTES:=20}" "${HOURS:=20}" "${BLEND_HOURS:=20}" "${ROOM:=/tmp/duetts-stage1}"
: "${WEIGHTS:=}" "${CODE:=.}" "${HELD_HOURS:=0.15}" "${BLEND_DEVICE:=cuda}" "${BLEND_WORKERS:=12}"
lines=$ROOM/lines.txt.xz cores=$(nproc)
mkdir -p "$OUT" "$ROOM"
OUT=$(cd "$OUT" && pwd)
export PYTHONUNBUFFERED=1 PYTHONPATH=$ROOM/site:src:. TORCHINDUCTOR_CACHE_DIR=$ROOM/inductor
. "$(dirname "$0")/parts.sh"

start_heart() {
    generate held-heart held-heart "$HELD_HOURS" 4 held --nice 0
    generate heart heart "$HOURS" "$cores" audio
}

start_training() {
    local from=()
    [ -z "$WEIGHTS" ] || from=(--weights "$ROOM/start")
    start train python3 -m training.codec.train --audio "$ROOM/audio" --held-out "$ROOM/held" --run "$ROOM/run" \
        --minutes "$MINUTES" "${from[@]}" ${TRAIN_OPTIONS:---compile --blend-hours 0.5}
}

logs="held-heart heart held-blend blend blend-slow train"

collect() {  # weights and one log into $OUT
    cp "$ROOM"/run/export/codec*.safetensors "$ROOM"/run/export/readers*.safetensors \
        "$ROOM"/run/export/codec_config.json "$OUT/" 2>/dev/null || true
    tail -n +1 "$ROOM"/*.log >"$OUT/stage1.log" 2>/dev/null || true
}
trap collect EXIT

watch() {  # until so many seconds are left, or training is done
    while [ "$(left)" -gt "$1" ]; do
        sleep 5
        show $logs
        if [ $((SECONDS % 60)) -lt 6 ]; then collect; fi
        start_heart
        start_blend
        if [ -e "$ROOM/train.done" ]; then return 0; fi
        alive train || { sleep 1; [ -e "$ROOM/train.done" ] || restart_training; }
    done
}

restart_training() {
    restarts=$((${restarts:-0} + 1))
    show $logs
    [ "$restarts" -le 2 ] || fail "training stopped three times in this part; see its lines above"
    echo "training stopped; starting it from its last state"
    start_training
}

unpack .whl .whl2
[ ! -e .carry/lines.txt.xz ] || cp .carry/lines.txt.xz "$lines"
[ -e "$lines" ] || fail "the lines are not here: python3 -m training.data.texts .carry/lines.txt.xz makes them"
if [ ! -e "$ROOM/code/training" ]; then  # what runs on must not change under it
    mkdir -p "$ROOM/code"
    cp -r "$CODE/src" "$CODE/training" "$ROOM/code/"
fi
if [ -n "$WEIGHTS" ] && [ ! -e "$ROOM/start" ]; then
    mkdir "$ROOM/start"
    cp "$WEIGHTS"/*.safetensors "$ROOM/start/"
    [ ! -e .carry/readers.safetensors ] || cp .carry/readers.safetensors "$ROOM/start/"
fi
cd "$ROOM/code"
case $part in
first)
    python3 -m training.check_machine "$lines" ${CHECK_OPTIONS:-}
    start_heart
    start_training
    watch 2
    ;;
next)
    start_training
    watch 12
    ;;
last)
    start_training
    watch "${CODES_S:-120}"
    [ -e "$ROOM/train.done" ] || echo "training is not done; the codes are those of its last saved state"
    [ -e "$ROOM/run/export/codec.safetensors" ] || fail "no codec was saved"
    for name in heart blend blend-slow; do alive $name && kill -- -"$(cat "$ROOM/$name.pid")" 2>/dev/null || true; done
    minutes=$(python3 -c "print(max(0.3, ($(left) - 25) / 60))")
    encode() { python3 -m training.lm.encode --codec "$ROOM/run/export" --out "$ROOM/codes" --once "$@"; }
    encode --audio "$ROOM/held"
    encode --audio "$ROOM/audio" --minutes "$minutes"  # the slow teacher's first
    python3 -m training.lm.gather --codes "$ROOM/codes" --out "$ROOM/gathered"
    cp "$ROOM"/gathered/* "$OUT/"
    ;;
*) fail "unknown part $part" ;;
esac
collect
ls -l "$OUT"
echo "part $part took $((SECONDS - began)) s"
