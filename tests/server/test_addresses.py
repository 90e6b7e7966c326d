"""Clips by address, through every door that takes a clip: one loader, so that what is allowed or refused is so everywhere."""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ormsgpack
import pytest
from websockets.sync.client import connect

from duetts.config import Limits, MediaConfig, ServerConfig
from duetts.server.app import create_app
from duetts.types import Address
from duetts.voices.fetch import Fetcher
from tests.inputs import REF_TEXT, REFUSED_CLIPS, clip
from tests.internet import PUBLIC, Answering, Host, Internet, listening, redirecting, sending
from tests.server.conftest import NATIVE, Door, error_of
from tests.server.real import Served
from tests.server.sine import SineService
from tests.server.test_auth import serving
from tests.server.test_serve import running
from tests.waiting import LIMIT_S

CLIP = clip("control_pcm16.wav")
URL = "http://clips.example/anna.wav"


@dataclass
class Told:
    """What a door has said of a request: nothing if it was served."""

    status: int = 200
    code: str | None = None
    field: str | None = None
    message: str = ""


def told(answer: httpx.Response) -> Told:
    if answer.status_code in (200, 201):
        return Told()
    body = answer.json()
    error = body.get("error")
    if isinstance(error, dict):
        return Told(answer.status_code, error["code"], error["param"], error["message"])
    return Told(answer.status_code, body["code"], None, body["message"])


def speech(http: httpx.Client, audio: str) -> Told:
    return told(http.post("/v1/audio/speech", json={"input": "Hi.", "ref_audio": audio, "ref_text": REF_TEXT}))


def listed(http: httpx.Client, audio: str) -> Told:
    return told(http.post("/v1/audio/speech", json={"input": "Hi.", "ref_audio": [audio], "ref_text": [REF_TEXT]}))


def references(http: httpx.Client, audio: str) -> Told:
    return told(http.post("/v1/audio/speech", json={"input": "Hi.", "references": [{"audio": audio, "text": REF_TEXT}]}))


def form(http: httpx.Client, audio: str) -> Told:
    fields: dict[str, Any] = {name: (None, value) for name, value in
                              {"input": "Hi.", "ref_audio": audio, "ref_text": REF_TEXT}.items()}  # fmt: skip
    return told(http.post("/v1/audio/speech", files=fields))


def events(http: httpx.Client, audio: str) -> Told:
    body = {"input": "Hi.", "ref_audio": audio, "ref_text": REF_TEXT, "stream_format": "sse"}
    return told(http.post("/v1/audio/speech", json=body))


def batch(http: httpx.Client, audio: str) -> Told:
    body = {"items": [{"input": "Hi.", "ref_audio": audio, "ref_text": REF_TEXT}, {"input": "Hi."}]}
    first, second = http.post("/v1/audio/speech/batch", json=body).json()["results"]
    assert second["status"] == "success"
    if first["status"] == "success":
        return Told()
    error = first["error"]
    return Told({"media_domain_forbidden": 403, "local_media_forbidden": 403}.get(error["code"], 424), error["code"],
                error["param"], error["message"])  # fmt: skip


def socket(http: httpx.Client, audio: str) -> Told:
    address = str(http.base_url).replace("http", "ws", 1).rstrip("/") + "/v1/audio/speech/stream"
    with connect(address, proxy=None) as talking:
        talking.send(json.dumps({"type": "session.config", "ref_audio": audio, "ref_text": REF_TEXT}))
        answer = json.loads(talking.recv(LIMIT_S))
    if answer["type"] == "session.configured":
        return Told()
    return Told(0, answer["code"], answer.get("param"), answer["message"])


def fish(http: httpx.Client, audio: str) -> Told:
    return told(http.post("/v1/tts", json={"text": "Hi.", "references": [{"audio": audio, "text": REF_TEXT}]}))


def live(http: httpx.Client, audio: str) -> Told:
    address = str(http.base_url).replace("http", "ws", 1).rstrip("/") + "/v1/tts/live"
    request = {"text": "Hi.", "references": [{"audio": audio, "text": REF_TEXT}]}
    with connect(address, proxy=None) as talking:
        talking.send(ormsgpack.packb({"event": "start", "request": request}))
        talking.send(ormsgpack.packb({"event": "stop"}))
        while (answer := ormsgpack.unpackb(talking.recv(LIMIT_S)))["event"] != "finish":  # type: ignore[arg-type]
            pass
    return Told() if answer["reason"] == "stop" else Told(0, message=answer["message"])


