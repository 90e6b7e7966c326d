"""How a model speaks where a request does not say: its folder's optional `generation_config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from duetts.json_fields import Fields, read_json
from duetts.model_config import IGNORED
from duetts.types import Sampling


@dataclass(frozen=True, slots=True)
class Habits:
    """Sampling, and the pieces of a long text that the model has learned to speak."""

    sampling: Sampling = field(default_factory=Sampling)
    longest_piece: int = 1000  # UTF-8 bytes, whatever a request says
    conditioned: bool = True  # whether it can speak a piece as what follows the one before
    single_line: bool = False  # whether line breaks have to be spaces


def read_habits(folder: Path) -> Habits:
    """Absent keys are S2 Pro's. Raises `CheckpointError` for a wrong one."""
    path = folder / "generation_config.json"
    if not path.exists():
        return Habits()
    usual, base = Habits(), Sampling()
    source = Fields(read_json(path), path.name, (*IGNORED, "eos_token_id", "do_sample", "max_new_tokens"))
    residual = source.number("residual_temperature", base.temperature) if "residual_temperature" in source else None
    habits = Habits(
        Sampling(
            temperature=source.number("temperature", base.temperature),
            top_p=source.number("top_p", base.top_p),
            top_k=source.integer("top_k", base.top_k, minimum=0),
            repetition_penalty=source.number("repetition_penalty", base.repetition_penalty),
            residual_temperature=residual,
        ),
        longest_piece=source.integer("longest_piece", usual.longest_piece, minimum=50),
        conditioned=source.flag("condition_on_previous_chunks", usual.conditioned),
        single_line=source.flag("single_line", usual.single_line),
    )
    source.finish()
    return habits
