"""The bytes of each format: what FFmpeg hears in them, whole, in part and joined, and what is said if one is missing."""

import io
import os
import struct
import wave
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetts.audio.encode import Encoder, open_encoder, wav_file, wav_header, with_exact_sizes
from duetts.audio.formats import FORMAT_NAMES, FORMATS, available_formats, choose_bitrate, choose_rate, find_format
from duetts.errors import InvalidRequest

from .listening import RATE, as_pcm, hear, largest_step, level_db, middle, pitch, tone

PCM = struct.pack("<5h", 0, 1, -1, 32767, -32768)
CODED = tuple(name for name, chosen in FORMATS.items() if chosen.codec)
EXACT = ("wav", "flac", "opus")
CHUNK = 2 * 2048  # bytes of a codec frame


def native(name: str) -> int:
    return choose_rate(FORMATS[name], RATE, None)


def pieces(encoder: Encoder, pcm: bytes, sizes: list[int] | None = None) -> list[bytes]:
    """What an encoder gives for PCM that comes in pieces of these sizes, over and over, and at its end."""
    written, at, count = [], 0, 0
    while at < len(pcm):
        size = sizes[count % len(sizes)] if sizes else CHUNK
        written.append(encoder.write(pcm[at : at + size]))
        at, count = at + size, count + 1
    return [*written, encoder.finish()]


def encode(name: str, pcm: bytes, rate: int | None = None, bitrate: int | None = None, sizes: list[int] | None = None) -> bytes:
    return b"".join(pieces(open_encoder(name, rate or native(name), bitrate), pcm, sizes))


def test_a_whole_wav_has_exact_sizes() -> None:
    data = with_exact_sizes("wav", 44100, encode("wav", PCM))
    assert data == wav_file(PCM, 44100)
    assert len(data) == 44 + len(PCM)
    assert struct.unpack_from("<I", data, 4) == (36 + len(PCM),)
    with wave.open(io.BytesIO(data)) as reader:
        assert reader.getparams()[:4] == (1, 2, 44100, 5)
        assert reader.readframes(5) == PCM


def test_a_streamed_wav_has_one_header_with_open_sizes() -> None:
    encoder = open_encoder("wav", 24000)
    nothing, first, second, last = encoder.write(b""), encoder.write(PCM), encoder.write(PCM), encoder.finish()
    assert first[:44] == wav_header(24000, None)
    assert struct.unpack_from("<I", first, 4) == struct.unpack_from("<I", first, 40) == (0xFFFFFFFF,)
    assert struct.unpack_from("<I", first, 24) == (24000,)
    assert (nothing, first[44:], second, last) == (b"", PCM, PCM, b"")


def test_a_wav_without_samples_is_a_header() -> None:
    assert with_exact_sizes("wav", 8000, open_encoder("wav", 8000).finish()) == wav_header(8000, 0)


def test_sizes_beyond_the_header_are_left_open() -> None:
    assert wav_header(8000, 1 << 33) == wav_header(8000, None)


def test_pcm_is_the_samples() -> None:
    assert encode("pcm", PCM) == PCM
    assert find_format("pcm").content_type.format(rate=24000) == "audio/pcm; rate=24000; channels=1"


def test_every_format_is_written_here() -> None:
    assert available_formats() == FORMAT_NAMES == ("wav", "pcm", "mp3", "opus", "flac", "aac")


@pytest.mark.parametrize(("name", "rate"), [(name, rate) for name in CODED for rate in FORMATS[name].rates])
def test_a_tone_is_heard_as_it_was(name: str, rate: int) -> None:
    samples = tone(seconds=1.5, rate=rate)
    heard, heard_rate = hear(encode(name, as_pcm(samples), rate))
    assert heard_rate == (48000 if name == "opus" else rate)
    seconds = len(heard) / heard_rate
    # MP3 and AAC have whole frames only, and no place to state the delay of their encoders.
    most = {"mp3": 2300 / rate if rate >= 32000 else 1700 / rate, "aac": 2048 / rate}.get(name, 1 / rate)
    assert -1e-9 <= seconds - 1.5 <= most
    assert abs(level_db(middle(heard)) - level_db(samples)) < 1.0
    assert pitch(middle(heard), heard_rate) == pytest.approx(440, abs=1)