def voice(http: httpx.Client, audio: str) -> Told:
    body = {"name": "anna", "audio_sample": audio, "ref_text": REF_TEXT, "consent": "yes", "overwrite": True}
    answer = http.post("/v1/audio/voices", json=body)
    if answer.status_code == 201:
        assert answer.json()["voice"]["file_size"] == len(CLIP)
    return told(answer)


def stored(http: httpx.Client, audio: str) -> Told:
    return told(
        http.post(
            "/v1/references/add",
            json={"id": f"b{zlib.crc32(audio.encode())}", "audio": audio, "text": REF_TEXT, "consent": "yes"},
        )
    )


def codec(http: httpx.Client, audio: str) -> Told:
    return told(http.post("/v1/vqgan/encode?format=json", json={"audios": [audio]}))


DOORS: list[Callable[[httpx.Client, str], Told]] = [
    speech, listed, references, form, events, batch, socket, fish, live, voice, stored, codec,
]  # fmt: skip


@asynccontextmanager
async def served(internet: Internet, tmp_path: Path, **media: Any) -> AsyncIterator[httpx.Client]:
    limits = Limits(max_body_bytes=1 << 21, reference_bytes=1 << 20)
    fetcher = Fetcher(MediaConfig(**media), limits, resolve=internet.resolve, transport=internet.transport)
    service = SineService(limits, fetcher=fetcher)
    service.config.folder.mkdir(parents=True, exist_ok=True)
    service.reset()
    with serving(create_app(service, ServerConfig((NATIVE,), limits=limits))) as http:
        yield http


async def outcomes(http: httpx.Client, audio: str) -> dict[str, Told]:
    return {door.__name__: await asyncio.to_thread(door, http, audio) for door in DOORS}


async def test_a_public_address_is_fetched_on_every_door(tmp_path: Path) -> None:
    async with listening(sending(CLIP)) as host:
        internet = Internet({"clips.example": [[PUBLIC]]}, {(PUBLIC, 80): host})
        async with served(internet, tmp_path) as http:
            for door in DOORS:
                before = host.connections
                assert await asyncio.to_thread(door, http, URL) == Told(), door.__name__
                assert host.connections > before, door.__name__


@pytest.mark.parametrize(
    ("answering", "url", "code", "status"),
    [
        (sending(CLIP), "http://127.0.0.1/x.wav", "media_domain_forbidden", 403),
        (redirecting("http://127.0.0.1/x"), URL, "media_domain_forbidden", 403),
        (sending(b"", 404), URL, "reference_fetch_failed", 424),
    ],
)
async def test_what_is_refused_is_refused_on_every_door(
    answering: Answering, url: str, code: str, status: int, tmp_path: Path
) -> None:
    async with listening(answering) as host, listening(sending(CLIP)) as inside:
        internet = Internet({"clips.example": [[PUBLIC]]}, {(PUBLIC, 80): host, ("127.0.0.1", 80): inside})
        async with served(internet, tmp_path) as http:
            for name, found in (await outcomes(http, url)).items():
                assert found.message, name
                assert found.status in (status, 0), name
                assert found.code in (code, None), name
                assert found.field in ("ref_audio", "references", "audio_sample", "audios.0", None), name
                assert url not in found.message
        assert inside.connections == 0


async def test_clips_have_the_same_bounds_by_address(tmp_path: Path) -> None:
    """Also those that unpack to an hour, and those that are no audio at all."""

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        await sending(clip(head.split()[1].removeprefix("/")))(head, writer)

    async with listening(answer) as host, served(Internet(hosts={(PUBLIC, 80): host}), tmp_path) as http:
        for name, code in REFUSED_CLIPS.items():
            for door in (speech, voice):
                found = await asyncio.to_thread(door, http, f"http://{PUBLIC}/{name}")
                assert (found.status, found.code) == (400, code), name
        assert host.connections == 2 * len(REFUSED_CLIPS)


async def test_files_of_the_operators_folder_are_read_on_every_door_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "anna.wav").write_bytes(CLIP)
    (folder / "b c.wav").write_bytes(CLIP)
    (tmp_path / "secret.wav").write_bytes(CLIP)
    (folder / "out.wav").symlink_to(tmp_path / "secret.wav")
    inside, outside = f"file://{folder}", f"file://{tmp_path}"
    good = [f"{inside}/anna.wav", f"file://localhost{folder}/b%20c.wav", "anna.wav", f"{folder}/anna.wav", "FILE:anna.wav"]
    bad = [f"{outside}/secret.wav", f"file://h{folder}/anna.wav",
           *(f"{inside}/{name}" for name in ("missing.wav", "out.wav", "%2e%2e/secret.wav"))]  # fmt: skip
    async with served(Internet(), tmp_path, folder=folder) as http:
        for address in good:
            assert await asyncio.to_thread(speech, http, address) == Told(), address
        assert set(map(str, (await outcomes(http, good[0])).values())) == {str(Told())}
        refused = [await asyncio.to_thread(speech, http, address) for address in bad]
        assert {(one.status, one.code, one.field) for one in refused} == {(403, "local_media_forbidden", "ref_audio")}
        assert len({one.message for one in refused}) == 1
        for name, found in (await outcomes(http, bad[0])).items():
            assert found.status in (403, 0), name
            assert found.code in ("local_media_forbidden", None), name


