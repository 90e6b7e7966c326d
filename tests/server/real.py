"""The real synthesizer and engine behind a real server, in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from duetts.config import EngineConfig, Limits, ServerConfig
from duetts.engine.inprocess import start_speaker
from duetts.server.app import create_app
from duetts.serving import KEEP_ALIVE_S
from duetts.synthesizer import Synthesizer
from tests.waiting import wait_until

NATIVE = "fishaudio/s2-pro"
HALF_SIZED = Limits(max_new_tokens=60)


@dataclass(frozen=True)
class Served:
    """A running server and what tests look at behind it."""

    http: httpx.Client
    base: str
    synthesizer: Synthesizer

    def speak(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/audio/speech", json=fields)

    def settled(self) -> None:
        """Nothing is left of any request."""
        engine = self.synthesizer._speaker._engine
        wait_until(lambda: not engine.stats()["open"] and engine._codec.idle)
        engine.assert_idle()


def serve(folder: Path, **engine: Any) -> Iterator[Served]:
    speaker = start_speaker(folder, EngineConfig(device="cpu", cpu_threads=1, **engine))
    synthesizer = Synthesizer(folder, speaker, HALF_SIZED)
    app = create_app(synthesizer, ServerConfig((NATIVE,), limits=HALF_SIZED))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    base = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=base, timeout=60, trust_env=False) as http:
        yield Served(http, base, synthesizer)
    server.should_exit = True
    thread.join()
    asyncio.run(synthesizer.close())
