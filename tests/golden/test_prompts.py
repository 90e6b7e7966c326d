"""Prompt ids against the reference implementation, for every case and every batch of `prompts.json`."""

import base64
import json
import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from duetts.json_fields import read_json
from duetts.model_config import ModelConfig
from duetts.text.byte_level import byte_characters
from duetts.text.prompt import Turn, build_prompt
from duetts.text.tokenizer import Tokenizer
from duetts.types import Int32

QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that byte pair encoding joins last to make a token, by merging everything of a lower rank first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
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
    first, last = fixture["semantic_begin_id"], fixture["semantic_end_id"]
    content["eos_token_id"] = fixture["special_ids"]["<|im_end|>"]
    content["semantic_start_token_id"], content["semantic_end_token_id"] = first, last
    content["text_config"]["vocab_size"] = max(content["text_config"]["vocab_size"], last + 1)
    audio = content["audio_decoder_config"]
    audio["num_codebooks"] = len(next(iter(fixture["cases"].values()))["prompts"][0]["vq_codes"])
    audio["vocab_size"] = max(audio["vocab_size"], last - first + 1)
    return Tokenizer(json.loads(qwen_tokenizer(fixture).to_str()), ModelConfig.from_dict(content))


def lay_out(tokenizer: Tokenizer, case: dict[str, Any], index: int) -> Int32:
    """Our prompt of one batch of a case, with the codes that the file has for references and earlier batches."""
    codes = np.array(case["prompts"][index]["vq_codes"], dtype=np.int32)
    ends = np.cumsum([reference["frames"] for reference in case["refs"]], dtype=int).tolist()
    starts = [0, *ends]
    references = [
        (codes[:, start:end], reference["text"]) for start, end, reference in zip(starts, ends, case["refs"], strict=False)
    ]
    # What a prompt has beyond the one before is the speech of the batch before.
    known = [len(prompt["vq_positions"]) for prompt in case["prompts"][: index + 1]]
    assert known[0] == starts[-1]
    history = [
        Turn(text, codes[:, start:end]) for text, (start, end) in zip(case["batch_texts"][:index], pairwise(known), strict=True)
    ]
    return build_prompt(tokenizer, references, history, case["batch_texts"][index])


def test_every_prompt_of_every_case(fixture: dict[str, Any], tokenizer: Tokenizer) -> None:
    wrong: list[str] = []
    compared: list[tuple[str, int]] = []
    for name, case in fixture["cases"].items():
        assert len(case["batch_texts"]) == len(case["prompts"]) > 0, name
        for index, expected in enumerate(case["prompts"]):
            prompt = lay_out(tokenizer, case, index)
            codes = np.zeros_like(prompt[1:])
            codes[:, expected["vq_positions"]] = expected["vq_codes"]
            semantic = (prompt[0] >= fixture["semantic_begin_id"]) & (prompt[0] <= fixture["semantic_end_id"])
            same = (
                prompt.dtype == np.int32,
                prompt[0].tolist() == expected["ids"],
                np.flatnonzero(semantic).tolist() == expected["vq_positions"],
                np.array_equal(prompt[1:], codes),
            )
            if not all(same):
                wrong.append(f"{name}, batch {index}: dtype, ids, positions, codes agree: {same}")
            compared.append((name, index))
    assert not wrong, "\n".join(wrong)
    assert compared == [(name, index) for name, case in fixture["cases"].items() for index in range(len(case["prompts"]))]
    assert compared


def test_every_encoded_string(fixture: dict[str, Any], tokenizer: Tokenizer) -> None:
    assert fixture["encode"]
    for text, ids in fixture["encode"]:
        assert tokenizer.encode(text) == ids, text
        if not re.search(r"<\|(?!speaker:)", text):
            assert tokenizer.encode_text(text) == ids, text


def test_special_ids(fixture: dict[str, Any], tokenizer: Tokenizer) -> None:
    for name, index in fixture["special_ids"].items():
        assert tokenizer.encode(name) == [index]
        spelled = tokenizer.encode_text(name)
        assert (spelled == [index]) == name.startswith("<|phoneme_"), name


def test_text_is_composed_before_it_is_split(tokenizer: Tokenizer) -> None:
    decomposed = "cafe\u0301 A\u030angstro\u0308m"
    assert tokenizer.encode_text(decomposed) == tokenizer.encode_text("caf\u00e9 \u00c5ngstr\u00f6m")
