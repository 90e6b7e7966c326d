"""The two-minute demo: start a server on duetts-mini and ask it over HTTP for a sentence in its default voice (demo.wav), then
for one in a voice cloned from a preset's clip (demo-voice.wav)."""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import wave
from pathlib import Path
from typing import Any

SENTENCE = "Hello! This is a small voice, and it lives on your own machine."
SECOND, VOICE = "And this is somebody else. I learned to speak from one short clip.", "heart-low"
SEED = 7
RATE = 44100


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(base: str, server: "subprocess.Popen[bytes]", seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with code {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    sys.exit(f"the server was not ready within {seconds:.0f} s")


def ask(base: str, path: str) -> Any:
    with urllib.request.urlopen(f"{base}{path}", timeout=10) as answer:
        return json.load(answer)


def speak(base: str, text: str, voice: str = "default") -> tuple[bytes, float, float]:
    """Raw PCM as it streams in, seconds to the first of it, seconds to the last."""
    body = {"input": text, "voice": voice, "response_format": "pcm", "stream_format": "audio", "seed": SEED}
    request = urllib.request.Request(f"{base}/v1/audio/speech", json.dumps(body).encode(), {"Content-Type": "application/json"})
    start = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as answer:
        first = answer.read(1)
        first_audio_s = time.monotonic() - start
        pcm = first + answer.read()
    return pcm, first_audio_s, time.monotonic() - start


def save(path: Path, pcm: bytes, first_audio_s: float, total_s: float) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(pcm)
    seconds = len(pcm) / 2 / RATE
    print(f"wrote {path.resolve()}: {seconds:.2f} s, {RATE} Hz, mono, 16 bit, {len(pcm) // 4096} frames")
    print(f"time to first audio {1000 * first_audio_s:.0f} ms, RTF {total_s / seconds:.2f}")


def show(base: str, output: Path, text: str) -> None:
    """Both sentences. Presets are the voices that a server without stored voices of its own lists."""
    presets = [voice["name"] for voice in ask(base, "/v1/audio/voices")["data"] if voice["origin"] == "preset"]
    speak(base, "Warm.")  # the first request of a process also pays for the allocator
    save(output, *speak(base, text))
    if VOICE in presets:
        save(output.with_stem(f"{output.stem}-voice"), *speak(base, SECOND, VOICE))
        print(f"the second voice was cloned from the preset {VOICE!r}; there are {', '.join(presets)}")
    if ask(base, "/version")["weights"] != "trained":
        print("duetts-mini is not trained yet: what you hear is noise of the right shape, and there are no presets.")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--output", type=Path, default=Path("demo.wav"))
    arguments.add_argument("--text", default=SENTENCE)
    options = arguments.parse_args()
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as voices:
        command = [sys.executable, "-m", "duetts", "serve", "--port", str(port), "--voices-dir", voices]
        server = subprocess.Popen(command)
        try:
            wait_until_ready(base, server)
            show(base, options.output, options.text)
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()
