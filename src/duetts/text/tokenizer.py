"""Text to ids. Special ids are looked up by name; user text can never become a control token.

Two instances of one `tokenizer.json`: the first as published, for the pieces of the prompt layout; the second without any
added token (special or not), for what users write, where only the phoneme pair keeps its meaning. It knows no layout.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from duetts.errors import CheckpointError
from duetts.json_fields import read_json
from duetts.model_config import ModelConfig

FILE = "tokenizer.json"
PHONEMES = re.compile(r"(<\|phoneme_start\|>|<\|phoneme_end\|>)")

# The token after which speech begins, for each layout.
OPENING_TOKENS = {"fish_qwen3_omni": "<|voice|>", "dual_ar": "<|interleave|>"}


class Tokenizer:
    """A model's tokenizer, checked against the ids that its configuration names."""

    def __init__(self, content: dict[str, Any], config: ModelConfig) -> None:
        """`content` is the JSON of a `tokenizers` file. Raises `CheckpointError` naming the token and both ids."""
        _check_structure(content, config.slow.vocab_size)
        self._layout = RawTokenizer.from_str(json.dumps(content))
        self._plain = RawTokenizer.from_str(json.dumps({**content, "added_tokens": []}))
        self.model_type = config.model_type
        self.num_codebooks = config.num_codebooks
        self.num_semantic = config.num_semantic
        self.semantic_start = config.semantic_start
        self._check("<|im_start|>")
        self._check(OPENING_TOKENS[config.model_type])
        self._check("<|im_end|>", "the end token", config.end_id)
        for code in range(config.num_semantic):
            self._check(f"<|semantic:{code}|>", f"semantic code {code}", config.semantic_start + code)
        self._phoneme_ids = {name: self._layout.token_to_id(name) for name in ("<|phoneme_start|>", "<|phoneme_end|>")}

    @classmethod
    def load(cls, folder: Path, config: ModelConfig) -> Tokenizer:
        """Reads `tokenizer.json`. Raises `CheckpointError` if it is missing, damaged or disagrees with the config."""
        if not (folder / FILE).exists():
            raise CheckpointError(f"{folder.name}: {FILE} is missing")
        return cls(read_json(folder / FILE), config)

    def encode(self, piece: str) -> list[int]:
        """Ids of one piece of the prompt layout, control tokens included."""
        return list(self._layout.encode(piece, add_special_tokens=False).ids)

    def encode_text(self, text: str) -> list[int]:
        """Ids of user text. Whatever it spells, only the phoneme pair becomes a control token."""
        ids: list[int] = []
        for part in PHONEMES.split(text):
            known = self._phoneme_ids.get(part)
            ids.extend([known] if known is not None else self._plain.encode(part, add_special_tokens=False).ids)
        return ids

    def _check(self, name: str, meaning: str = "", wanted: int | None = None) -> None:
        found = self._layout.token_to_id(name)
        if found is None:
            place = "" if wanted is None else f"; config.json makes {meaning} {wanted}"
            raise CheckpointError(f"{FILE}: the token {name} is missing{place}")
        if wanted is not None and found != wanted:
            raise CheckpointError(f"{FILE}: the token {name} is {found}; config.json makes {meaning} {wanted}")


def _check_structure(content: dict[str, Any], vocab_size: int) -> None:
    """Refuses what `tokenizers` would refuse with a bare exception, and ids that the model has no embedding for."""
    model, added = content.get("model"), content.get("added_tokens")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
        raise CheckpointError(f"{FILE}: holds no byte pair model with vocab and merges")
    if not isinstance(added, list) or not all(isinstance(token, dict) and "id" in token for token in added):
        raise CheckpointError(f"{FILE}: holds no list of added_tokens with ids")
    largest = max((*model["vocab"].values(), *(token["id"] for token in added)), default=-1)
    if largest >= vocab_size:
        raise CheckpointError(f"{FILE}: has a token {largest}; config.json has a vocab_size of {vocab_size}")
