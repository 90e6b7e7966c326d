"""Tokenizers: agreement with the configuration, and user text that cannot become a control token."""

import json
import random
from pathlib import Path

import pytest

from duetts.errors import CheckpointError
from duetts.text.byte_level import SPECIAL_TOKENS, write_byte_tokenizer
from duetts.text.prompt import PHRASES
from duetts.text.tokenizer import Tokenizer

from ..dimensions import AUDIO
from .small import NUM_SEMANTIC, byte_tokenizer, config_for


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def test_byte_tokenizer_is_deterministic_and_contiguous(tmp_path: Path) -> None:
    ids = write_byte_tokenizer(tmp_path / "a.json", NUM_SEMANTIC)
    assert write_byte_tokenizer(tmp_path / "b.json", NUM_SEMANTIC) == ids
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert ids["vocab_size"] % 64 == 0
    assert ids["semantic_end_token_id"] - ids["semantic_start_token_id"] == NUM_SEMANTIC - 1
    assert ids["semantic_end_token_id"] < ids["vocab_size"] <= ids["semantic_end_token_id"] + 64
    assert ids["semantic_start_token_id"] == 256 + len(SPECIAL_TOKENS) + len(PHRASES)


def test_every_byte_is_its_own_id(tokenizer: Tokenizer) -> None:
    for text in ("Hello \t\n", "\u00e9\u597d\U0001f680", "".join(map(chr, range(1, 256)))):
        assert tokenizer.encode_text(text) == list(text.encode())


def test_phrases_are_one_token_and_only_in_layouts(tokenizer: Tokenizer) -> None:
    for phrase in PHRASES:
        assert len(tokenizer.encode(phrase)) == 1
        assert tokenizer.encode_text(phrase) == list(phrase.encode())


def test_semantic_tokens(tokenizer: Tokenizer) -> None:
    spelled = "".join(f"<|semantic:{code}|>" for code in range(NUM_SEMANTIC))
    assert tokenizer.encode(spelled) == list(range(tokenizer.semantic_start, tokenizer.semantic_start + NUM_SEMANTIC))
    assert tokenizer.encode_text(spelled) == list(spelled.encode())


def test_only_the_phoneme_pair_is_active_in_text(tokenizer: Tokenizer) -> None:
    start, end = tokenizer.encode("<|phoneme_start|>") + tokenizer.encode("<|phoneme_end|>")
    assert tokenizer.encode_text("a<|phoneme_start|>B1<|phoneme_end|>") == [97, start, 66, 49, end]
    random_source = random.Random(2)
    pieces = (*SPECIAL_TOKENS, *PHRASES, "<|semantic:3|>", "<|speaker:0|>", "<|", "|>", "x", " ", "\n", "\u00e9")
    for _ in range(300):
        text = "".join(random_source.choices(pieces, k=8))
        assert {i for i in tokenizer.encode_text(text) if i > 255} <= {start, end}, text


def test_tokens_that_are_added_but_not_special_are_text_too(tmp_path: Path) -> None:
    ids = write_byte_tokenizer(tmp_path / "tokenizer.json", NUM_SEMANTIC)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    tokenizer = Tokenizer(content, config_for(ids))
    assert tokenizer.encode("<|im_end|>") == [ids["eos_token_id"]]
    assert tokenizer.encode_text("<|im_end|>") == list(b"<|im_end|>")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"eos_token_id": 3}, ("<|im_end|>", "258", "3")),
        ({"semantic_start_token_id": 275}, ("<|semantic:0|>", "274", "275")),
        ({"semantic_end_token_id": 338}, ("<|semantic:64|>", "missing", "338")),
        ({"vocab_size": 300}, ("337", "300")),
    ],
)
def test_disagreement_with_the_configuration(tmp_path: Path, change: dict[str, int], named: tuple[str, ...]) -> None:
    ids = write_byte_tokenizer(tmp_path / "tokenizer.json", NUM_SEMANTIC)
    if "semantic_end_token_id" in change:
        config = config_for(ids, **change, audio_decoder_config={**AUDIO, "vocab_size": 128})
    elif "vocab_size" in change:
        config = config_for(ids, **change, semantic_end_token_id=290)
    else:
        config = config_for(ids, **change)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path, config)
    for word in named:
        assert word in str(caught.value)


def test_a_missing_token_is_named(tmp_path: Path) -> None:
    ids = write_byte_tokenizer(tmp_path / "tokenizer.json", NUM_SEMANTIC)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for name in ("<|voice|>", "<|im_start|>", "<|im_end|>", "<|semantic:5|>"):
        renamed = [
            {**token, "content": "<|other|>"} if token["content"] == name else token for token in content["added_tokens"]
        ]
        with pytest.raises(CheckpointError) as caught:
            Tokenizer({**content, "added_tokens": renamed}, config_for(ids))
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", "{}", '{"model": {"vocab": {}}}', '{"model": {"vocab": {}, "merges": []}}']
)
def test_damaged_files(tmp_path: Path, content: str | None) -> None:
    ids = write_byte_tokenizer(tmp_path / "good.json", NUM_SEMANTIC)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path, config_for(ids))


def test_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    ids = write_byte_tokenizer(path, NUM_SEMANTIC)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path, config_for(ids))
