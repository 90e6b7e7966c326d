"""Stored voices with the real synthesizer and engine on the tiny model, over real HTTP: restarts, two servers, presets."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from duetts.config import EngineConfig, Limits, ServerConfig, VoicesConfig
from duetts.engine.inprocess import start_speaker
from duetts.errors import ConfigError
from duetts.server.app import create_app
from duetts.serving import KEEP_ALIVE_S
from duetts.synthesizer import Synthesizer
from duetts.types import Utterance
from duetts.voices.store import RECORD

from ..inputs import REF_TEXT, clip
from .conftest import error_of

NATIVE = "fishaudio/s2-pro"
CLIP = clip("control_pcm16.wav")
LIMITS = Limits(max_new_tokens=60, reference_disk_bytes=0)
SAY = {"input": "Hello, how are you?", "response_format": "pcm", "seed": 5, "max_new_tokens": 12}


@dataclass
class Served:
    """A running server, its synthesizer, and every utterance that its engine was given."""

    http: httpx.Client
    synthesizer: Synthesizer
    utterances: list[Utterance]

    def speak(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/audio/speech", json={**SAY, **fields})

    def clone(self) -> bytes:
        """The same by a clip in the request."""
        data = {**SAY, "ref_text": REF_TEXT}
        answer = self.http.post("/v1/audio/speech", data=data, files={"ref_audio": ("a.wav", CLIP)})
        assert answer.status_code == 200, answer.text
        return answer.content

    def add(self, name: str = "Anna", **fields: Any) -> httpx.Response:
        data = {"name": name, "consent": "c", "ref_text": REF_TEXT, **fields}
        return self.http.post("/v1/audio/voices", data=data, files={"audio_sample": ("a.wav", CLIP)})


@contextmanager
def serving(model: Path, folder: Path, default: str = "auto", **engine: Any) -> Iterator[Served]:
    speaker = start_speaker(model, EngineConfig(device="cpu", cpu_threads=1, **engine))
    voices = VoicesConfig(folder, default)
    synthesizer = Synthesizer(model, speaker, LIMITS, voices)
    utterances: list[Utterance] = []
    speak = speaker.speak

    def noting(utterance: Utterance) -> Any:
        utterances.append(utterance)
        return speak(utterance)

    speaker.speak = noting  # type: ignore[method-assign]
    app = create_app(synthesizer, ServerConfig((NATIVE,), limits=LIMITS, voices=voices))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    base = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=base, timeout=60, trust_env=False) as http:
        # FastAPI makes its routes at the first request and silences all threads' warnings meanwhile: one server at a time.
        assert http.get("/no/such/path").status_code == 404
        yield Served(http, synthesizer, utterances)
    server.should_exit = True
    thread.join()
    asyncio.run(synthesizer.close())


def with_presets(tiny_folder: Path, folder: Path, default: str | None) -> Path:
    """A copy of the tiny model with two voices, made by a server that stored them."""
    model = folder / "model"
    shutil.copytree(tiny_folder, model)
    with serving(tiny_folder, folder / "made") as served:
        served.add("Bert")
        served.add("Anna", ref_text="Other words are said here.")
    shutil.copytree(folder / "made", model / "voices")
    for record in (model / "voices").glob(f"*/{RECORD}"):
        values = json.loads(record.read_text())
        record.write_text(json.dumps({**values, "default": values["name"] == default}))
    return model


def test_a_stored_voice_is_the_clip_to_the_byte_also_after_a_restart(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path) as served:
        cloned, bare = served.clone(), served.speak().content
        assert served.add().status_code == 201
        answer = served.speak(voice="anna")
        assert answer.content == cloned != bare
        by_clip, _, by_name = served.utterances
        assert np.array_equal(by_clip.prompt, by_name.prompt)
        assert by_clip.voice_key == by_name.voice_key != ""
        assert by_clip.shared_positions == by_name.shared_positions > 87  # the frames of 4 seconds
        stats = served.synthesizer.stats()
        assert stats["reference_misses"] == 1
    with serving(tiny_folder, tmp_path) as served:
        answers = [served.speak(voice=name) for name in ("Anna", "ANNA", "anna")]
        assert {answer.content for answer in answers} == {cloned}
        assert {answer.headers["X-Reference-Cache"] for answer in answers} == {"hit"}
        stats = served.synthesizer.stats()
        assert (stats["reference_misses"], stats["voice_misses"], stats["voice_hits"]) == (0, 0, 3)
        assert served.synthesizer._references.num_decoded == 0


def test_two_servers_share_a_folder_and_running_speech_keeps_its_voice(endless_folder: Path, tmp_path: Path) -> None:
    with serving(endless_folder, tmp_path) as one, serving(endless_folder, tmp_path) as two:
        assert one.add().status_code == 201
        whole = two.speak(voice="anna", max_new_tokens=60).content
        streaming = {**SAY, "voice": "anna", "max_new_tokens": 60, "stream_format": "audio"}
        with two.http.stream("POST", "/v1/audio/speech", json=streaming) as answer:
            pieces = answer.iter_raw()
            first = next(pieces)
            assert one.http.delete("/v1/audio/voices/anna").status_code == 200
            error_of(two.http.post("/v1/audio/speech", json={**SAY, "voice": "anna"}), 400, "unknown_voice", "voice")
            assert first + b"".join(pieces) == whole


def test_of_uploads_at_once_to_two_servers_one_wins(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path) as one, serving(tiny_folder, tmp_path) as two, ThreadPoolExecutor(8) as pool:
        work = [pool.submit(server.add, "Anna", ref_text=f"Words {i}.") for i in range(4) for server in (one, two)]
        codes = sorted(future.result().status_code for future in work)
        assert codes == [201] + [409] * 7
        assert one.speak(voice="anna").content == two.speak(voice="anna").content


def test_what_is_too_long_for_the_model_is_no_voice(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, max_model_len=256) as served:
        error_of(served.add(ref_text="many words " * 30), 400, "context_length_exceeded", "ref_text")
        error_of(served.add(ref_text="<|im_end|>"), 400, "unsupported_control_token", "ref_text")
        assert served.http.get("/v1/audio/voices").json()["data"] == []


@pytest.mark.parametrize("default", [None, "Bert"])
def test_presets_of_the_model_folder(tiny_folder: Path, tmp_path: Path, default: str | None) -> None:
    model = with_presets(tiny_folder, tmp_path, default)
    for path in (model / "voices").rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    with serving(model, tmp_path / "voices") as served:
        plain = served.speak()
        assert plain.headers["X-Voice-Resolved"] == (default or "Anna")
        assert served.speak(voice=default or "Anna").content == plain.content
        assert served.speak(voice="bert").content != served.speak(voice="anna").content
        assert served.synthesizer.stats()["reference_misses"] == 0
        listed = served.http.get("/v1/audio/voices").json()
        assert [voice["id"] for voice in listed["voices"]] == ["default", "Anna", "Bert"]
        assert [voice["origin"] for voice in listed["data"]] == ["preset", "preset"]
        assert listed["uploaded_voices"] == []
        error_of(served.http.delete("/v1/audio/voices/bert"), 403, "voice_protected", "name")
        error_of(served.add("BERT", overwrite="true"), 400, "invalid_value", "name")
        assert not (tmp_path / "voices").exists()


def test_a_clip_of_the_models_own_is_the_default_from_then_on(tiny_folder: Path, tmp_path: Path) -> None:
    """With a named seed the untrained model may hum one; trained weights do so by themselves."""
    with serving(tiny_folder, tmp_path / "auto") as served:
        assert served.speak().headers["X-Voice-Resolved"] == "none"
    with serving(tiny_folder, tmp_path, "seed:3") as served:
        first = served.speak()
        assert first.headers["X-Voice-Resolved"].startswith("seed-3-")
        assert served.speak(voice="none").content != first.content
        assert len(served.utterances) == 3
    with serving(tiny_folder, tmp_path, "seed:3") as served:
        again = served.speak()
        assert again.content == first.content
        assert len(served.utterances) == 1
        assert served.synthesizer.stats()["reference_misses"] == 0


def test_a_default_that_is_not_there_stops_the_start(tiny_folder: Path, tmp_path: Path) -> None:
    speaker = start_speaker(tiny_folder, EngineConfig(device="cpu", cpu_threads=1))
    synthesizer = Synthesizer(tiny_folder, speaker, LIMITS, VoicesConfig(tmp_path, "nobody"))

    async def start() -> None:
        try:
            with pytest.raises(ConfigError, match="nobody"):
                await synthesizer.prepare()
        finally:
            await synthesizer.close()

    asyncio.run(start())
