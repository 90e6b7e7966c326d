"""Prompt ids against the reference implementation, for every case and every batch of `prompts.json`."""

import base64
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from duetts.model_config import ModelConfig, read_json
from duetts.text.byte_level import byte_characters
from duetts.text.prompt import Turn, build_prompt
from duetts.text.tokenizer import Tokenizer

QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that byte pair encoding joins last to make a token, by merging everything of a lower rank first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, limit) for left, right in zip(parts, parts[1:], strict=False)]
        lowest = min(range(len(pairs)), key=pairs.__getitem__)
        assert pairs[lowest] < limit, f"{token!r} cannot be merged"
        parts[lowest : lowest + 2] = [parts[lowest] + parts[lowest + 1]]
    return parts[0], parts[1]


def qwen_tokenizer(fixture: dict[str, Any]) -> RawTokenizer:
    """The public Qwen rank table as a `tokenizers` object with the fixture's special ids."""
    spec = find_spec("dashscope")
    assert spec is not None
    assert spec.origin is not None
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    characters = byte_characters()

    def spelled(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    merges = [tuple(map(spelled, merge_of(token, ranks))) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    ids = {index: name for name, index in fixture["special_ids"].items()}
    first, last = fixture["semantic_begin_id"], fixture["semantic_end_id"]
    ids |= {first + index: f"<|semantic:{index}|>" for index in range(last - first + 1)}
    names = [ids.get(index, f"<|unused:{index}|>") for index in range(len(ranks), last + 1)]
    raw.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return raw


@pytest.fixture(scope="module")
def fixture(golden_dir: Path) -> dict[str, Any]:
    return read_json(golden_dir / "prompts.json")


@pytest.fixture(scope="module")
def tokenizer(fixture: dict[str, Any]) -> Tokenizer:
    content = json.loads((Path(__file__).parents[1] / "data" / "s2_pro_config.json").read_text())
    content["eos_token_id"] = fixture["special_ids"]["<|im_end|>"]
    content["semantic_start_token_id"] = fixture["semantic_begin_id"]
    content["semantic_end_token_id"] = fixture["semantic_end_id"]
    raw = qwen_tokenizer(fixture)
    return Tokenizer(raw, RawTokenizer.from_str(raw.to_str()), ModelConfig.from_dict(content))


def test_every_prompt_of_every_case(fixture: dict[str, Any], tokenizer: Tokenizer) -> None:
    compared = 0
    for name, case in fixture["cases"].items():
        lengths = [reference["frames"] for reference in case["refs"]]
        history: list[Turn] = []
        assert len(case["batch_texts"]) == len(case["prompts"]), name
        for index, (text, expected) in enumerate(zip(case["batch_texts"], case["prompts"], strict=True)):
            codes = np.array(expected["vq_codes"], dtype=np.int32)
            ends = np.cumsum(lengths).tolist()
            parts = np.split(codes[:, : sum(lengths)], ends[:-1], axis=1) if lengths else []
            references = [(part, reference["text"]) for part, reference in zip(parts, case["refs"], strict=True)]
            if index:
                start = case["prompts"][index - 1]
                known = np.array(start["vq_codes"], dtype=np.int32).shape[1]
                history.append(Turn(case["batch_texts"][index - 1], codes[:, known:]))
            prompt = build_prompt(tokenizer, references, history, text)
            assert prompt[0].tolist() == expected["ids"], f"{name}, batch {index}"
            spoken = np.flatnonzero(prompt[0] >= tokenizer.semantic_start)
            assert spoken.tolist() == expected["vq_positions"], f"{name}, batch {index}"
            assert np.array_equal(prompt[1:, spoken], codes.reshape(prompt.shape[0] - 1, -1)), f"{name}, batch {index}"
            assert not np.delete(prompt[1:], spoken, axis=1).any()
            compared += 1
    assert compared == sum(len(case["prompts"]) for case in fixture["cases"].values()) > 0


def test_plain_strings(fixture: dict[str, Any], tokenizer: Tokenizer) -> None:
    assert fixture["encode"]
    for text, ids in fixture["encode"]:
        assert tokenizer.encode(text) == ids, text
