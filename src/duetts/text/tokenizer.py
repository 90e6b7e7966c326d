"""Text to ids. Special ids are looked up by name; user text can never become a control token.

Two instances of one `tokenizer.json`: in the first added tokens are active, for the pieces of the prompt layout; in the
second they are plain text, for what users write, with the phoneme pair as the only exception.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer

from duetts.errors import CheckpointError
from duetts.model_config import ModelConfig

PHONEMES = re.compile(r"(<\|phoneme_start\|>|<\|phoneme_end\|>)")


class Tokenizer:
    """A model's tokenizer, checked against the ids that its configuration names."""

    def __init__(self, layout: RawTokenizer, plain: RawTokenizer, config: ModelConfig) -> None:
        self._layout = layout
        self._plain = plain
        self._plain.encode_special_tokens = True
        self.semantic_start = config.semantic_start
        self.num_codebooks = config.num_codebooks
        expected = {
            "<|im_start|>": None,
            "<|im_end|>": config.end_id,
            "<|voice|>": None,
            "<|semantic:0|>": config.semantic_start,
            f"<|semantic:{config.num_semantic - 1}|>": config.semantic_end,
        }
        for name, wanted in expected.items():
            found = layout.token_to_id(name)
            if found is None:
                raise CheckpointError(f"tokenizer.json: the token {name} is missing")
            if wanted is not None and found != wanted:
                raise CheckpointError(f"tokenizer.json: the token {name} is {found}; config.json says {wanted}")

    @classmethod
    def load(cls, folder: Path, config: ModelConfig) -> Tokenizer:
        """Reads `tokenizer.json`. Raises `CheckpointError` if it is missing, damaged or disagrees with the config."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"{folder.name}: tokenizer.json is missing")
        content = path.read_text(encoding="utf-8")
        try:
            return cls(RawTokenizer.from_str(content), RawTokenizer.from_str(content), config)
        except CheckpointError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"tokenizer.json: cannot be read: {error}") from error

    def encode(self, piece: str) -> list[int]:
        """Ids of one piece of the prompt layout, control tokens included."""
        return list(self._layout.encode(piece, add_special_tokens=False).ids)

    def encode_text(self, text: str) -> list[int]:
        """Ids of user text. Whatever it spells, only the phoneme pair becomes a control token."""
        ids: list[int] = []
        for part in PHONEMES.split(text):
            encoder = self._layout if PHONEMES.fullmatch(part) else self._plain
            ids.extend(encoder.encode(part, add_special_tokens=False).ids)
        return ids
