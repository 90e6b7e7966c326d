"""All clips that are there as codes, by speaker, and the drawing of pairs: a voice to follow and something to say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open

from training.codec.codes import KINDS, read_codes
from training.data.manifest import Manifest
from training.data.speakers import DEFAULT
from training.data.texts import Lines
from training.lm.encode import PLACES
from training.recipe import FRAME, SAMPLE_RATE

NO_REFERENCE = 0.15  # of the pairs; always the default voice
SEVERAL_SENTENCES = 0.35  # of the targets
BLEND_SHARE, BLEND_WEIGHT = 0.4, 4.0  # most of the targets with a reference; how often an hour of them is drawn
REFERENCE_S = (2.0, 6.0)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A clip as codes int16 [books, frames], its text, and the byte that each frame speaks (None: unknown)."""

    kind: str
    number: int
    speaker: str
    text: str
    sentences: int
    codes: np.ndarray
    places: np.ndarray | None

    @property
    def seconds(self) -> float:
        return self.codes.shape[1] * FRAME / SAMPLE_RATE


@dataclass(frozen=True, slots=True)
class Pair:
    """What one training example is made of."""

    reference: Spoken | None
    target: Spoken


def code_files(folders: list[Path]) -> list[Path]:
    return [path for folder in folders for path in folder.glob("[!.]*.safetensors")]


def kinds_in(path: Path) -> dict[str, float]:
    """Hours of each kind that a file of codes holds, without unpacking them."""
    with safe_open(path, "np") as file:
        kinds, frames = file.get_tensor("kinds"), file.get_tensor("frames")
    return {KINDS[kind]: float(frames[kinds == kind].sum()) * FRAME / SAMPLE_RATE / 3600 for kind in np.unique(kinds)}


@dataclass(slots=True)
class Gauge:
    """How many hours of the wanted kinds there are, without taking them in."""

    folders: list[Path]
    kinds: tuple[str, ...]
    hours: dict[str, float] = field(default_factory=dict)
    _files: set[Path] = field(default_factory=set)

    def read(self) -> float:
        for path in set(code_files(self.folders)) - self._files:
            self._files.add(path)
            for kind, hours in kinds_in(path).items():
                if kind in self.kinds:
                    self.hours[kind] = self.hours.get(kind, 0.0) + hours
        return sum(self.hours.values())


@dataclass(slots=True)
class Store:
    """Clips of the wanted kinds from folders of code files; `load` takes in what has appeared since."""

    lines: Lines
    folders: list[Path]
    kinds: tuple[str, ...]
    clips: dict[str, list[list[Spoken]]] = field(default_factory=dict)  # by kind: of one sentence, of several
    references: dict[str, list[Spoken]] = field(default_factory=dict)  # by speaker
    default: list[list[Spoken]] = field(default_factory=lambda: [[], []])
    hours: dict[str, float] = field(default_factory=dict)
    _seen: set[tuple[str, int]] = field(default_factory=set)
    _files: set[Path] = field(default_factory=set)
    _manifests: dict[str, Manifest] = field(default_factory=dict)

    def load(self, most: int | None = None) -> int:
        """Reads new files, at most so many; returns how many. A clip that two files hold counts once."""
        fresh = sorted(set(code_files(self.folders)) - self._files)[:most]
        for path in fresh:
            self._files.add(path)
            if not set(self.kinds).isdisjoint(kinds_in(path)):
                self._read(path)
        return len(fresh)

    def _read(self, path: Path) -> None:
        beside = path.with_name(path.name.removesuffix(".safetensors") + PLACES)
        places = np.load(beside) if beside.exists() else None
        start = 0
        for clip in read_codes(path):
            end = start + clip.codes.shape[1]
            own = None if places is None or places[start] < 0 else places[start:end]
            start = end
            if clip.kind not in self.kinds or (clip.kind, clip.number) in self._seen:
                continue
            self._seen.add((clip.kind, clip.number))
            manifest = self._manifests.setdefault(clip.kind, Manifest(self.lines, clip.kind))
            row = manifest.row(clip.number)
            text = " ".join(row.texts)
            self._add(Spoken(clip.kind, clip.number, row.speaker.name, text, len(row.texts), clip.codes, own))

    def _add(self, clip: Spoken) -> None:
        several = int(clip.sentences > 1)
        self.clips.setdefault(clip.kind, [[], []])[several].append(clip)
        self.hours[clip.kind] = self.hours.get(clip.kind, 0.0) + clip.seconds / 3600
        if clip.speaker == DEFAULT.name:
            self.default[several].append(clip)
        if REFERENCE_S[0] <= clip.seconds <= REFERENCE_S[1]:
            self.references.setdefault(clip.speaker, []).append(clip)

    def pair(self, rng: np.random.Generator) -> Pair:
        """A random pair."""
        if rng.random() < NO_REFERENCE and any(self.default):
            return Pair(None, pick(self.default, rng))
        while True:
            target = pick(self.clips[self._kind(rng)], rng)
            others = self.references.get(target.speaker, [])
            reference = others[int(rng.integers(len(others)))] if others else target
            if reference is not target:
                return Pair(reference, target)

    def _kind(self, rng: np.random.Generator) -> str:
        blends = [kind for kind in self.hours if kind.endswith("blend")]
        others = [kind for kind in self.hours if kind not in blends]
        if not blends or not others:
            return (blends or others)[0]
        weight = BLEND_WEIGHT * self.hours[blends[0]]
        share = min(BLEND_SHARE, weight / (weight + self.hours[others[0]]))
        return blends[0] if rng.random() < share else others[0]


def pick(groups: list[list[Spoken]], rng: np.random.Generator) -> Spoken:
    """A clip of one sentence, or at times of several."""
    single, several = groups
    pool = several if several and (not single or rng.random() < SEVERAL_SENTENCES) else single
    return pool[int(rng.integers(len(pool)))]
