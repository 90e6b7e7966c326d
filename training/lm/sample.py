"""Held-out sentences spoken by the engine's own classes, as codes: `python -m training.lm.sample --weights DIR ...`.

The default voice speaks `--count` held-out lines; where held-out clips are at hand, `--clones` more follow their voices.
A codec turns the codes into sound later, on any machine (`training.lm.listen`).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from duetts.engine.pace import Pace
from duetts.engine.pages import PagePool, pages_for
from duetts.engine.playout import Playout
from duetts.engine.runner import Runner
from duetts.engine.scheduler import Room, Scheduler
from duetts.engine.sequence import Sequence
from duetts.models.dual_ar import DualAR
from duetts.text.prompt import build_prompt
from duetts.text.rules import frames_bound
from duetts.text.tokenizer import Tokenizer
from duetts.types import Int32, Sampling, Utterance
from training.data.texts import Lines, read_lines
from training.lm.clips import Spoken, Store
from training.lm.loader import HELD_KINDS, temporary_tokenizer
from training.lm.state import load_weights
from training.recipe import CODEC, FRAME, SAMPLE_RATE, SAMPLING
from training.report import say

STEM = "samples"


@dataclass(frozen=True, slots=True)
class Task:
    """A text to speak, and the clip whose voice is to be followed."""

    text: str
    reference: Spoken | None

    def utterance(self, tokenizer: Tokenizer, number: int) -> Utterance:
        clip = self.reference
        references = [(clip.codes.astype(np.int32), clip.text)] if clip is not None else []
        prompt = build_prompt(tokenizer, references, [], self.text)
        most = frames_bound(self.text, SAMPLE_RATE / FRAME)
        return Utterance(f"sample-{number}", prompt, Sampling(**SAMPLING), seed=number, max_frames=most)


class NoChannel:
    """A sequence's channel where nobody listens."""

    def put(self, item: object) -> None:
        """Drops it."""


def tasks(lines: Lines, store: Store, count: int, clones: int) -> list[Task]:
    """The first held-out lines in the default voice, then the next ones in held-out voices, voice after voice."""
    plain = [Task(text, None) for text in lines.held_out[:count]]
    voices = [clips[0] for _, clips in sorted(store.references.items())]
    texts = lines.held_out[count : count + clones] if voices else []
    return plain + [Task(text, voices[index % len(voices)]) for index, text in enumerate(texts)]


def speak(model: DualAR, utterances: list[Utterance]) -> list[tuple[Int32, bool]]:
    """Codes [books, frames] of each utterance, and whether it came to an end of its own. All at once."""
    longest = max(utterance.prompt.shape[1] + utterance.max_frames for utterance in utterances)
    count, pages = len(utterances), len(utterances) * pages_for(longest)
    scheduler = Scheduler(Room(slots=count, rows=count, block=512, length=longest, frame_s=1.0), PagePool(pages), Pace())
    runner = Runner(model, slots=count, rows=count, pages=pages, max_model_len=longest)
    everybody = [
        Sequence(utterance, NoChannel(), Playout(1.0), blocks=scheduler.prepare(utterance))  # type: ignore[arg-type]
        for utterance in utterances
    ]
    for sequence in everybody:
        scheduler.add(sequence)
    ended: set[Sequence] = set()
    while not scheduler.idle:
        for sequence, block in scheduler.choose_blocks(0.0):
            runner.read(sequence, block)
            scheduler.has_read(sequence, block)
        rows = scheduler.choose_rows(0.0)
        for sequence, column in zip(rows, runner.launch(rows)() if rows else [], strict=True):
            scheduler.has_launched(sequence, 0.0)
            if column[0] == model.config.end_id:
                ended.add(sequence)
            else:
                sequence.keep(column)
            if sequence in ended or sequence.is_over:
                scheduler.remove(sequence)
    empty = np.zeros((model.config.num_codebooks, 0), np.int32)
    return [(np.stack(sequence.frames, axis=1)[1:] if sequence.frames else empty, sequence in ended) for sequence in everybody]


def load_model(folder: Path, device: torch.device) -> tuple[DualAR, Tokenizer]:
    """Exported weights as the engine computes them on a CPU: bf16 values in float32."""
    tokenizer, config = temporary_tokenizer()
    model = DualAR(config, int(CODEC["residual_codebook_size"]))
    load_weights(model, folder)
    model.to(device).requires_grad_(False).eval()
    model.prepare(config.slow.max_positions)
    return model, tokenizer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", required=True, type=Path)
    parser.add_argument("--codes", nargs="*", default=[], type=Path, help="folders with codes of held-out clips")
    parser.add_argument("--weights", required=True, type=Path, help="folder of exported weights")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--clones", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options = parse()
    started = time.monotonic()
    lines = read_lines(options.lines)
    store = Store(lines, options.codes, HELD_KINDS)
    store.load()
    model, tokenizer = load_model(options.weights, torch.device(options.device))
    wanted = tasks(lines, store, options.count, options.clones)
    found = speak(model, [task.utterance(tokenizer, number) for number, task in enumerate(wanted)])
    tensors: dict[str, np.ndarray] = {}
    table = []
    for number, (task, (codes, ended)) in enumerate(zip(wanted, found, strict=True)):
        name = f"s{number:03d}"
        tensors[name] = codes.astype(np.int16)
        if task.reference is not None:
            tensors[f"{name}.reference"] = task.reference.codes
        voice = task.reference.speaker if task.reference else "default"
        table.append({"name": name, "text": task.text, "voice": voice, "ended": ended})
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, options.out / f"{STEM}.safetensors")
    (options.out / f"{STEM}.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    seconds = sum(codes.shape[1] for codes, _ in found) * FRAME / SAMPLE_RATE
    per_byte = seconds / sum(len(task.text.encode()) for task in wanted)
    say(f"{len(found)} samples, {seconds:.0f} s of speech ({per_byte:.3f} s a byte; a teacher takes about 0.07), "
        f"{sum(not ended for _, ended in found)} without an end, in {time.monotonic() - started:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
