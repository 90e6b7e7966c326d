"""The messages: everything comes back as it was, and nothing that is damaged is taken for a message."""

import inspect
from dataclasses import fields, replace
from typing import Any

import numpy as np
import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetts import errors
from duetts.config import EngineConfig, ProcessConfig
from duetts.engine import wire
from duetts.engine.life import Orders
from duetts.engine.wire import Message
from duetts.errors import DuettsError, EngineFailure, WireError
from duetts.types import Chunk, Outcome, Sampling, SpeakerInfo, Timings, Utterance

INFO = SpeakerInfo("fake", 44100, 8, 4, 100)
VOCABULARY = (500, 100)
PROMPT = np.arange(15, dtype=np.int32).reshape(5, 3)
PLAIN = Utterance("r1", PROMPT, Sampling(0.7, top_k=5), -(2**63), 20, timeout_s=2.5, streaming=True, voice_key="änna")


def through(message: Message) -> Message:
    """As it arrives."""
    return wire.unpack("life", wire.pack("life", message, 3))


def speak_with(**changes: Any) -> Message:
    message = wire.speak(1, PLAIN)
    message.values["utterance"].update(changes)
    return message


def test_an_utterance_comes_back() -> None:
    message = through(wire.speak(7, PLAIN))
    assert (message.kind, message.values["id"], message.place) == ("speak", 7, 3)
    found = wire.read_utterance(message, INFO, VOCABULARY)
    assert np.array_equal(found.prompt, PROMPT)
    assert found.prompt.flags.writeable
    for field in fields(Utterance):
        if field.name != "prompt":
            assert getattr(found, field.name) == getattr(PLAIN, field.name), field.name


def test_a_prompt_of_another_layout_travels_in_rows() -> None:
    prompt = np.asfortranarray(PROMPT)
    assert np.array_equal(
        wire.read_utterance(through(wire.speak(1, replace(PLAIN, prompt=prompt))), INFO, VOCABULARY).prompt, PROMPT
    )


def test_chunks_outcomes_waves_and_codes_come_back() -> None:
    chunk = Chunk(bytes(range(32)), np.arange(8, dtype=np.int32).reshape(4, 2))
    message = through(wire.chunk(4, 9, chunk))
    found = wire.read_chunk(message, INFO)
    assert (found.pcm, found.codes.tolist(), message.values["number"]) == (chunk.pcm, chunk.codes.tolist(), 9)
    assert message.parts[0] == chunk.pcm  # raw, beside the header
    outcome = Outcome("timeout", 3, 4, Timings(0.1, 0.2, 0.3, 4), errors.DeadlineExceeded("late"))
    back = wire.read_end(through(wire.end(4, 2, outcome)))
    assert replace(back, error=None) == replace(outcome, error=None)
    assert (type(back.error), str(back.error)) == (errors.DeadlineExceeded, "late")
    wave = np.linspace(-1, 1, 7, dtype=np.float32)
    assert np.array_equal(wire.read_wave(through(wire.encode(1, wave))), wave)
    assert through(wire.codes(1, chunk.codes)).array(0, "<i4", 4).tolist() == chunk.codes.tolist()


def every_error() -> list[DuettsError]:
    """One of every class of the tree, with whatever it must be given."""
    made: list[DuettsError] = []
    for kind in wire._error_classes().values():
        if kind.__module__ != errors.__name__:
            continue
        taken = inspect.signature(kind.__init__).parameters
        options: dict[str, Any] = {"field": "input", "code": "odd", "retry_after_s": 2.5}
        made.append(kind("why", **{name: value for name, value in options.items() if name in taken}))
    return made


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_every_error_comes_back_as_itself(error: DuettsError) -> None:
    found = wire.error_from_plain(through(wire.refused(1, error)).take("error", dict))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


def test_the_tree_was_walked() -> None:
    assert {"Overloaded", "EmptyGeneration", "ModelNotFound", "WireError"} <= {type(error).__name__ for error in every_error()}


def test_foreign_errors_are_engine_failures_without_their_text() -> None:
    found = wire.error_from_plain(wire.error_to_plain(ValueError("what a user wrote")))
    assert type(found) is EngineFailure
    assert "what a user wrote" not in str(found)
    unknown = wire.error_from_plain({"class": "Novel", "text": "from a later version", "attributes": {}})
    assert type(unknown) is EngineFailure
    assert "Novel: from a later version" in str(unknown)


