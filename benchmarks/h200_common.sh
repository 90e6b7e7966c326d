# What h200.sh and h200x8.sh share; read by them, not run. They set OUT, PYTHON, LIMIT, LOG and WATCH, stand in the root of the
# tree, and have `stop`, which ends their servers.

WORK=$(mktemp -d)
export DUETTS_CACHE_DIR=$WORK/cache DUETTS_VOICES_DIR=$WORK/voices # nothing of an earlier run is found

say() { printf '%4ds  %s\n' "$SECONDS" "$*" | tee -a "$LOG"; }
left() { echo $((LIMIT - SECONDS)); }

end() {
    stop
    [ -n "$WATCH" ] && kill "$WATCH" 2>/dev/null
    rm -rf "$WORK"
    say "end"
}

# What duetts needs, from WHEELS if that is set: a folder or a tar file of wheels. duetts itself is run from this tree.
install_wheels() {
    [ -n "${WHEELS:-}" ] || return 0
    local wheels=$WHEELS known=$WORK/known/duetts.dist-info
    [ -f "$WHEELS" ] && { wheels=$WORK/wheels; "$PYTHON" -m tarfile -e "$WHEELS" "$wheels" || exit 1; }
    "$PYTHON" -m pip install --quiet --no-index --find-links "$wheels" fastapi 'uvicorn[standard]' python-multipart av soxr \
        pyzmq ormsgpack sentencex prometheus-client typer pyyaml tokenizers safetensors huggingface_hub httpx || exit 1
    mkdir -p "$known" # what it asks for is the number of its version
    { echo 'Metadata-Version: 2.1'; echo 'Name: duetts'; sed -n 's/^version = "\(.*\)"/Version: \1/p' pyproject.toml; } >"$known/METADATA"
    export PYTHONPATH=$PWD/src:$WORK/known
}

# Clocks, power and memory of the cards every second, into OUT.
watch_cards() {
    command -v nvidia-smi >/dev/null || return 0
    nvidia-smi --query-gpu=timestamp,index,clocks.sm,clocks.mem,power.draw,memory.used,utilization.gpu,temperature.gpu \
        --format=csv -l 1 >>"$OUT/cards.csv" 2>&1 &
    WATCH=$!
}