@pytest.mark.parametrize("name", EXACT)
def test_no_sample_is_added_or_lost(name: str) -> None:
    rate = native(name)
    for num in (1, 700, 5 * 2048, 30000):
        data = encode(name, as_pcm(tone(seconds=num / rate, rate=rate)))
        assert len(hear(data)[0]) == num


def test_flac_keeps_every_sample() -> None:
    pcm = np.random.default_rng(1).integers(-32768, 32767, 10000).astype("<i2").tobytes()
    assert np.array_equal(hear(encode("flac", pcm))[0] * 32768, np.frombuffer(pcm, "<i2"))


@pytest.mark.parametrize("name", CODED)
def test_each_write_is_heard_at_once(name: str) -> None:
    """What was sent so far decodes to all but the last 70 ms of what went in (MP3: 110 ms), and every write sends."""
    rate = native(name)
    written = pieces(open_encoder(name, rate), as_pcm(tone(seconds=0.6, rate=rate)))
    assert all(written[1 if name == "mp3" else 0 : -1])  # the encoder of MP3 waits for a second frame
    sent = b""
    for number, data in enumerate(written[:-1], 1):
        sent += data
        if number >= 3:
            assert len(hear(sent)[0]) / rate > number * 2048 / rate - (0.11 if name == "mp3" else 0.07)


@pytest.mark.parametrize("name", CODED)
def test_no_click_where_chunks_meet(name: str) -> None:
    rate = native(name)
    samples = tone(220, rate=rate)
    heard, _ = hear(encode(name, as_pcm(samples)))
    assert largest_step(middle(heard)) < 1.5 * largest_step(samples)


@pytest.mark.parametrize("name", CODED)
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 3000).map(lambda samples: 2 * samples), min_size=1, max_size=8))
def test_how_samples_are_split_changes_no_byte(name: str, sizes: list[int]) -> None:
    pcm = as_pcm(tone(seconds=0.2))
    assert encode(name, pcm, sizes=sizes) == encode(name, pcm)


def test_mp3_is_frames_and_nothing_else() -> None:
    data = encode("mp3", as_pcm(tone()))
    frame = 144 * 128000 // 44100
    assert data[0] == 0xFF
    assert data[1] & 0xE0 == 0xE0
    assert not any(word in data for word in (b"ID3", b"Xing", b"Info", b"TAG"))
    starts = [0]
    while starts[-1] < len(data):
        padded = data[starts[-1] + 2] >> 1 & 1
        starts.append(starts[-1] + frame + padded)
    assert starts[-1] == len(data)
    assert all(data[at : at + 2] == data[:2] for at in starts[:-1])


@pytest.mark.parametrize("name", ["mp3", "aac"])
def test_answers_that_are_joined_add_up(name: str) -> None:
    first, second = (encode(name, as_pcm(tone(hertz, seconds=1.2))) for hertz in (440, 880))
    alone = [hear(data)[0] for data in (first, second)]
    joined, rate = hear(first + second)
    assert len(joined) == sum(map(len, alone))
    assert pitch(middle(joined[: len(alone[0])]), rate) == pytest.approx(440, abs=1)
    assert pitch(middle(joined[len(alone[0]) :]), rate) == pytest.approx(880, abs=1)


@pytest.mark.parametrize("bitrate", [64, 96, 128, 192])
def test_mp3_bitrates(bitrate: int) -> None:
    seconds = 2.0
    data = encode("mp3", as_pcm(tone(seconds=seconds)), bitrate=bitrate)
    assert 8 * len(data) / hear(data)[0].size * RATE == pytest.approx(1000 * bitrate, rel=0.01)


