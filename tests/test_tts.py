"""The Python door: TTS on the tiny model, and duetts-mini's folder."""

import json
import wave
from pathlib import Path

import numpy as np
import pytest

import duetts
import duetts.embedded
from duetts.config import ConfigError, EngineConfig, Limits
from duetts.embedded import MINI, mini_folder
from duetts.errors import InvalidRequest, ModelNotFound
from duetts.model_config import read_model_config
from duetts.tts import TTS

from .inputs import REF_TEXT, clip


@pytest.fixture(scope="module")
def tts(tiny_folder: Path):
    with TTS(tiny_folder, device="cpu", cpu_threads=1) as own:
        yield own


def test_say_gives_audio_that_can_be_saved(tts: TTS, tmp_path: Path) -> None:
    audio = tts.say("Hello, how are you?", seed=1)
    assert audio.sample_rate == tts.sample_rate == 44100
    assert audio.samples.dtype == np.float32
    assert len(audio.samples) == 2048 * audio.outcome.num_frames > 0
    assert audio.duration_s == pytest.approx(len(audio.samples) / 44100)
    audio.save(tmp_path / "a.wav")
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert file.getnframes() == len(audio.samples)
        assert file.readframes(file.getnframes()) == audio.pcm


def test_streamed_samples_are_those_of_say(tts: TTS) -> None:
    whole = tts.say("One two three.", seed=2, max_new_tokens=30)
    parts = list(tts.stream("One two three.", seed=2, max_new_tokens=30))
    assert np.array_equal(np.concatenate(parts), whole.samples)


def test_leaving_a_stream_early_frees_the_engine(endless_folder: Path) -> None:
    with TTS(endless_folder, device="cpu", max_num_seqs=1, max_queue=1) as own:
        for _ in own.stream("On and on.", max_new_tokens=500):
            break
        assert own.say("Hi.", max_new_tokens=2).outcome.num_frames == 2


def test_a_reference_needs_both_halves(tts: TTS, tmp_path: Path) -> None:
    audio = clip("control_pcm16.wav")
    (tmp_path / "clip.wav").write_bytes(audio)
    from_bytes = tts.say("Hi.", seed=3, reference=audio, reference_text=REF_TEXT)
    from_file = tts.say("Hi.", seed=3, reference=tmp_path / "clip.wav", reference_text=REF_TEXT)
    assert from_bytes.pcm == from_file.pcm
    assert from_bytes.outcome.input_tokens > tts.say("Hi.", seed=3).outcome.input_tokens + 80
    with pytest.raises(InvalidRequest, match="reference_text is missing"):
        tts.say("Hi.", reference=audio)
    with pytest.raises(InvalidRequest, match="reference is missing"):
        tts.say("Hi.", reference_text="words")
    with pytest.raises(InvalidRequest, match="silent"):
        tts.say("Hi.", reference=clip("silent.wav"), reference_text=REF_TEXT)


def test_limits_are_the_callers(tiny_folder: Path) -> None:
    with TTS(tiny_folder, device="cpu", limits=Limits(max_input_chars=80, reference_max_s=2.0)) as own:
        with pytest.raises(InvalidRequest, match="at most 80"):
            own.say("Hello. " * 20)
        with pytest.raises(InvalidRequest, match="at most 2 s"):
            own.say("Hi.", reference=clip("control_pcm16.wav"), reference_text="words")


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        TTS(tmp_path / "nothing")


def test_closing_twice_is_harmless(tiny_folder: Path) -> None:
    own = TTS(tiny_folder, device="cpu")
    own.close()
    own.close()


@pytest.mark.parametrize(
    "values", [{"dtype": "int3"}, {"rows": 0}, {"max_queue": -1}, {"load_format": "magic"}, {"max_model_len": 1}]
)
def test_engine_settings_are_checked(values: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(values)).replace("_", "[ _]")):
        EngineConfig(**values)


def test_mini_is_written_once_with_its_real_dimensions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where its weights are not in the package."""
    monkeypatch.setattr(duetts.embedded, "SHIPPED", tmp_path)
    folder = mini_folder()
    first = (folder / "model.safetensors").stat()
    assert mini_folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == first.st_mtime_ns
    config = read_model_config(folder)
    assert config.untrained
    assert (config.slow.num_layers, config.slow.dim, config.fast.dim, config.num_codebooks) == (6, 384, 256, 8)
    total = first.st_size + (folder / "codec.safetensors").stat().st_size
    assert total <= 45e6
    assert json.loads((folder / "codec_config.json").read_text()) == MINI.codec
    assert not list(folder.parent.glob(".writing-*"))


def test_the_package_exports_few_names() -> None:
    assert set(duetts.__all__) == {"TTS", "Audio", "__version__"}
    assert duetts.TTS is TTS
    with pytest.raises(AttributeError):
        _ = duetts.no_such_name
