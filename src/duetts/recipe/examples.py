"""The parts of a recipe that are alike on all hardware: installing, checking, requests, and what one should know."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

BASE = "http://127.0.0.1:8000"
TORCH = {
    "nvidia": (["pip", "install", "torch>=2.11"], "torch with CUDA"),
    "amd": (["pip", "install", "torch>=2.11", "--index-url", "https://download.pytorch.org/whl/rocm7.1"],
            "torch with ROCm; which version is right depends on the driver"),
    "cpu": (["pip", "install", "torch>=2.11", "--index-url", "https://download.pytorch.org/whl/cpu"], "torch without CUDA"),
}  # fmt: skip
IMAGE = "python:3.12"
CLIP = "https://example.com/reference.wav"
GUIDE = (Path(__file__).parent / "guide.md").read_text(encoding="utf-8")


def install(brand: str) -> list[dict[str, Any]]:
    """Commands in their order, from a checkout of duetts."""
    torch, note = TORCH[brand]
    steps = [("A place of its own; activate it with `. .venv/bin/activate`", ["python3", "-m", "venv", ".venv"]), (note, torch),
             ("duetts, in the folder of its checkout", ["pip", "install", "."])]  # fmt: skip
    return [{"note": note, "command": shlex.join(argv), "argv": argv} for note, argv in steps]


def docker_argv(argv: list[str], brand: str, visible: str) -> list[str]:
    """The same in a container of Python's image, from a checkout of duetts. Nobody has published an image with duetts in it."""
    devices = {"nvidia": ["--gpus", f'"device={visible}"' if visible else "all"], "cpu": []}.get(
        brand, ["--device", "/dev/kfd", "--device", "/dev/dri"]
    )
    torch = shlex.join(TORCH[brand][0])
    inner = f"{torch} && pip install /duetts && exec {shlex.join([*argv, '--host', '0.0.0.0'])}"
    mounts = ["-v", ".:/duetts", "-v", "duetts-models:/root/.cache/huggingface", "-p", "127.0.0.1:8000:8000"]
    return ["docker", "run", "--rm", *devices, *mounts, IMAGE, "sh", "-c", inner]


def verify(model: str) -> list[dict[str, str]]:
    """Commands that tell whether all is well."""
    kernel = "from duetts.attention import fish_kvcache_attn as f; print(f.is_available(), f.load_error())"
    return [
        {"note": "Before the start: files, sizes, devices, kernels", "command": shlex.join(["duetts", "doctor", model])},
        {"note": "Whether decode attention has its kernel", "command": shlex.join(["python", "-c", kernel])},
        {"note": "200 once a request would be taken", "command": f"curl -i {BASE}/ready"},
    ]


def examples(model: str, task: str) -> list[dict[str, str]]:
    """Requests for a terminal and for Python."""
    plain = {"model": model, "input": "Hello, how are you?", "voice": "default", "response_format": "wav"}
    clone = {
        "model": model,
        "input": "Hello, this is a cloned voice.",
        "ref_audio": CLIP,
        "ref_text": "Transcript of the clip.",
    }
    stream = {**plain, "response_format": "pcm", "stream_format": "audio"}
    bodies = {"output.wav": plain, "cloned.wav": clone, "output.pcm": stream}
    return [
        {"task": task, "endpoint": "/v1/audio/speech", "curl": _curl(body, file), "python": _python(body, file)}
        for file, body in bodies.items()
    ]


def _curl(body: dict[str, str], file: str) -> str:
    data = shlex.quote(json.dumps(body))
    return f"curl {BASE}/v1/audio/speech -H 'Content-Type: application/json' -d {data} --output {file}"


def _python(body: dict[str, str], file: str) -> str:
    return f"""import httpx

body = {body!r}
with httpx.stream("POST", "{BASE}/v1/audio/speech", json=body, timeout=None) as answer, open({file!r}, "wb") as file:
    answer.raise_for_status()
    for part in answer.iter_bytes():
        file.write(part)
"""
