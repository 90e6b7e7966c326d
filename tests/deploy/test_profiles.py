"""Profiles that ship with the package: which one is chosen, what it sets on which GPUs, and what lies over what."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from duetts.config import EngineConfig
from duetts.deploy import profiles
from duetts.deploy.profiles import automatic, choose, fitted, load_profile, model_type, profile_names, read_files
from duetts.deploy.sizing import PLACE, POSITION, fixed_bytes, places
from duetts.engine.memory import plan_memory
from duetts.errors import ConfigError
from duetts.machine import Gpu, local_gpus, read_gpus
from duetts.model_config import CodecConfig, ModelConfig
from duetts.settings.arguments import Given
from duetts.settings.values import Value, build, read_file, resolve
from tests.test_config import line

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", 140 * GIB, 141 * GIB)
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", 23 * GIB, 24 * GIB)
RTX_5080 = Gpu("NVIDIA GeForce RTX 5080", 15 * GIB, 16 * GIB)
S2_PRO_CONFIG = Path(__file__).parents[1] / "data" / "s2_pro_config.json"


def settle(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu] | None, profile: str = "auto", file: Path | None = None,
    environment: dict[str, str] | None = None, model: str = "fishaudio/s2-pro", **flags: Any,
) -> dict[str, Value]:  # fmt: skip
    """As the command does it, on a machine with these GPUs."""
    monkeypatch.setattr(profiles, "local_gpus", lambda: gpus)
    given = Given(line(model=model, **flags))
    base, files = read_files(None if file is None else str(file))
    layer, _ = choose(base or profile, resolve(given.flags, environment or {}, *files))
    return resolve(given.flags, environment or {}, layer, *files)


def chosen(values: dict[str, Value]) -> dict[str, Any]:
    return {name: value.value for name, value in values.items() if value.source.startswith("profile ")}


def test_every_profile_holds_settings_that_can_be() -> None:
    assert {"fish_qwen3_omni", "fish_qwen3_omni_2gpu", "fish_qwen3_omni_8gpu"} <= set(profile_names())
    for name in profile_names():
        content = load_profile(name)
        kind, about = content.pop("model_type"), content.pop("about")
        assert (kind, content["version"]) == ("fish_qwen3_omni", 1)
        assert about
        assert not about.endswith(".")
        for gpus in ([], [H200] * 8, [RTX_4090], [RTX_5080] * 2):
            found = dict(read_file(name, fitted(content, gpus)))
            assert build(resolve({}, {}, (name, fitted(content, gpus))))
            assert found.keys() <= {
                "max_num_seqs",
                "max_queue",
                "engines",
                "quantization",
                "max_model_len",
                "device",
                "codec_device",
                "workers",
            }


@pytest.mark.parametrize(
    ("gpus", "profile", "expected"),
    [
        ([H200], "auto", {"max_num_seqs": 64, "max_queue": 256}),
        ([H200] * 2, "auto", {"max_num_seqs": 64, "max_queue": 256, "engines": 2}),
        ([H200] * 8, "auto", {"max_num_seqs": 64, "max_queue": 256, "engines": 8, "workers": 4}),
        ([H200] * 3, "auto", {"max_num_seqs": 64, "max_queue": 256, "engines": 3, "workers": 2}),
        # Somebody else uses half of the first, and the whole of the third.
        ([Gpu("H200", 24 * GIB, 141 * GIB), H200, Gpu("H200", GIB, 141 * GIB), H200], "auto",
         {"max_num_seqs": 39, "max_queue": 156, "engines": 2}),
        ([RTX_4090], "auto", {"max_num_seqs": 24, "max_queue": 96, "quantization": "int8"}),
        ([RTX_5080], "auto", {"max_num_seqs": 8, "max_queue": 32, "quantization": "int8", "max_model_len": 4096}),
        ([], "auto", {"device": "cpu", "max_num_seqs": 2, "max_queue": 8, "max_model_len": 4096}),
        (None, "auto", {}),  # a GPU that nothing is known of: the engine itself finds what fits
        ([H200], "none", {}),
        ([H200] * 2, "fish_qwen3_omni_2gpu", {"max_num_seqs": 128, "max_queue": 512, "codec_device": "next"}),
        # What the codec takes of the second is no room of the first.
        ([Gpu("H200", 24 * GIB, 141 * GIB), H200], "fish_qwen3_omni_2gpu",
         {"max_num_seqs": 51, "max_queue": 204, "codec_device": "next"}),
        ([H200] * 8, "fish_qwen3_omni_8gpu", {"max_num_seqs": 128, "max_queue": 512, "engines": 8, "workers": 4}),
        (None, "fish_qwen3_omni_8gpu", {"engines": 8, "workers": 4}),
    ],
)  # fmt: skip
def test_what_a_profile_sets_follows_from_the_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu] | None, profile: str, expected: dict[str, Any]
) -> None:
    assert chosen(settle(monkeypatch, gpus, profile)) == expected


def test_a_named_device_is_the_only_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(settle(monkeypatch, [H200, RTX_5080], device="cuda:1")) == {
        "max_num_seqs": 8, "max_queue": 32, "quantization": "int8", "max_model_len": 4096
    }  # fmt: skip
    assert chosen(settle(monkeypatch, [H200], device="cpu"))["max_num_seqs"] == 2


def test_profile_file_variable_and_flag_in_this_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("version: 1\nmodel_type: fish_qwen3_omni\nengine: {max_queue: 5, max_num_seqs: 6, dtype: float16}\n")
    values = settle(monkeypatch, [H200] * 2, file=path, environment={"max_num_seqs": "7", "dtype": "float32"},
                    dtype="bfloat16")  # fmt: skip
    found = {
        name: (values[name].value, values[name].source) for name in ("port", "engines", "max_queue", "max_num_seqs", "dtype")
    }
    assert found == {
        "port": (8000, "default"),
        "engines": (2, "profile fish_qwen3_omni"),
        "max_queue": (5, "own.yaml"),
        "max_num_seqs": (7, "DUETTS_MAX_NUM_SEQS"),
        "dtype": ("bfloat16", "--dtype"),
    }


def test_a_file_may_be_based_on_a_file_and_that_on_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.toml\nport: 1\n")
    (tmp_path / "b.toml").write_text('base = "fish_qwen3_omni_24gb"\nport = 2\nhost = "::1"\n')
    values = settle(monkeypatch, [H200], file=tmp_path / "a.yaml")
    assert (values["port"].value, values["host"].source) == (1, "b.toml")
    assert values["quantization"].source == "profile fish_qwen3_omni_24gb"
    (tmp_path / "b.toml").write_text('base = "a.yaml"\n')
    with pytest.raises(ConfigError, match="leads back to itself"):
        read_files(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    "name", ["fish_qwen3_omni_2gpu", "fish_qwen3_omni_2gpu.yaml", "vllm_omni/deploy/fish_qwen3_omni_2gpu.yaml"]
)
def test_a_deploy_file_that_is_a_profile_by_its_name(name: str) -> None:
    assert read_files(name) == ("fish_qwen3_omni_2gpu", [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 2\n", "own.yaml: version is 2; this duetts reads version 1"),
        ("model_type: llama\n", "model_type 'llama' is not supported; supported are dual_ar, fish_qwen3_omni"),
        ("base: 3\n", "base must be the name"),
        ("base: fish_qwen3_omni_24g\n", "there are auto, none"),
        ("base: fish_qwen3_omni_24g\n", "did you mean fish_qwen3_omni_24gb?"),
        ("codec: {device: cuda:1}\n", "its device is codec_device of processes"),
        ("placement: {codec_on: next}\n", "a model is not spread over GPUs"),
        ("overrides: {h200: {max_num_seqs: 3}}\n", "what follows from the machine is in profiles"),
        ("engine: {max_num_seq: 3}\n", "did you mean max_num_seqs?"),
        ("at_most: {max_num_seqs: 3}\n", "own.yaml: at_most is unknown"),
        ("stages: [{stage_id: 0}]\n", "`duetts config --from-vllm-omni own.yaml` makes one for duetts"),
    ],
)
def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        settle(monkeypatch, [H200], file=tmp_path / "own.yaml")


@pytest.mark.parametrize(
    ("gpus", "name", "flags", "message"),
    [
        ([H200], "fish_qwen3_omni_2gpu", {}, "puts the codec on a second GPU; GPUs here: 1"),
        ([H200] * 3, "fish_qwen3_omni_8gpu", {}, "starts 8 engines, one on each GPU; GPUs here: 3"),
        ([H200], "fish_qwen3_omni_2gpus", {}, "did you mean fish_qwen3_omni_2gpu?"),
        ([H200], "auto", {"set_values": ["codec.device=cuda:1"]}, "its device is codec_device of processes"),
    ],
)
def test_profiles_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], name: str, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        settle(monkeypatch, gpus, name, **flags)
    settle(monkeypatch, gpus, "fish_qwen3_omni_2gpu", codec_device="same")
    settle(monkeypatch, gpus, "fish_qwen3_omni_8gpu", engines="1")


def test_a_profile_is_for_its_type_of_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = json.loads(S2_PRO_CONFIG.read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_type(str(tmp_path)) == ("fish_qwen3_omni", [])
    assert chosen(settle(monkeypatch, [H200], model=str(tmp_path)))["max_num_seqs"] == 64
    monkeypatch.setattr(profiles, "model_type", lambda model, revision: ("dual_ar", []))
    with pytest.raises(ConfigError, match="is for models of type fish_qwen3_omni"):
        settle(monkeypatch, [H200], "fish_qwen3_omni_24gb", model=str(tmp_path))


def test_small_models_and_unknown_ones_have_no_profile(tiny_folder: Path) -> None:
    assert model_type(None) == model_type("duetts-mini") == model_type(str(tiny_folder)) == (None, [])
    kind, notes = model_type("somebody/something-that-nobody-fetched")
    assert kind is None
    assert "--profile names one" in notes[0]


def test_places_are_those_of_the_engines_own_sum() -> None:
    """Never more than fit; and not much less."""
    model, codec = ModelConfig.from_dict(json.loads(S2_PRO_CONFIG.read_text())), CodecConfig.from_dict({})
    for quantization, count in (("none", 8), ("int8", 24), ("fp8", 128)):
        config = EngineConfig(dtype="bfloat16", max_num_seqs=count, quantization=quantization)
        needed = plan_memory(model, codec, config, torch.device("cuda")).total
        assert places(needed, 2 * needed, 1.0, quantization) in (count - 1, count)
    assert places(12e9, 24e9, 0.9, "none") == 0
    assert fixed_bytes("int8") + PLACE * POSITION < 12e9


def test_what_the_driver_tells_is_read() -> None:
    told = "0, GPU-aa, NVIDIA H200, 100, 200\n1, GPU-bb, NVIDIA L4, 10, 20\n"
    first, second = Gpu("NVIDIA H200", 100 << 20, 200 << 20), Gpu("NVIDIA L4", 10 << 20, 20 << 20)
    for visible, expected in (
        (None, [first, second]), ("1,0", [second, first]), ("GPU-b", [second]), ("", []), ("0,-1,1", [first]),
        ("MIG-x", None), ("7", None), ("GPU-", None),
    ):  # fmt: skip
        assert read_gpus(told, visible) == expected
    assert read_gpus("0, GPU-aa, NVIDIA GB10, [N/A], [N/A]\n", None) is None
    assert automatic(None) == "fish_qwen3_omni"


def test_the_drivers_tool_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for program, expected in (("echo 0, GPU-aa, NVIDIA L4, 10, 20", [Gpu("NVIDIA L4", 10 << 20, 20 << 20)]), ("exit 9", None)):
        tool.write_text(f"#!/bin/sh\n{program}\n")
        tool.chmod(0o755)
        assert local_gpus() == expected
