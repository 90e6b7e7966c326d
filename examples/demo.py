"""The two-minute demo: start a server on duetts-mini, ask it for a sentence over HTTP, write demo.wav and describe it."""

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import wave
from pathlib import Path

SENTENCE = "Hello! This is duetts, speaking from your own machine."


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


def speak(base: str, text: str) -> tuple[bytes, float, float]:
    """Raw PCM as it streams in, seconds to the first of it, seconds to the last."""
    body = {"input": text, "response_format": "pcm", "stream_format": "audio", "seed": 7}
    request = urllib.request.Request(f"{base}/v1/audio/speech", json.dumps(body).encode(), {"Content-Type": "application/json"})
    start = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as answer:
        first = answer.read(1)
        first_audio_s = time.monotonic() - start
        pcm = first + answer.read()
    return pcm, first_audio_s, time.monotonic() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--output", type=Path, default=Path("demo.wav"))
    arguments.add_argument("--text", default=SENTENCE)
    options = arguments.parse_args()
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "duetts", "serve", "--port", str(port)])
    try:
        wait_until_ready(base, server)
        speak(base, "Warm.")  # the first request of a process also pays for the allocator
        pcm, first_audio_s, total_s = speak(base, options.text)
    finally:
        server.terminate()
        server.wait(30)
    with wave.open(str(options.output), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(44100)
        file.writeframes(pcm)
    seconds = len(pcm) / 2 / 44100
    print(f"wrote {options.output.resolve()}: {seconds:.2f} s, 44100 Hz, mono, 16 bit, {len(pcm) // 4096} frames")
    print(f"time to first audio {1000 * first_audio_s:.0f} ms, RTF {total_s / seconds:.2f}")
    print("duetts-mini is not trained yet: what you hear is noise of the right shape.")


if __name__ == "__main__":
    main()
