"""WAV and PCM bytes, complete and streamed, and what is said about the formats that are missing."""

import io
import struct
import wave

import pytest

from duetts.audio.encode import FORMAT_NAMES, available_formats, find_format, open_encoder, wav_header
from duetts.errors import InvalidRequest

PCM = struct.pack("<5h", 0, 1, -1, 32767, -32768)


def test_a_complete_wav_has_exact_sizes() -> None:
    encoder = open_encoder("wav", 44100, num_samples=5)
    data = encoder.write(PCM) + encoder.finish()
    assert len(data) == 44 + len(PCM)
    assert struct.unpack_from("<I", data, 4) == (36 + len(PCM),)
    with wave.open(io.BytesIO(data)) as reader:
        assert reader.getparams()[:4] == (1, 2, 44100, 5)
        assert reader.readframes(5) == PCM


def test_a_streamed_wav_has_one_header_with_open_sizes() -> None:
    encoder = open_encoder("wav", 24000)
    first, second, last = encoder.write(PCM), encoder.write(PCM), encoder.finish()
    assert first[:44] == wav_header(24000, None)
    assert struct.unpack_from("<I", first, 4) == struct.unpack_from("<I", first, 40) == (0xFFFFFFFF,)
    assert struct.unpack_from("<I", first, 24) == (24000,)
    assert (first[44:], second, last) == (PCM, PCM, b"")


def test_a_wav_without_samples_is_a_header() -> None:
    assert open_encoder("wav", 8000, num_samples=0).finish() == wav_header(8000, 0)


def test_sizes_beyond_the_header_are_left_open() -> None:
    assert wav_header(8000, 1 << 33) == wav_header(8000, None)


def test_pcm_is_the_samples() -> None:
    encoder = open_encoder("pcm", 44100)
    assert encoder.write(PCM) + encoder.finish() == PCM
    assert find_format("pcm").content_type.format(rate=24000) == "audio/pcm; rate=24000; channels=1"


@pytest.mark.parametrize("name", sorted(set(FORMAT_NAMES) - set(available_formats())))
def test_missing_formats_say_which_work(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_encoder(name, 44100)
    assert (caught.value.field, caught.value.code) == ("response_format", "format_unavailable")
    assert "wav, pcm" in caught.value.message


def test_unknown_formats_get_the_list_of_names() -> None:
    with pytest.raises(InvalidRequest) as caught:
        find_format("m4a")
    assert caught.value.code == "invalid_value"
    assert all(name in caught.value.message for name in FORMAT_NAMES)
