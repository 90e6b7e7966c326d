"""OpenAI's own client: complete, streamed and as events, and what it does again by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from duetts.errors import EmptyGeneration, NotReady, Overloaded
from duetts.server.schemas import OPENAI_ALIASES
from tests.audio.listening import hear
from tests.inputs import REF_TEXT, clip
from tests.server.conftest import NATIVE, Door
from tests.server.sine import Knobs
from tests.server.test_events import events_of, joined

WANTED: dict[str, Any] = {"model": NATIVE, "voice": "default", "input": "Hello.", "extra_body": {"seed": 3}}


@contextmanager
def client(door: Door, seen: list[int] | None = None, **options: Any) -> Iterator[openai.OpenAI]:
    """A client, and the statuses that it sees. After the first one the service is well."""

    def note(answer: httpx.Response) -> None:
        door.service.knobs = Knobs()
        if seen is not None:
            seen.append(answer.status_code)

    http = httpx.Client(trust_env=False, event_hooks={"response": [note]})
    with openai.OpenAI(base_url=f"http://127.0.0.1:{door.port}/v1", api_key="none", http_client=http, **options) as own:
        yield own


def test_it_speaks_streams_and_tells_events_in_every_format(door: Door) -> None:
    with client(door) as own:
        for name in ("mp3", "opus", "aac", "flac", "wav", "pcm"):
            wanted = {**WANTED, "response_format": name, "speed": 1.25}
            whole = own.audio.speech.create(**wanted).read()
            with own.audio.speech.with_streaming_response.create(**wanted, stream_format="audio") as answer:
                assert answer.headers["x-seed"] == "3"
                streamed = b"".join(answer.iter_bytes())
            with own.audio.speech.with_streaming_response.create(**wanted, stream_format="sse") as answer:
                assert joined(events_of("\n".join(answer.iter_lines()) + "\n")) == streamed
            header = 44 if name == "wav" else 0  # a stream does not know its sizes
            assert streamed[header:] == whole[header:]
            assert name == "pcm" or len(hear(whole)[0])


def test_it_lists_models_and_names_what_is_wrong(door: Door) -> None:
    seen: list[int] = []
    with client(door, seen) as own:
        assert [model.id for model in own.models.list()] == [NATIVE, "second", *OPENAI_ALIASES]
        for fields, code, param in (
            ({"voice": "alloy"}, "unknown_voice", "voice"), ({"speed": 5.0}, "out_of_range", "speed"),
            ({"input": " "}, "invalid_value", "input"),
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError) as caught:
                own.audio.speech.create(**{**WANTED, **fields})
            assert (caught.value.code, caught.value.param) == (code, param)
            assert caught.value.request_id
    assert seen == [200, 400, 400, 400]  # what cannot succeed is not asked again


@pytest.mark.parametrize(
    ("error", "status"),
    [(Overloaded("full", retry_after_s=0.1), 429), (NotReady("loading", retry_after_s=0.1), 503)],
    ids=["full", "not ready"],
)
def test_it_comes_back_when_it_is_told_to(door: Door, error: Exception, status: int) -> None:
    """`Retry-After` says when, in whole seconds."""
    seen: list[int] = []
    with client(door, seen) as own:
        door.service.knobs = Knobs(error=error, error_at=-1)
        assert own.audio.speech.create(**WANTED).read()
    assert seen == [status, 200]


def test_it_does_not_repeat_what_only_burns_the_device(door: Door) -> None:
    """By itself it would repeat every 5xx and every 409; `x-should-retry: false` keeps it from that."""
    seen: list[int] = []
    with client(door, seen) as own:
        door.service.knobs = Knobs(error=EmptyGeneration("nothing"), error_at=-1)
        with pytest.raises(openai.InternalServerError):
            own.audio.speech.create(**WANTED)
        voice: dict[str, Any] = {
            "name": "Anna", "consent": "c", "audio_sample": ("anna.wav", clip("control_pcm16.wav"), "audio/wav"),
            "extra_body": {"ref_text": REF_TEXT},
        }  # fmt: skip
        own.audio.voices.create(**voice)
        with pytest.raises(openai.ConflictError):
            own.audio.voices.create(**voice)
    assert seen == [500, 201, 409]
