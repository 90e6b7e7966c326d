"""A tokenizer of bytes for small models: no merges, the chat layout's control tokens, and its constant phrases as one id each.

A prompt then costs a dozen positions instead of a hundred. Users cannot reach the phrase ids: their text is encoded without
added tokens. Control tokens stay apart from the phrases, so that every message ends in the id that also stops generation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from duetts.text.prompt import PHRASES

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
    """Writes tokenizer.json, always the same bytes; returns the values that config.json needs.

    Ids: bytes 0..255 by value, control tokens, phrases, then `num_semantic` semantic tokens. The vocabulary size is the next
    multiple of 64. The returned keys are config.json's; `vocab_size` belongs into its `text_config`.
    """
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    semantic = [f"<|semantic:{index}|>" for index in range(num_semantic)]
    added = {token: 256 + index for index, token in enumerate((*SPECIAL_TOKENS, *PHRASES, *semantic))}
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
