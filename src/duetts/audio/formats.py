"""The six output formats: names, content types, rates and bit rates, and which of them this build of PyAV can write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import av

from duetts.errors import InvalidRequest

SAMPLE_BYTES = 2
ANY_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)  # Hz; formats that take these take the model's too
SLOWEST_MP3_1_RATE, FASTEST_MP3_2 = 32000, 160  # Hz; kbit/s of the low-rate variant of MP3 below it


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """A format. `content_type` may hold a `{rate}` in Hz to fill in; `bitrates` are kbit/s, the first one the default.

    `codec` and `container` are FFmpeg's names; without them the samples need no encoder.
    """

    name: str
    content_type: str
    rates: tuple[int, ...] = ANY_RATES
    bitrates: tuple[int, ...] = ()
    codec: str = ""
    container: str = ""
    container_options: Mapping[str, str] = field(default_factory=dict)
    codec_options: Mapping[str, str] = field(default_factory=dict)


# Containers are flushed with every packet, and hold no random numbers and no versions: same samples, same bytes.
FORMATS = {
    chosen.name: chosen
    for chosen in (
        AudioFormat("wav", "audio/wav"),
        AudioFormat("pcm", "audio/pcm; rate={rate}; channels=1"),
        AudioFormat(
            "mp3", "audio/mpeg", (44100, 48000, 32000, 24000, 22050, 16000), (128, 64, 96, 192), "libmp3lame", "mp3",
            {"write_xing": "0", "id3v2_version": "0", "write_id3v1": "0"},  # else answers that are joined do not add up
        ),
        AudioFormat(
            "opus", "audio/ogg; codecs=opus", (48000, 24000, 16000, 12000, 8000), (64, 24, 32, 48, 96, 128), "libopus", "ogg",
            {"page_duration": "20000", "flush_packets": "1", "fflags": "+bitexact"},  # us; the default page lasts a second
        ),
        AudioFormat(
            "flac", "audio/flac", ANY_RATES, (), "flac", "flac",
            {"flush_packets": "1", "fflags": "+bitexact", "metadata_header_padding": "0"},
            {"frame_size": "1152"},  # the default of 4608 samples holds 100 ms back
        ),
        AudioFormat("aac", "audio/aac", (44100, 48000, 32000, 24000), (128, 64, 96), "aac", "adts"),
    )
}  # fmt: skip
FORMAT_NAMES = tuple(FORMATS)


def available_formats() -> tuple[str, ...]:
    """Names of the formats that can be written here."""
    return tuple(name for name, chosen in FORMATS.items() if not missing_part(chosen.codec, chosen.container))


@cache
def missing_part(codec: str, container: str) -> str:
    """What this build of PyAV lacks for a format, in words; empty if nothing."""
    for kind, name, find in (("encoder", codec, av.Codec), ("container", container, av.ContainerFormat)):
        try:
            if name:
                find(name, "w")
        except ValueError:
            return f"the {kind} {name}"
    return ""


def find_format(name: str) -> AudioFormat:
    """The format of that name. Raises `InvalidRequest` for an unknown name, or for one that cannot be written here."""
    if name not in FORMATS:
        raise InvalidRequest(
            f"response_format {name[:64]!r} is not one of {', '.join(FORMAT_NAMES)}", field="response_format"
        )  # fmt: skip
    chosen = FORMATS[name]
    missing = missing_part(chosen.codec, chosen.container)
    if missing:
        raise InvalidRequest(
            f"response_format {name} needs {missing}, which PyAV lacks here; these work: {', '.join(available_formats())}",
            field="response_format", code="format_unavailable",
        )  # fmt: skip
    return chosen


def choose_rate(chosen: AudioFormat, native: int, wanted: int | None) -> int:
    """The output's rate in Hz: the wanted one, else the model's own, else the nearest above it that the format has."""
    allowed = {*chosen.rates, native} if chosen.rates == ANY_RATES else {*chosen.rates}
    if wanted is None:
        return native if native in allowed else min((rate for rate in allowed if rate > native), default=max(allowed))
    if wanted not in allowed:
        raise InvalidRequest(
            f"sample_rate {wanted} is not possible with {chosen.name}; these are: {', '.join(map(str, sorted(allowed)))}",
            field="sample_rate", code="unsupported_sample_rate",
        )  # fmt: skip
    return wanted


def choose_bitrate(chosen: AudioFormat, rate: int, wanted: int | None) -> int | None:
    """The output's bit rate in kbit/s; None for formats that have none."""
    if wanted is None:
        return chosen.bitrates[0] if chosen.bitrates else None
    if not chosen.bitrates:
        raise InvalidRequest(f"bitrate has no meaning for {chosen.name}", field="bitrate")
    low_rate_mp3 = chosen.name == "mp3" and rate < SLOWEST_MP3_1_RATE
    allowed = [number for number in sorted(chosen.bitrates) if not low_rate_mp3 or number <= FASTEST_MP3_2]
    if wanted not in allowed:
        raise InvalidRequest(
            f"bitrate {wanted} is not possible with {chosen.name} at {rate} Hz; these are: {', '.join(map(str, allowed))}",
            field="bitrate",
        )  # fmt: skip
    return wanted
