"""The way from PCM to bytes: speed, loudness, volume and rate, each by ear, and no byte that depends on how PCM is split."""

import gc
import os
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetts.audio.decode import decode_audio
from duetts.audio.formats import FORMAT_NAMES
from duetts.audio.loudness import CEILING, integrated_loudness, k_weights
from duetts.audio.output import Output, OutputStream, plan_output
from duetts.errors import InvalidRequest
from duetts.types import Float32
from tests.inputs import clip

from .listening import RATE, as_pcm, as_samples, hear, largest_step, level_db, middle, pitch, tone

FRAME = 2048
SPEEDS = [0.25, 0.3, 0.5, 0.75, 1.1, 1.5, 2.0, 2.5, 4.0]


def run(pcm: bytes, *, sizes: list[int] | None = None, rate: int = RATE, **wanted: Any) -> bytes:
    """An output's bytes, of PCM that comes in pieces of these sizes in samples, over and over."""
    output = OutputStream(plan_output(rate, **{"response_format": "pcm", **wanted}), rate)
    data, at, count = b"", 0, 0
    while at < len(pcm):
        size = 2 * (sizes[count % len(sizes)] if sizes else FRAME)
        data += output.write(pcm[at : at + size])
        at, count = at + size, count + 1
    data += output.finish()
    output.close()
    return data


def sound(samples: Float32, **wanted: Any) -> Float32:
    return as_samples(run(as_pcm(samples), **wanted))


def speech() -> Float32:
    return decode_audio(clip("control_pcm16.wav"), rate=RATE, min_s=1, max_s=30)


def envelope(samples: Float32, hop: int = 441) -> Float32:
    """Levels of 10 ms each."""
    count = len(samples) // hop
    return np.sqrt((samples[: count * hop].reshape(count, hop) ** 2).mean(axis=1))


# -- speed --


@pytest.mark.parametrize("speed", SPEEDS)
def test_speed_changes_the_length_and_not_the_pitch(speed: float) -> None:
    samples = tone(220, seconds=2.0)
    heard = sound(samples, speed=speed)
    assert len(heard) == round(len(samples) / speed)
    assert abs(1200 * np.log2(pitch(middle(heard), RATE) / 220)) < 10
    assert abs(level_db(middle(heard)) - level_db(samples)) < 1.0
    assert largest_step(middle(heard)) < 1.5 * largest_step(samples)
    assert abs(level_db(heard[:1000]) - level_db(samples)) < 1.0


@settings(max_examples=25, deadline=None)
@given(num=st.integers(0, 12000), speed=st.floats(0.25, 4.0))
def test_any_length_at_any_speed(num: int, speed: float) -> None:
    assert len(sound(np.full(num, 0.1, np.float32), speed=speed)) == round(num / speed)


@pytest.mark.parametrize("speed", SPEEDS)
def test_words_stay_at_their_places(speed: float) -> None:
    """Levels of real speech over time, those of the sped up one read at its speed: alike, to the end."""
    samples = speech()
    before, after = envelope(samples), envelope(sound(samples, speed=speed))
    read = np.interp(np.arange(len(before)) / speed, np.arange(len(after)), after)
    assert np.corrcoef(before, read)[0, 1] > (0.9 if 0.5 <= speed <= 2 else 0.75)
    assert abs(level_db(after) - level_db(before)) < 1.0


@pytest.mark.parametrize(("speed", "blocks"), [(0.5, 3), (1.25, 3), (2.0, 3), (0.25, 4), (4.0, 7)])
def test_how_much_is_needed_before_the_first_output(speed: float, blocks: int) -> None:
    output = OutputStream(plan_output(RATE, response_format="pcm", speed=speed), RATE)
    pcm = as_pcm(speech())
    written = [output.write(pcm[2048 * number : 2048 * (number + 1)]) for number in range(blocks)]
    assert [bool(data) for data in written] == [False] * (blocks - 1) + [True]


# -- rate --


@pytest.mark.parametrize("rate", [8000, 11025, 12000, 16000, 22050, 24000, 32000, 48000])
def test_resampling_keeps_what_fits_and_drops_what_does_not(rate: int) -> None:
    for num in (1, 1000, 44100, 50001):
        assert abs(len(sound(np.zeros(num, np.float32), sample_rate=rate)) - num * rate / RATE) <= 0.5
    low, high = tone(1000), tone(min(0.6 * rate, 21000))
    heard = sound(low, sample_rate=rate)
    assert pitch(middle(heard), rate) == pytest.approx(1000, abs=0.5)
    assert abs(level_db(middle(heard)) - level_db(low)) < 0.1
    if rate < RATE:
        assert level_db(middle(sound(high, sample_rate=rate))) < level_db(high) - 80


