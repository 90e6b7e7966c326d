"""vLLM-Omni's four deploy files for this model, rebuilt from what is known of their content, and what becomes of them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from duetts.config import ProcessConfig
from duetts.deploy.peer import as_file, convert
from duetts.errors import ConfigError
from duetts.settings.files import load
from duetts.settings.values import build, resolve
from tests.test_cli import duetts_here

SAMPLING = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "max_tokens": 2048, "seed": 42, "repetition_penalty": 1.0}
CHUNKS = {"codec_streaming": True, "codec_chunk_frames": 25, "codec_left_context_frames": 25, "initial_codec_chunk_frames": 4}
CROWD = {"fish_speech_tensor_codes": True, "fish_speech_backlog_codec_chunk_frames": 50, "fish_speech_dac_dtype": "fp16"}
# Name -> GPU of the codec, places, shares of memory, what its connector has besides; and what is made of it.
FILES: dict[str, tuple[str, tuple[int, int], tuple[float, float], dict[str, Any], dict[str, Any]]] = {
    "fish_qwen3_omni": ("0", (4, 1), (0.6, 0.1), {"connector_get_sleep_s": 0.01},
                        {"max_num_seqs": 4, "gpu_memory_utilization": 0.7}),
    "fish_qwen3_omni_2gpu": ("1", (64, 64), (0.75, 0.2), {"connector_get_sleep_s": 0.001},
                             {"max_num_seqs": 64, "gpu_memory_utilization": 0.75}),
    "fish_qwen3_omni_high_concurrency_single_gpu": ("0", (64, 64), (0.72, 0.18), CROWD,
                                                    {"max_num_seqs": 64, "gpu_memory_utilization": 0.9}),
    "fish_qwen3_omni_high_concurrency_dual_gpu": ("1", (64, 64), (0.85, 0.25), CROWD,
                                                  {"max_num_seqs": 64, "gpu_memory_utilization": 0.85}),
}  # fmt: skip


def peer_file(name: str) -> dict[str, Any]:
    device, places, shares, extra, _ = FILES[name]
    lengths = {"max_model_len": 16384, "max_num_batched_tokens": 16384}
    return {
        "async_chunk": True,
        "enable_chunked_prefill": False,
        "trust_remote_code": True,
        "connectors": {"shm": {"name": "SharedMemoryConnector", "extra": {**CHUNKS, **extra}}},
        "stages": [
            {"stage_id": 0, "devices": "0", "max_num_seqs": places[0], "gpu_memory_utilization": shares[0], **lengths,
             "output_connectors": {"to_stage_1": "shm"}, "default_sampling_params": SAMPLING},
            {"stage_id": 1, "devices": device, "max_num_seqs": places[1], "gpu_memory_utilization": shares[1], **lengths,
             "enforce_eager": True, "input_connectors": {"from_stage_0": "shm"}},
        ],
        "platforms": {"xpu": {"stages": [{"stage_id": 0, "max_model_len": 2048}]}},
    }  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_each_of_the_four_files_becomes_one_that_is_read(name: str, tmp_path: Path) -> None:
    path, made_path = tmp_path / f"{name}.yaml", tmp_path / "made.yaml"
    path.write_text(yaml.safe_dump(peer_file(name)))
    made, notes = convert(path)
    made_path.write_text(as_file(path.name, made, notes))
    content = dict(load(made_path))
    assert content.pop("version") == 1
    settings = build(resolve({}, {}, ("made.yaml", content)))
    found = {
        "max_num_seqs": settings.engine.max_num_seqs, "gpu_memory_utilization": settings.engine.gpu_memory_utilization,
    }  # fmt: skip
    assert found == FILES[name][4]
    assert settings.engine.max_model_len == 16384
    told = " ".join(notes)
    for key in (*CHUNKS, *FILES[name][3], "async_chunk", "enable_chunked_prefill", "1.max_num_seqs", "default_sampling_params",
                "max_num_batched_tokens", "1.enforce_eager", "platforms.xpu", "trust_remote_code"):  # fmt: skip
        assert key in told
    assert settings.processes == ProcessConfig(codec_device="same" if FILES[name][0] == "0" else "next")
    assert "unknown here" not in told


def test_bases_platforms_and_what_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(peer_file("fish_qwen3_omni")))
    content = {
        "base_config": "base.yaml", "custom_voice_dir": "/voices", "dtype": "float16", "new_switch": 1,
        "stages": [{"stage_id": 0, "max_num_seqs": 9, "num_replicas": 3, "devices": "2", "engine_args": {"novel": 1}}],
        "platforms": {"cuda": {"stages": [{"stage_id": 0, "max_model_len": 4096, "tensor_parallel_size": 2}]}},
    }  # fmt: skip
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(content))
    made, notes = convert(tmp_path / "own.yaml")
    assert made == {
        "engine": {"max_model_len": 4096, "dtype": "float16", "max_num_seqs": 9, "gpu_memory_utilization": 0.6},
        "processes": {"engines": 3, "codec_device": "next"}, "voices": {"voices_dir": "/voices"},
    }  # fmt: skip
    assert {"new_switch: unknown here", "stages 0.novel: unknown here",
            "stages 0.tensor_parallel_size 2: a model is not spread over GPUs"} <= set(notes)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\n", "has no stage 0"), ("stages: 3\n", "must be a list of stages"),
        ("stages: [3]\n", "must be a list of stages"),
        ("stages: [{stage_id: 0, engine_args: 3}]\n", "engine_args"), ("base_config: a.yaml\n", "leads back to itself"),
        ("stages: [{stage_id: 0, max_num_seqs: many}]\n", "max_num_seqs is 'many'"),
        ("stages: [{stage_id: first}]\n", "stage_id"), ("stages: [{gpu_memory_utilization: most}]\n", "gpu_memory_utilization"),
        ("stages: [{num_replicas: all}]\n", "num_replicas"),
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "a.yaml")


def test_the_command_prints_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fish_qwen3_omni_2gpu.yaml"
    path.write_text(yaml.safe_dump(peer_file("fish_qwen3_omni_2gpu")))
    run = duetts_here("config", "--from-vllm-omni", str(path))
    assert run.returncode == 0, run.stderr
    assert yaml.safe_load(run.stdout)["processes"] == {"codec_device": "next"}
    assert "# * connectors.shm.codec_chunk_frames:" in run.stdout
