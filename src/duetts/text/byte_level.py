"""A tokenizer of bytes for small models: no merges, the chat layout's control tokens, and its constant pieces as one id each.

A prompt then costs a dozen positions instead of a hundred. Users cannot reach the phrase ids: their text is encoded with
added tokens off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from duetts.text.prompt import CONSTANT_PIECES

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|phoneme_start|>", "<|phoneme_end|>", "<|text|>",
    "<|voice|>", "<|interleave|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>",
)  # fmt: skip


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: printable ones for themselves, others shifted."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def write_byte_tokenizer(path: Path, num_semantic: int) -> dict[str, int]:
    """Writes tokenizer.json; returns the ids that a config.json names, and a vocabulary size padded to a multiple of 64.

    Ids: bytes 0..255, control tokens, constant pieces, then `num_semantic` semantic tokens.
    """
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    semantic = [f"<|semantic:{index}|>" for index in range(num_semantic)]
    added = {token: 256 + index for index, token in enumerate((*SPECIAL_TOKENS, *CONSTANT_PIECES, *semantic))}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for token, index in added.items()
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip
    path.write_text(json.dumps(content, ensure_ascii=True, indent=0) + "\n", encoding="utf-8")
    size = 256 + len(added)
    return {
        "eos_token_id": added["<|im_end|>"],
        "pad_token_id": added["<|pad|>"],
        "audio_pad_token_id": added["<|audio_pad|>"],
        "semantic_start_token_id": added[semantic[0]],
        "semantic_end_token_id": added[semantic[-1]],
        "vocab_size": -(-size // 64) * 64,
    }