def test_an_address_reaches_the_service_as_it_is(door: Door) -> None:
    for audio, address in {
        "https://a.example/x": Address("https://a.example/x"),
        "HTTP://a.example": Address("HTTP://a.example"),
        "file:///a/b%20c.wav": Address("/a/b c.wav", local=True),
        "~/voice": Address("~/voice", local=True),
    }.items():
        assert door.speak(ref_audio=audio, ref_text="x").status_code == 403
        assert door.service.requests[-1].references[0].audio == address


def test_a_consent_must_come_itself(door: Door) -> None:
    body = {"name": "a", "language": "en", "recording": "http://127.0.0.1/x.wav"}
    error_of(door.http.post("/v1/audio/voice_consents", json=body), 400, "invalid_value", "recording")


def test_a_transcript_that_does_not_fit_is_told_of_in_the_answer(tiny_served: Served) -> None:
    sound = base64.b64encode(CLIP).decode()
    fields = {"input": "Hi.", "ref_audio": sound, "max_new_tokens": 4}
    assert "x-warnings" not in tiny_served.speak(**fields, ref_text=REF_TEXT).headers
    answer = tiny_served.speak(**fields, ref_text=REF_TEXT * 3)
    assert (answer.status_code, answer.headers["x-warnings"]) == (200, "ref_text_does_not_fit")
    items = {"items": [{**fields, "ref_text": REF_TEXT * 3}]}
    result = tiny_served.http.post("/v1/audio/speech/batch", json=items).json()["results"][0]
    assert result["warnings"] == ["ref_text_does_not_fit"]


# -- codes in the place of a clip ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/tts"])
def test_codes_may_stand_for_a_clip(door: Door, path: str) -> None:
    codes = [[1, 2, 3], [4, 5, 6]]
    text = "text" if path == "/v1/tts" else "input"
    answer = door.http.post(path, json={text: "Hi.", "references": [{"vq_codes": codes, "text": "words"}]})
    assert answer.status_code == 200
    given = door.service.requests[-1].references[0].audio
    assert isinstance(given, np.ndarray)
    assert given.tolist() == codes


@pytest.mark.parametrize("codes", [[], 5, "x", {}, [[1], [1, 2]], [[1.5]], [[True]], [["1"]], [[2**31]], [5], [[None]]])
def test_codes_of_another_shape(door: Door, codes: Any) -> None:
    message = door.refused(400, "invalid_type", "references.vq_codes", input="x", references=[{"vq_codes": codes, "text": "t"}])
    assert "references.vq_codes" in message


# -- a whole server ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def real(tiny_folder: Path, tmp_path: Path, *options: str) -> AsyncIterator[tuple[httpx.Client, Host, Host]]:
    """A server process beside two hosts on loopback, without any fake in it."""
    async with listening(sending(CLIP)) as host, listening(redirecting("http://[::1]:9/x")) as other:
        folders = {"DUETTS_VOICES_DIR": str(tmp_path / "voices"), "DUETTS_CACHE_DIR": str(tmp_path / "cache")}
        with running(str(tiny_folder), "--port", "0", *options, **folders) as server:
            http = httpx.Client(base_url=server.address, timeout=60, trust_env=False)
            await asyncio.to_thread(server.until, http, "/ready", 200)
            yield http, host, other
            await asyncio.to_thread(http.close)


async def test_the_settings_reach_a_server(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "anna.wav").write_bytes(CLIP)
    options = ("--allowed-media-domains", "127.0.0.1", "--allowed-local-media-path", str(tmp_path))
    async with real(tiny_folder, tmp_path, *options) as (http, host, other):
        for audio in (f"http://127.0.0.1:{host.port}/x.wav", "anna.wav"):
            body = {"input": "Hi.", "ref_audio": audio, "ref_text": REF_TEXT, "max_new_tokens": 4}
            answer = await asyncio.to_thread(http.post, "/v1/audio/speech", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["X-Reference-Cache"] == ("miss" if audio.startswith("http") else "hit")
        assert (await asyncio.to_thread(speech, http, f"http://127.0.0.1:{other.port}/x.wav")).code == "media_domain_forbidden"
        assert (host.connections, other.connections) == (1, 1)