def test_orders_come_back_through_a_stream(tmp_path: Any) -> None:
    orders = Orders(1, "ipc://x", 5, "life", 77, str(tmp_path), EngineConfig(device="cpu", seed=5), ProcessConfig(engines=3))
    (tmp_path / "orders").write_bytes(orders.pack() + b"later")
    with (tmp_path / "orders").open("rb") as stream:
        assert Orders.read(stream) == orders
    (tmp_path / "none").write_bytes(b"")
    with (tmp_path / "none").open("rb") as stream, pytest.raises(WireError):
        Orders.read(stream)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (ormsgpack.packb([1]), "no map"),
        (ormsgpack.packb({"v": 2, "of": "life", "kind": "beat", "place": 0}), "version 2; version 1 is spoken here"),
        (ormsgpack.packb({"of": "life", "kind": "beat"}), "version None"),
        (ormsgpack.packb({"v": 1, "of": "other", "kind": "beat"}), "another life"),
        (ormsgpack.packb({"v": 1, "of": "life", "kind": 3}), "no kind"),
        (ormsgpack.packb({"v": 1, "of": "life", "kind": "beat", "place": "x"}), "no place"),
    ],
)
def test_damaged_headers_are_refused(header: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        wire.unpack("life", [header])
    with pytest.raises(WireError):
        wire.unpack("life", [])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (speak_with(seed="x"), "Utterance.seed"),
        (speak_with(seed=1.5), "Utterance.seed"),
        (speak_with(max_frames=True), "Utterance.max_frames"),
        (speak_with(max_frames=0), "do not fit"),
        (speak_with(max_frames=98), "98 frames do not fit 100"),
        (speak_with(timeout_s="soon"), "Utterance.timeout_s"),
        (speak_with(sampling=3), "Utterance.sampling"),
        (speak_with(sampling={"temperature": "hot"}), "Sampling.temperature"),
        (speak_with(surprise=1), "unknown"),
        (Message("speak", {"id": 1, "utterance": {}}, (PROMPT.tobytes(),)), "missing"),
        (Message("speak", {"id": 1, "utterance": []}, (PROMPT.tobytes(),)), "no dict"),
        (Message("speak", wire.speak(1, PLAIN).values), "part 0 is missing"),
        (Message("speak", wire.speak(1, PLAIN).values, (b"",)), "do not fit"),
        (Message("speak", wire.speak(1, PLAIN).values, (PROMPT.tobytes()[:-1],)), "rows"),
        (wire.speak(1, replace(PLAIN, prompt=PROMPT - 1)), "-1"),
        (wire.speak(1, replace(PLAIN, prompt=PROMPT + 498)), "500"),
        (wire.speak(1, replace(PLAIN, prompt=PROMPT + 90)), "104"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_utterances_that_no_engine_must_see(message: Message, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        wire.read_utterance(through(message), INFO, VOCABULARY)


@pytest.mark.parametrize(
    "parts",
    [(b"", b""), (bytes(32), bytes(16)), (bytes(31), bytes(32)), (bytes(32), bytes(33)), (bytes(32),), ()],
    ids=str,
)
def test_chunks_that_are_not_whole_are_refused(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(WireError):
        wire.read_chunk(through(Message("chunk", {"id": 1, "number": 0, "frames": 2}, parts)), INFO)


@pytest.mark.parametrize("wave", [np.zeros(0, np.float32), np.array([1, np.nan], np.float32), np.array([np.inf], np.float32)])
def test_waves_that_are_none_are_refused(wave: Any) -> None:
    with pytest.raises(WireError):
        wire.read_wave(through(wire.encode(1, wave)))


def test_a_message_that_could_not_be_received_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(WireError, match="4000 bytes; at most 1000"):
        wire.pack("life", wire.encode(1, np.zeros(1000, np.float32)), 0)


def test_a_text_that_has_no_form_is_not_sent() -> None:
    with pytest.raises(WireError, match="speak"):
        wire.pack("life", wire.speak(1, replace(PLAIN, voice_key="half \udc80")), 0)


@given(st.lists(st.binary(max_size=40), max_size=3))
def test_any_bytes_are_a_message_or_refused(parts: list[bytes]) -> None:
    with pytest.raises(WireError):
        wire.unpack("life", parts)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["utterance", "sampling", "seed", "id", "max_frames", "timeout_s", "request_id"]), VALUES)
def test_any_value_in_any_place_is_read_or_refused(name: str, value: Any) -> None:
    message = wire.speak(1, PLAIN)
    target = message.values if name in ("utterance", "id") else message.values["utterance"]
    target[name] = value
    try:
        found = wire.read_utterance(through(message), INFO, VOCABULARY)
    except WireError:
        return
    assert isinstance(found.seed, int)
    assert isinstance(found.sampling, Sampling)
    assert 1 <= found.max_frames <= 97