def test_the_tail_is_not_lost_in_the_resampler() -> None:
    samples = np.zeros(RATE, np.float32)
    samples[-400:] = tone(1000)[:400]
    heard = sound(samples, sample_rate=24000)
    assert level_db(heard[-200:]) > -20


# -- volume --


@pytest.mark.parametrize("volume", [-20, -6.5, 3, 9])
def test_volume_is_in_decibels(volume: float) -> None:
    samples = tone(level=0.2)
    heard = sound(samples, volume=volume)
    assert len(heard) == len(samples)
    assert level_db(heard) - level_db(samples) == pytest.approx(volume, abs=0.05)
    assert largest_step(heard) < 1.01 * 10 ** (volume / 20) * largest_step(samples) + 1e-4


def test_loud_is_limited_and_never_wrapped() -> None:
    samples = tone(level=0.9)
    heard = sound(samples, volume=20)
    assert CEILING - 0.01 < np.abs(heard).max() <= CEILING + 1e-3
    assert np.all(heard * samples >= -1e-3)
    assert pitch(heard, RATE) == pytest.approx(440, abs=0.5)


def test_resampling_beyond_full_scale_is_held_there() -> None:
    square = np.sign(tone(997)) * 0.9999
    heard = sound(square.astype(np.float32), sample_rate=48000)
    assert np.abs(heard).max() > 0.999
    assert np.corrcoef(heard[: len(heard) // 2], np.sign(tone(997, rate=48000))[: len(heard) // 2])[0, 1] > 0.95


# -- loudness --


def measured(samples: Float32) -> float:
    """LUFS, by FFmpeg's EBU R 128 filter."""
    graph = av.filter.Graph()
    source, sink = graph.add_abuffer(format="flt", sample_rate=RATE, layout="mono"), graph.add("abuffersink")
    graph.link_nodes(source, graph.add("ebur128", "metadata=1"), sink).configure()
    frame = av.AudioFrame.from_ndarray(np.pad(samples, (0, 4410))[None], format="flt", layout="mono")
    frame.sample_rate = RATE
    graph.push(frame)
    graph.push(None)
    loudness = -np.inf
    try:
        while True:
            loudness = float(graph.pull().metadata.get("lavfi.r128.I", loudness))
    except (av.EOFError, av.BlockingIOError):
        return loudness


@pytest.mark.parametrize("name", ["control_pcm16.wav", "clipped.wav", "archive.flac"])
def test_our_measure_of_loudness_is_the_standards(name: str) -> None:
    samples = decode_audio(clip(name), rate=RATE, min_s=1, max_s=30)
    step = 4410
    steps = samples[: len(samples) // step * step].reshape(-1, step).astype(np.float64)
    powers = np.abs(np.fft.rfft(steps, axis=1)) ** 2 @ k_weights(RATE, step)
    assert integrated_loudness(powers) == pytest.approx(measured(samples), abs=0.1)


@pytest.mark.parametrize("change_db", [-10, 0, 6])
def test_speech_of_any_level_comes_to_the_same_loudness(change_db: float) -> None:
    samples = (speech() * 0.5 * 10 ** (change_db / 20)).astype(np.float32)
    heard = sound(samples, normalize_loudness=True)
    assert len(heard) == len(samples)
    assert measured(heard) == pytest.approx(-18, abs=1.0)
    assert measured(sound(samples, normalize_loudness=True, volume=-4)) == pytest.approx(-22, abs=1.0)


def test_the_gain_has_bounds_and_no_jumps() -> None:
    assert level_db(sound(tone(level=0.001), normalize_loudness=True)) == pytest.approx(level_db(tone(level=0.01)), abs=0.1)
    loud_then_quiet = np.concatenate([tone(level=0.5, seconds=2), tone(level=0.05, seconds=2)])
    heard = sound(loud_then_quiet, normalize_loudness=True)
    gains = level_db_curve(heard) - level_db_curve(loud_then_quiet)
    assert np.abs(np.diff(gains)).max() < 0.7
    assert gains[0] == pytest.approx(gains[10], abs=0.1)


def level_db_curve(samples: Float32) -> Float32:
    return 20 * np.log10(envelope(samples, 4410))


def test_silence_stays_silence_and_moves_nothing() -> None:
    assert not sound(np.zeros(RATE, np.float32), normalize_loudness=True).any()
    late = np.concatenate([np.zeros(2 * RATE, np.float32), tone(level=0.05, seconds=2)])
    heard = sound(late, normalize_loudness=True)
    assert not heard[: 2 * RATE - 10].any()
    assert measured(heard) == pytest.approx(-18, abs=0.5)


@pytest.mark.parametrize("num", [0, 1, 2000, 4410, 10000, 17640])
def test_short_speech_is_normalised_too(num: int) -> None:
    heard = sound(tone(level=0.02)[:num], normalize_loudness=True)
    assert len(heard) == num
    if num >= 2000:
        assert level_db(heard) - level_db(tone(level=0.02)[:num]) > 8


# -- the whole way --


@pytest.mark.parametrize("name", FORMAT_NAMES)
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=8),
    changes=st.sampled_from(
        [{}, {"speed": 1.3}, {"sample_rate": 24000}, {"volume": 6}, {"speed": 0.3, "normalize_loudness": True}]
    ),
)
def test_how_pcm_is_split_changes_no_byte(name: str, sizes: list[int], changes: dict[str, Any]) -> None:
    pcm = as_pcm(speech()[20000:36000])
    wanted = {"response_format": name, **changes}
    assert run(pcm, sizes=sizes, **wanted) == run(pcm, **wanted)


@pytest.mark.parametrize("name", ["wav", "mp3", "opus", "flac", "aac"])
def test_everything_at_once(name: str) -> None:
    samples = tone(seconds=2.0)
    output = OutputStream(plan_output(RATE, response_format=name, sample_rate=24000, speed=1.25, volume=-6), RATE)
    data = output.write(as_pcm(samples)) + output.finish()
    output.close()
    heard, rate = hear(data)
    assert output.num_samples == round(round(len(samples) / 1.25) * 24000 / RATE)
    assert output.duration_s == pytest.approx(1.6, abs=1e-4)
    assert len(heard) / rate == pytest.approx(1.6, abs=0.09)
    assert pitch(middle(heard), rate) == pytest.approx(440, abs=1)
    assert level_db(middle(heard)) - level_db(samples) == pytest.approx(-6, abs=1)


def test_without_changes_pcm_is_untouched() -> None:
    pcm = np.random.default_rng(0).integers(-32768, 32767, 9000).astype("<i2").tobytes()
    assert run(pcm) == run(pcm, sample_rate=RATE, speed=1, volume=0, normalize_loudness=False) == pcm
    assert OutputStream(Output("wav", RATE), RATE).plain
    assert not OutputStream(Output("wav", RATE, speed=2.0), RATE).plain
    assert not OutputStream(Output("mp3", RATE, 128), RATE).plain


@pytest.mark.parametrize(
    ("field", "value", "limits"),
    [
        ("speed", 0.24, "0.25 and 4"),
        ("speed", 4.01, "0.25 and 4"),
        ("volume", -20.5, "-20 and 20"),
        ("volume", 21, "-20 and 20"),
    ],
)
def test_limits_are_named(field: str, value: float, limits: str) -> None:
    with pytest.raises(InvalidRequest, match=limits) as caught:
        plan_output(RATE, response_format="wav", **{field: value})
    assert (caught.value.field, caught.value.code) == (field, "out_of_range")


def test_filters_start_no_threads() -> None:
    before = set(os.listdir("/proc/self/task"))
    outputs = [OutputStream(plan_output(RATE, response_format="pcm", speed=3, volume=1), RATE) for _ in range(4)]
    for output in outputs:
        output.write(bytes(8 * FRAME))
    assert set(os.listdir("/proc/self/task")) <= before  # others may end meanwhile


def test_outputs_that_are_given_up_leave_nothing_behind() -> None:
    """Encoders of FLAC hold 7 MB each. The collector is off: closing must free them by itself."""

    def give_up() -> None:
        output = OutputStream(plan_output(RATE, response_format="flac", speed=1.5, volume=1), RATE)
        output.write(bytes(20 * FRAME))
        output.close()

    def memory_mb() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    give_up()
    before = memory_mb()
    gc.disable()
    try:
        for _ in range(30):
            give_up()
        assert memory_mb() - before < 50
    finally:
        gc.enable()
