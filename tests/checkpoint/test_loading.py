"""Checkpoints in every form they come in, and every way in which they can be damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from duetts.checkpoint import Model, find_model, load_codec, load_dual_ar, load_model, read_configs
from duetts.checkpoint_files import INDEX_NAME
from duetts.errors import CheckpointError, ModelNotFound, UnsupportedModel
from duetts.model_config import CodecConfig, ModelConfig
from tests.published import describe_layout

CPU = torch.device("cpu")


def load(folder: Path, **options: Any) -> Model:
    return load_model(folder, device=CPU, dtype=torch.float32, codec_dtype=torch.float32, **options)


def weights(model: Model) -> dict[str, Tensor]:
    return {**model.dual_ar.state_dict(), **{f"codec.{name}": value for name, value in model.codec.state_dict().items()}}


def assert_same(left: Model, right: Model) -> None:
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def change(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def split_into_shards(folder: Path, count: int) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{index % count + 1:05}-of-{count:05}.safetensors" for index, name in enumerate(sorted(tensors))}
    for shard in sorted(set(places.values())):
        save_file({name: tensors[name] for name, place in places.items() if place == shard}, folder / shard)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


# -- forms ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dummy_seed", [None, 3])
def test_a_half_has_the_weights_that_it_has_beside_the_other(tiny_folder: Path, dummy_seed: int | None) -> None:
    whole = load(tiny_folder, dummy_seed=dummy_seed)
    dual_ar = load_dual_ar(tiny_folder, device=CPU, dtype=torch.float32, dummy_seed=dummy_seed)
    codec = load_codec(tiny_folder, device=CPU, dtype=torch.float32, dummy_seed=dummy_seed)
    assert_same(whole, Model(whole.config, whole.codec_config, dual_ar, codec))


def test_shards_equal_one_file(copy: Path, tiny_folder: Path) -> None:
    split_into_shards(copy, 3)
    assert_same(load(copy), load(tiny_folder))


def flat_name(name: str) -> str:
    """The spelling of older checkpoints."""
    if name == "audio_decoder.codebook_embeddings.weight":
        return "codebook_embeddings.weight"
    if name.startswith("audio_decoder."):
        return "fast_" + name.removeprefix("audio_decoder.")
    return name.removeprefix("text_model.model.")


def make_flat(folder: Path, *, split_heads: bool) -> None:
    """Turns a nested folder into an equal `dual_ar` one: flat config, flat names, a torch file."""
    nested = json.loads((folder / "config.json").read_text())
    text, audio = nested["text_config"], nested["audio_decoder_config"]
    spelled = {"n_layer": "n_fast_layer", "vocab_size": "codebook_size", "num_codebooks": "num_codebooks"}
    kept = {key: value for key, value in audio.items() if key not in ("model_type", "text_dim")}
    flat = {**text, **{spelled.get(key, f"fast_{key}"): value for key, value in kept.items()}}
    flat |= {"model_type": "dual_ar", "dtype": "float32", "scale_codebook_embeddings": True, "norm_fastlayer_input": True}
    (folder / "config.json").write_text(json.dumps(flat))
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if split_heads and name.endswith("wqkv.weight"):
            part = audio if name.startswith("audio") else text
            sizes = [part[key] * part["head_dim"] for key in ("n_head", "n_local_heads", "n_local_heads")]
            for kind, rows in zip(("wq", "wk", "wv"), value.split(sizes), strict=True):
                tensors[flat_name(name).replace("wqkv", kind)] = rows.clone()
        else:
            tensors[flat_name(name)] = value
    torch.save(tensors, folder / "model.pth")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("split_heads", [False, True])
def test_the_flat_family_loads_from_config_and_names_alone(copy: Path, tiny_folder: Path, split_heads: bool) -> None:
    """Token ids are not in its config: they come from the tokenizer."""
    make_flat(copy, split_heads=split_heads)
    model = load(copy)
    assert model.config.model_type == "dual_ar"
    assert_same(model, load(tiny_folder))
    assert (model.config.end_id, model.config.semantic_start) == (load(tiny_folder).config.end_id, 274)


def test_an_untied_head_and_biases_are_read(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["text_config"] |= {"tie_word_embeddings": False, "attention_qkv_bias": True}
    (copy / "config.json").write_text(json.dumps(config))

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["text_model.model.output.weight"] = torch.randn(config["text_config"]["vocab_size"], 32)
        for layer in range(2):
            tensors[f"text_model.model.layers.{layer}.attention.wqkv.bias"] = torch.randn(128)

    change(copy / "model.safetensors", edit)
    slow = load(copy).dual_ar.slow
    stored = load_file(copy / "model.safetensors")
    assert torch.equal(slow.output_weight, stored["text_model.model.output.weight"])
    assert torch.equal(slow.head[-1], stored["text_model.model.output.weight"][slow.config.end_id])
    assert torch.equal(slow.layers[1].attention.wqkv.bias, stored["text_model.model.layers.1.attention.wqkv.bias"])


def published_codec(folder: Path) -> dict[str, Tensor]:
    """The tiny codec as the published file spells it: weight norm unfolded, masks and tables among the tensors."""
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(folder / "codec.safetensors").items():
        norm = value.flatten(1).norm(dim=1).view(-1, *[1] * (value.ndim - 1)) if value.ndim > 1 else value
        if name.endswith(".conv.weight") and name.startswith(("encoder.", "decoder.")):
            stem = name.removesuffix("weight") + "parametrizations.weight.original"
            tensors |= {f"{stem}0": norm * 3, f"{stem}1": value / 7}
        elif name.endswith(("in_proj.weight", "out_proj.weight")):
            tensors |= {f"{name}_g": norm * 3, f"{name}_v": value * 2}
        else:
            tensors[name] = value
    tensors["quantizer.pre_module.causal_mask"] = torch.ones(4, 4, dtype=torch.bool)
    tensors["quantizer.pre_module.freqs_cis"] = torch.ones(4, 2, 2, dtype=torch.bfloat16)
    return tensors


WRAPPERS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "flat": lambda tensors: tensors,
    "state_dict": lambda tensors: {"state_dict": tensors},
    "generator": lambda tensors: {"generator": tensors},
    "both": lambda tensors: {"state_dict": {"generator": tensors}},
    "prefix": lambda tensors: {
        **{f"generator.{name}": value for name, value in tensors.items()},
        "discriminator.weight": torch.zeros(3),
    },
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_codec_pth_in_every_wrapper_folds_weight_norm(copy: Path, tiny_folder: Path, wrapper: str) -> None:
    torch.save(WRAPPERS[wrapper](published_codec(copy)), copy / "codec.pth")
    (copy / "codec.safetensors").unlink()
    expected = load(tiny_folder).codec.state_dict()
    for name, value in load(copy).codec.state_dict().items():
        normed = name.endswith(("in_proj.weight", "out_proj.weight", ".conv.weight")) and "sample." not in name
        wanted = expected[name] * 3 if normed else expected[name]
        assert torch.allclose(value, wanted, rtol=1e-5, atol=1e-6), name


def test_a_projection_between_decoders_of_different_width(tiny_folder: Path) -> None:
    config, _ = read_configs(tiny_folder)
    assert config.fast_project
    assert load(tiny_folder).dual_ar.fast.project_in.weight.shape == (24, 32)


def test_dummy_weights_are_seeded_and_never_end(tiny_folder: Path) -> None:
    first, again, other = (load(tiny_folder, dummy_seed=seed) for seed in (1, 1, 2))
    assert_same(first, again)
    assert not torch.equal(first.dual_ar.slow.embeddings.weight, other.dual_ar.slow.embeddings.weight)
    assert not first.dual_ar.slow.head[-1].any()
    states = torch.randn(2000, 32, generator=torch.Generator().manual_seed(1))
    logits = states @ first.dual_ar.slow.head.T  # [states, choices and the end]
    assert 2.5 < logits[:, :-1].std() < 3.5
    chosen = logits.softmax(-1).sort(descending=True)
    before = (chosen.values.cumsum(-1) - chosen.values)[chosen.indices == logits.shape[1] - 1]  # likelier choices together
    assert (before > 0.9).all(), "the end is among the likeliest nine tenths of some state"


def test_dummy_weights_need_no_weight_files(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "codec.safetensors").unlink()
    load(copy, dummy_seed=0)


# -- damage --------------------------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(copy: Path) -> None:
    change(copy / "model.safetensors", lambda tensors: tensors.pop("text_model.model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing tensor 'text_model\.model\.norm\.weight'"):
        load(copy)


def test_an_unknown_tensor_is_named(copy: Path) -> None:
    change(copy / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"unknown tensor 'lm_head\.weight'"):
        load(copy)


def test_a_wrong_shape_is_named_with_both_shapes(copy: Path) -> None:
    change(copy / "model.safetensors", lambda tensors: tensors.update({"text_model.model.norm.weight": torch.zeros(31)}))
    with pytest.raises(CheckpointError, match=r"'text_model\.model\.norm\.weight' is \[31\]; the config makes it \[32\]"):
        load(copy)


@pytest.mark.parametrize("change_of", ["missing", "unknown", "shape"])
def test_codec_damage_is_named(copy: Path, change_of: str) -> None:
    name = "decoder.model.0.conv.bias"
    edits: dict[str, Callable[[dict[str, Tensor]], Any]] = {
        "missing": lambda tensors: tensors.pop(name),
        "unknown": lambda tensors: tensors.update({"decoder.model.99.weight": torch.zeros(1)}),
        "shape": lambda tensors: tensors.update({name: torch.zeros(5)}),
    }
    change(copy / "codec.safetensors", edits[change_of])
    with pytest.raises(CheckpointError, match=r"decoder\.model\.(0\.conv\.bias|99\.weight)"):
        load(copy)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_safetensors_file_is_named(copy: Path, share: float) -> None:
    path = copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated") as error:
        load(copy)
    if share > 0.5:
        assert "tensor '" in str(error.value)


def test_a_truncated_or_foreign_pickle_is_named(copy: Path) -> None:
    (copy / "codec.safetensors").unlink()
    torch.save({"weight": torch.zeros(1000)}, copy / "codec.pth")
    whole = (copy / "codec.pth").read_bytes()
    for content in (whole[:500], b"", b"not a torch file"):
        (copy / "codec.pth").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"codec\.pth"):
            load(copy)


class Unwanted:
    """Something a pickle could carry that is no tensor."""


def test_a_pickle_that_holds_code_is_refused(copy: Path) -> None:
    (copy / "codec.safetensors").unlink()
    torch.save({"weight": Unwanted()}, copy / "codec.pth")
    with pytest.raises(CheckpointError, match=r"codec\.pth"):
        load(copy)


def test_missing_files_and_shards_are_named(copy: Path) -> None:
    places = split_into_shards(copy, 2)
    shard = places["text_model.model.norm.weight"]
    (copy / shard).rename(copy / "elsewhere")
    with pytest.raises(CheckpointError, match=shard):
        load(copy)
    (copy / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(copy)


# -- configuration -------------------------------------------------------------------------------------------------------


def with_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_an_unknown_model_type_lists_the_known_ones(copy: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"llama.*fish_qwen3_omni, dual_ar"):
        read_configs(with_config(copy, model_type="llama"))


def test_an_unknown_key_gets_a_hint(copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"eos_token_ids.*did you mean 'eos_token_id'"):
        read_configs(with_config(copy, eos_token_ids=3))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_head", 0),
        ("n_head", None),
        ("dim", "32"),
        ("norm_eps", -1),
        ("head_dim", 15),
        ("attention_qk_norm", 1),
        ("use_moe", True),
    ],
)
def test_impossible_values_name_their_key(copy: Path, key: str, value: Any) -> None:
    text = json.loads((copy / "config.json").read_text())["text_config"]
    with pytest.raises(CheckpointError, match=key):
        read_configs(with_config(copy, text_config={**text, key: value}))


def test_older_files_leave_two_sizes_to_custom() -> None:
    config = {
        "model_type": "dual_ar", "vocab_size": 200, "n_layer": 1, "n_head": 4, "n_local_heads": -1, "dim": 96,
        "num_codebooks": 4, "codebook_size": 16, "intermediate_size": None, "eos_token_id": 1, "semantic_start_token_id": 2,
        "semantic_end_token_id": 17,
    }  # fmt: skip
    for decoder in (ModelConfig.from_dict(config).slow, ModelConfig.from_dict(config).fast):
        assert (decoder.num_kv_heads, decoder.ffn_dim) == (4, 256)
    with pytest.raises(CheckpointError, match="0 key-value heads"):
        ModelConfig.from_dict({**config, "n_local_heads": 0})


def test_a_weight_type_that_is_none_is_refused(copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"dtype 'int3' is not one of bfloat16"):
        read_configs(with_config(copy, dtype="int3"))


def test_model_and_codec_must_agree(copy: Path) -> None:
    codec = json.loads((copy / "codec_config.json").read_text())
    (copy / "codec_config.json").write_text(json.dumps({**codec, "n_residual_codebooks": 5}))
    with pytest.raises(CheckpointError, match="4 codebooks, its codec 6"):
        read_configs(copy)


def test_a_config_that_is_no_json_is_named(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_configs(copy)


# -- finding -------------------------------------------------------------------------------------------------------------


def test_a_folder_is_used_as_it_is_and_never_calls_out(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    assert find_model(str(tiny_folder)) == tiny_folder
    for name in ("/no/such/folder", "./nowhere", "~/nowhere", "a/b/c"):
        with pytest.raises(ModelNotFound, match="no folder"):
            find_model(name)


def test_a_hub_id_that_is_not_cached_is_not_found_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="someone/some-model"):
        find_model("someone/some-model", cache=tmp_path)


def test_hub_downloads_ask_for_the_files_that_are_used(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def record(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tiny_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", record)
    assert find_model("someone/some-model", revision="main") == tiny_folder
    assert asked[0][0] == "someone/some-model"
    assert asked[0][1]["revision"] == "main"


def test_layouts_of_other_dimensions_follow_their_config(tiny_folder: Path) -> None:
    config, codec = read_configs(tiny_folder)
    language, waveform = describe_layout(config, codec)
    stored = load_file(tiny_folder / "model.safetensors")
    assert language == {name: tuple(value.shape) for name, value in stored.items()}
    assert len(waveform) > len(load_file(tiny_folder / "codec.safetensors"))
    assert isinstance(config, ModelConfig)
    assert isinstance(codec, CodecConfig)
