"""MessagePack bodies and frames: what is whole is read, bombs are refused before they are unpacked."""

import time
import tracemalloc
from contextlib import suppress

import ormsgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetts.errors import InvalidRequest
from duetts.server.body import MAX_DEPTH, MAX_VALUES, parse_msgpack

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=12,
)  # fmt: skip
MAPS = st.dictionaries(st.text(max_size=10), VALUES, max_size=20)


@given(MAPS)
@settings(deadline=None, max_examples=40)
def test_maps_are_read_as_they_are(value: dict[str, object]) -> None:
    assert parse_msgpack(ormsgpack.packb(value), "it") == value


@given(st.binary(max_size=200) | MAPS.map(ormsgpack.packb), st.integers(0, 300), st.binary(max_size=3))
@settings(deadline=None, max_examples=100)
def test_damage_is_refused_or_read_but_never_more(data: bytes, cut: int, change: bytes) -> None:
    damaged = data[:cut] + change + data[cut + len(change) :]
    with suppress(InvalidRequest):
        assert isinstance(parse_msgpack(damaged, "it"), dict)


@given(MAPS.map(ormsgpack.packb))
@settings(deadline=None, max_examples=40)
def test_a_part_and_more_than_a_whole_are_refused(data: bytes) -> None:
    for damaged in (data[:-1], data + b"\xc0"):
        with pytest.raises(InvalidRequest, match="not valid msgpack"):
            parse_msgpack(damaged, "it")


BOMBS = {
    "long array": (b"\x81\xa1a\xdd\xff\xff\xff\xff", "valid"),
    "long map": (b"\xdf\xff\xff\xff\xff", "valid"),
    "long bytes": (b"\x81\xa1a\xc6\xff\xff\xff\xff", "valid"),
    "long text": (b"\x81\xa1a\xdb\xff\xff\xff\xff", "valid"),
    "long extension": (b"\x81\xa1a\xc9\xff\xff\xff\xff\x01", "valid"),
    "many nulls": (b"\x81\xa1a\xdd\x00\x7f\xff\xff" + b"\xc0" * 0x7FFFFF, f"{MAX_VALUES} values"),
    "many arrays": (b"\x81\xa1a\xdd\x00\x7f\xff\xff" + b"\x90" * 0x7FFFFF, f"{MAX_VALUES} values"),
    "many maps": (b"\x81\xa1a\xdd\x00\x7f\xff\xff" + b"\x80" * 0x7FFFFF, f"{MAX_VALUES} values"),
    "deep arrays": (b"\x81\xa1a" + b"\x91" * 1_000_000 + b"\xc0", f"{MAX_DEPTH} levels"),
    "deep maps": (b"\x81\xa1a" * 1_000_000 + b"\xc0", f"{MAX_DEPTH} levels"),
    "unused byte": (b"\xc1", "valid"),
    "no map": (b"\x90", "map"),
    "nothing": (b"", "valid"),
    "number as key": (b"\x81\x01\x02", "valid"),
    "extension": (b"\x81\xa1a\xd4\x01\x00", "valid"),
    "timestamp": (b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", "valid"),
    "no UTF-8": (b"\x81\xa1a\xa1\xff", "valid"),
}


@pytest.mark.parametrize(("data", "message"), BOMBS.values(), ids=BOMBS)
def test_bombs_cost_nothing(data: bytes, message: str) -> None:
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(InvalidRequest, match=message):
        parse_msgpack(data, "it")
    assert time.process_time() - began < 10
    assert tracemalloc.get_traced_memory()[1] < 5 << 20
    tracemalloc.stop()
