"""HTTP answers in any pieces: what is body, what is sound, where chunks end."""

from __future__ import annotations

import io
import wave
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetts.bench.answer import Answer, BadAnswer, wav_samples

from .servers import CHUNKED, OK, chunk


def wav_file(samples: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(44100)
        writer.writeframes(samples)
    return file.getvalue()


def read(answer: Answer, data: bytes, cuts: list[int]) -> tuple[int, int, list[int]]:
    """Body bytes, audio bytes and chunks of an answer that arrives cut at these places."""
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    news = [answer.feed(memoryview(data)[low:high]) for low, high in pairwise(places)]
    return sum(one.body for one in news), sum(one.audio for one in news), [size for one in news for size in one.chunks]


@given(sizes=st.lists(st.integers(1, 300), max_size=6), cuts=st.lists(st.integers(0, 5000), max_size=12), wav=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_cut_of_a_chunked_answer_gives_the_same(sizes: list[int], cuts: list[int], wav: bool) -> None:
    header = wav_file(b"")
    parts = [*([header] if wav else []), *(bytes(size) for size in sizes)]
    answer = Answer(wav=wav)
    body, audio, chunks = read(answer, CHUNKED + b"".join(map(chunk, parts)) + b"0\r\n\r\n", cuts)
    assert (body, audio, chunks) == (sum(sizes) + len(header) * wav, sum(sizes), sizes)
    assert answer.complete
    assert answer.status == 200


@pytest.mark.parametrize("cuts", [[], list(range(200))])
def test_a_body_with_a_length_is_one_chunk(cuts: list[int]) -> None:
    answer = Answer()
    assert read(answer, OK + b"Content-Length: 50\r\nX-Sample-Rate: 44100\r\n\r\n" + bytes(50), cuts) == (50, 50, [50])
    assert answer.complete
    assert answer.headers["x-sample-rate"] == "44100"


def test_the_body_of_a_refusal_is_no_audio_and_is_kept() -> None:
    answer = Answer()
    news = answer.feed(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull")
    assert (answer.status, news.body, news.audio, answer.error, answer.complete) == (429, 4, 0, b"full", True)


def test_the_end_of_a_connection_ends_only_a_body_without_a_length() -> None:
    open_ended = Answer()
    open_ended.feed(OK + b"\r\nab")
    assert not open_ended.complete
    open_ended.close()
    assert open_ended.complete
    for beginning in (b"", OK, CHUNKED + chunk(b"ab"), OK + b"Content-Length: 3\r\n\r\nab"):
        answer = Answer()
        answer.feed(beginning)
        with pytest.raises(BadAnswer, match="ended before"):
            answer.close()


@pytest.mark.parametrize("data", [b"SSH-2.0\r\n\r\n", CHUNKED + b"zz\r\n", OK + b"Content-Length: 16\r\n\r\nthis is no sound"])
def test_what_is_no_answer_or_no_wav_file_is_told(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        Answer(wav=True).feed(data)


def test_samples_of_a_wav_file_begin_after_all_its_headers() -> None:
    file = wav_file(b"abcd")
    assert wav_samples(file) == 44
    assert wav_samples(file[:40]) is None
    extended = file[:36] + b"LIST\x03\x00\x00\x00abc\x00" + file[36:]
    assert wav_samples(extended) == 44 + 12
