"""The two requests of the public recipe of S2 Pro as a reader types them: `curl`, with another port."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from duetts.config import Limits, MediaConfig
from duetts.voices.fetch import Fetcher
from tests.audio.listening import hear
from tests.inputs import clip
from tests.internet import PUBLIC, Internet, listening, sending
from tests.server.real import Served

BASIC = """curl -X POST http://localhost:8000/v1/audio/speech \\
  -H "Content-Type: application/json" \\
  -d '{"model": "fishaudio/s2-pro", "input": "Hello, how are you?", "voice": "default", "response_format": "wav"}' \\
  --output output.wav
"""
CLONING = """curl -X POST http://localhost:8000/v1/audio/speech \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "fishaudio/s2-pro",
    "input": "Hello, this is a cloned voice.",
    "voice": "default",
    "ref_audio": "https://example.com/reference.wav",
    "ref_text": "Transcript of the reference audio."
  }' --output cloned.wav
"""

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="runs curl as a reader would")


def typed(command: str, served: Served, folder: Path) -> None:
    local = command.replace("http://localhost:8000", served.base).replace("curl ", "curl --fail -sS --noproxy '*' ")
    subprocess.run(["bash", "-ec", local], cwd=folder, check=True, timeout=200)


def test_the_basic_request(tiny_served: Served, tmp_path: Path) -> None:
    typed(BASIC, tiny_served, tmp_path)
    samples, rate = hear((tmp_path / "output.wav").read_bytes())
    assert rate == 44100
    assert len(samples) > 0


async def test_the_cloning_request(tiny_served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """example.com is a host of a small internet inside this machine, with a certificate for its name."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(  # noqa: ASYNC221
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=example.com", "-addext", "subjectAltName=DNS:example.com", "-keyout", str(key),
         "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate, key)
    async with listening(sending(clip("control_pcm16.wav")), server_side) as host:
        internet = Internet({"example.com": [[PUBLIC]]}, {(PUBLIC, 443): host})
        trusting = ssl.create_default_context(cafile=str(certificate))
        fetcher = Fetcher(MediaConfig(), Limits(), resolve=internet.resolve, transport=internet.transport, tls=trusting)
        monkeypatch.setattr(tiny_served.synthesizer._references, "_fetcher", fetcher)
        await asyncio.to_thread(typed, CLONING, tiny_served, tmp_path)
        fetcher.close()
    assert host.asked[0].startswith("GET /reference.wav ")
    samples, rate = hear((tmp_path / "cloned.wav").read_bytes())  # no format was asked for: WAV is this model's own
    assert rate == 44100
    assert len(samples) > 0
    assert (tmp_path / "cloned.wav").read_bytes()[:4] == b"RIFF"