def test_opus_and_aac_follow_their_bitrate() -> None:
    noise = np.random.default_rng(2).normal(0, 0.1, 48000).astype(np.float32)
    for name in ("opus", "aac"):
        sizes = [len(encode(name, as_pcm(noise), bitrate=bitrate)) for bitrate in sorted(FORMATS[name].bitrates)]
        assert all(a < b for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("name", "rate", "bitrate", "allowed"),
    [("mp3", 44100, 320, "64, 96, 128, 192"), ("mp3", 24000, 192, "64, 96, 128"), ("aac", 44100, 192, "64, 96, 128")],
)
def test_other_bitrates_get_the_list(name: str, rate: int, bitrate: int, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        choose_bitrate(FORMATS[name], rate, bitrate)
    assert (caught.value.field, caught.value.code) == ("bitrate", "invalid_value")
    assert caught.value.message.endswith(f"these are: {allowed}")


@pytest.mark.parametrize("name", ["wav", "pcm", "flac"])
def test_a_bitrate_without_meaning_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="bitrate has no meaning"):
        choose_bitrate(FORMATS[name], RATE, 128)


def test_rates() -> None:
    assert [choose_rate(FORMATS[name], 44100, None) for name in FORMAT_NAMES] == [44100, 44100, 44100, 48000, 44100, 44100]
    assert [choose_rate(FORMATS[name], 22000, None) for name in FORMAT_NAMES] == [22000, 22000, 22050, 24000, 22000, 24000]
    assert choose_rate(FORMATS["mp3"], 96000, None) == 48000
    assert choose_rate(FORMATS["pcm"], 44100, 8000) == 8000
    for name, wanted, allowed in (
        ("opus", 44100, "8000, 12000, 16000, 24000, 48000"),
        ("aac", 8000, "24000, 32000, 44100, 48000"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            choose_rate(FORMATS[name], 44100, wanted)
        assert (caught.value.field, caught.value.code) == ("sample_rate", "unsupported_sample_rate")
        assert caught.value.message.endswith(f"these are: {allowed}")


@pytest.mark.parametrize(
    ("change", "missing"), [({"codec": "libnone"}, "the encoder libnone"), ({"container": "none"}, "the container none")]
)
def test_what_cannot_be_written_says_what_is_missing(
    change: dict[str, str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS, "mp3", replace(FORMATS["mp3"], **change))
    assert available_formats() == ("wav", "pcm", "opus", "flac", "aac")
    with pytest.raises(InvalidRequest) as caught:
        open_encoder("mp3", 44100)
    assert (caught.value.field, caught.value.code) == ("response_format", "format_unavailable")
    assert missing in caught.value.message
    assert "wav, pcm, opus, flac, aac" in caught.value.message


def test_unknown_formats_get_the_list_of_names() -> None:
    with pytest.raises(InvalidRequest) as caught:
        find_format("m4a")
    assert caught.value.code == "invalid_value"
    assert all(name in caught.value.message for name in FORMAT_NAMES)


@pytest.mark.parametrize("name", CODED)
def test_an_encoder_starts_no_threads_and_may_be_closed_early(name: str) -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    before, allowed = threads(), os.sched_getaffinity(0)
    encoders = [open_encoder(name, native(name)) for _ in range(4)]
    for encoder in encoders:
        encoder.write(bytes(CHUNK))
    assert threads() <= before  # others may end meanwhile
    assert os.sched_getaffinity(0) == allowed
    for encoder in encoders:
        encoder.close()
        encoder.close()


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_an_encoder_that_never_got_samples_ends(name: str) -> None:
    encoder = open_encoder(name, native(name))
    assert encoder.finish() == (wav_header(44100, None) if name == "wav" else b"")
    encoder.close()
