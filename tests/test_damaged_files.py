"""Weight files that are damaged in rarer ways than a cut: always a `CheckpointError` that names the file."""

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from duetts.checkpoint import load_model
from duetts.checkpoint_files import INDEX_NAME, open_pickle, open_safetensors
from duetts.errors import CheckpointError

CPU = torch.device("cpu")


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def load(folder: Path) -> None:
    load_model(folder, device=CPU, dtype=torch.float32, codec_dtype=torch.float32)


@pytest.mark.parametrize(
    "header",
    [
        [],
        3,
        None,
        {"a": 3},
        {"a": {}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}},
        {"a": {"data_offsets": "xy"}},
    ],
    ids=str,
)
def test_a_header_of_another_shape_is_named(tmp_path: Path, header: Any) -> None:
    path = tmp_path / "model.safetensors"
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + b"data")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        open_safetensors(path)


def test_any_changed_byte_of_a_header_is_refused_or_read(copy: Path) -> None:
    """`CheckpointError` and nothing else, whatever was hit."""
    path = copy / "model.safetensors"
    whole, rng = path.read_bytes(), random.Random(1)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 5])):
            damaged[rng.randrange(3000)] = rng.randrange(256)
        path.write_bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])
        with suppress(CheckpointError):
            load(copy)


@pytest.mark.parametrize("content", [{3: torch.zeros(1)}, {"a": 5}, {"generator": {"a": 5}}, [1], 7], ids=str)
def test_a_torch_file_of_something_else_is_named(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "codec.pth")
    with pytest.raises(CheckpointError, match=r"codec\.pth"):
        open_pickle(tmp_path / "codec.pth")


def test_what_stands_beside_a_generator_is_dropped_whatever_it_is(tmp_path: Path) -> None:
    torch.save({3: 4, "epoch": 7, "generator.a": torch.zeros(1)}, tmp_path / "codec.pth")
    assert open_pickle(tmp_path / "codec.pth").shapes == {"a": (1,)}


@pytest.mark.parametrize("places", [None, [], {"a": 3}, {"a": ""}, {"a": "../b"}, {"a": None, "b": "c"}], ids=str)
def test_an_index_that_is_none_is_named(copy: Path, places: Any) -> None:
    (copy / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        load(copy)


def test_a_tensor_in_two_shards_does_not_make_up_for_a_missing_one(copy: Path) -> None:
    """Keys and values have the same shape: counting rows alone would take keys twice for both."""
    tensors = load_file(copy / "model.safetensors")
    stem = "text_model.model.layers.0.attention."
    queries, keys, values = tensors.pop(f"{stem}wqkv.weight").split((64, 32, 32))
    shards = {"1.safetensors": {**tensors, f"{stem}wq.weight": queries.clone(), f"{stem}wk.weight": keys.clone()}}
    shards["2.safetensors"] = {f"{stem}wk.weight": keys.clone(), f"{stem}wv.weight": values.clone()}
    (copy / "model.safetensors").unlink()

    def write() -> None:
        for shard, held in shards.items():
            save_file(held, copy / shard)
        places = {name: shard for shard, held in shards.items() for name in held}
        (copy / INDEX_NAME).write_text(json.dumps({"weight_map": places}))

    write()
    with pytest.raises(CheckpointError, match=r"doubled tensor '.*wk\.weight'"):
        load(copy)
    del shards["2.safetensors"][f"{stem}wv.weight"]
    write()
    with pytest.raises(CheckpointError, match=r"doubled tensor '.*wk\.weight'"):
        load(copy)
    shards["2.safetensors"] = {f"{stem}wv.weight": values.clone()}
    write()
    load(copy)


@pytest.mark.parametrize(
    "added", [None, 3, {}, [3], [{"id": 1}], [{"content": "<|semantic:0|>"}], [{"content": "a", "id": "b"}]], ids=str
)
def test_a_flat_model_whose_tokenizer_names_no_ids_is_refused(copy: Path, added: Any) -> None:
    config = json.loads((copy / "config.json").read_text())
    flat = {**config["text_config"], "model_type": "dual_ar", "num_codebooks": 4, "codebook_size": 64}
    (copy / "config.json").write_text(json.dumps(flat))
    (copy / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    with pytest.raises(CheckpointError, match=r"added_tokens|eos_token_id"):
        load(copy)


def test_a_model_of_one_codebook_is_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["audio_decoder_config"]["num_codebooks"] = 1
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="'num_codebooks' is 1, below 2"):
        load(copy)
