#!/usr/bin/env bash
# Stage 2 on one GPU: the language model. The fast teacher's audio is made again in the background, turned into codes and
# deleted; the slow teacher's codes are carried, or made likewise where its model is at hand. In parts, as stage 1: work goes on in the background between parts, and a
# part that finds it stopped starts it again where it was.
#
#   python -m training.lm.carry --stage1 DIR --out CARRIED   # before, where stage 1's results are
#   training/run_stage2.sh first SECONDS   # unpack, check, held-out clips, start audio, codes and training, watch
#   training/run_stage2.sh next  SECONDS   # unpack what came since, watch
#   training/run_stage2.sh last  SECONDS   # watch until training is done, then samples
#
# Results (averaged bf16 weights in files below 16 MiB, samples as codes, one log) are in $OUT whenever a part ends.
# Settings by environment: CARRIED (needed once), MINUTES of training in all, HOURS of the fast teacher's audio and its FIRST shard
# (those before it are carried), BLEND_HOURS of the slow one's, ROOM for everything big, CODE where src and training lie.
set -euo pipefail
part=${1:?first, next or last} limit=${2:?seconds}
began=$SECONDS
: "${OUT:?the folder for results}" "${MINUTES:=21.5}" "${HOURS:=200}" "${ROOM:=/tmp/duetts-stage2}" "${CARRIED:=scratch/stage2}"
: "${FIRST:=0}" "${BLEND_HOURS:=15}" "${BLEND_DEVICE:=cuda}" "${BLEND_WORKERS:=12}" "${HELD_HOURS:=0.3}" "${CODE:=.}"
cores=$(nproc) lines=$ROOM/carried/lines.txt.xz
mkdir -p "$OUT" "$ROOM/codes" "$ROOM/audio"
OUT=$(cd "$OUT" && pwd)
export PYTHONUNBUFFERED=1 PYTHONPATH=$ROOM/site:src:. TORCHINDUCTOR_CACHE_DIR=$ROOM/inductor TOKENIZERS_PARALLELISM=false
. "$(dirname "$0")/parts.sh"

start_audio() {
    generate heart heart "$HOURS" $((cores > 6 ? cores - 3 : 1)) audio --first "$FIRST"
    touch "$ROOM/held-blend.done"  # held-out clips of the slow teacher are carried
    start_blend
    if [ -e "$ROOM/heart.done" ] && { [ ! -e "$ROOM/blend.pid" ] || [ -e "$ROOM/blend.done" ]; }; then touch "$ROOM/audio.done"; fi
}

start_all() {
    start_audio
    start encode env OMP_NUM_THREADS=2 python3 -m training.lm.encode --audio "$ROOM/audio" --codec "$CARRIED/codec" \
        --out "$ROOM/codes" --delete --until "$ROOM/audio.done"
    local resume=()
    [ ! -e "$CARRIED/weights" ] || resume=(--resume "$CARRIED/weights")
    # One thread for each process that makes batches, else they take the cores that make audio.
    start train env OMP_NUM_THREADS=1 python3 -m training.lm.train --lines "$lines" --codes "$ROOM/codes" "$CARRIED/codes" \
        --codec "$CARRIED/codec" --run "$ROOM/run" --minutes "$MINUTES" "${resume[@]}" ${TRAIN_OPTIONS:---compile}
}

logs="heart blend blend-slow encode train"

collect() {  # weights and one log into $OUT
    cp "$ROOM"/run/export/* "$OUT/" 2>/dev/null || true
    tail -n +1 "$ROOM"/*.log >"$OUT/stage2.log" 2>/dev/null || true
}
trap collect EXIT

watch() {  # until so many seconds are left, or training is done
    restarts=0
    while [ "$(left)" -gt "$1" ]; do
        sleep 5
        show $logs
        if [ -e "$ROOM/train.done" ]; then return 0; fi
        if ! alive train || ! { alive encode || [ -e "$ROOM/encode.done" ]; }; then
            sleep 1
            if [ -e "$ROOM/train.done" ]; then show $logs; return 0; fi
            restarts=$((restarts + 1))
            show $logs
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

if [ "$part" = first ] || [ ! -e "$ROOM/code/training" ]; then  # what runs on must not change under it
    [ -e "$CARRIED/lines.txt.xz" ] || fail "$CARRIED is not complete: training.lm.carry makes it"
    rm -rf "$ROOM/code" "$ROOM/carried"
    mkdir "$ROOM/code"
    cp -r "$CODE/src" "$CODE/training" "$ROOM/code/"
    cp -r "$CARRIED" "$ROOM/carried"
fi
CARRIED=$ROOM/carried
unpack "$CARRIED/wheels" .whl .whl2
cd "$ROOM/code"
case $part in
first)
    python3 -m training.check_machine "$lines" ${CHECK_OPTIONS:-}
    OMP_NUM_THREADS=1 python3 -m training.data.generate --lines "$lines" --out "$ROOM/held" --kind held-heart \
        --hours "$HELD_HOURS" --nice 0
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
