"""Recipes: every hardware with every goal is rendered, understood by our own command line, and says that it estimates."""

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from typer.main import get_command

from duetts.cli import app
from duetts.config import ServerConfig
from duetts.deploy import profiles
from duetts.deploy.profiles import choose, read_files
from duetts.errors import ConfigError
from duetts.machine import Gpu
from duetts.recipe.cards import HARDWARE, recognise
from duetts.recipe.making import BUSY, GOALS, MODELS, Request, make
from duetts.recipe.shown import FORMS
from duetts.roofline import TARGET_MS
from duetts.server.schemas import read_order
from duetts.settings.arguments import Given
from duetts.settings.values import build, resolve
from tests.test_cli import duetts_here

PUBLIC = ["h100", "h200", "b200", "gb200", "b300", "gb300", "mi300x", "mi325x", "mi350x", "mi355x"]
SMALL = ["rtx_3090", "rtx_4090", "rtx_5090", "l4", "l40s", "a100", "a800", "rtx_pro_6000", "dgx_spark", "cpu"]
SCHEMA = jsonschema_rs.validator_for(json.loads((Path(__file__).parents[1] / "docs" / "recipe.schema.json").read_text()))
SERVE = get_command(app).commands["serve"]  # type: ignore[attr-defined]
GIB = 1 << 30


def nobody() -> None:
    """This machine is not asked."""
    raise AssertionError


def settings_of(argv: list[str]) -> Any:
    """What `duetts serve` makes of a line, through its own parser."""
    assert argv[:2] == ["duetts", "serve"]
    given = Given(SERVE.make_context("serve", argv[2:]).params)
    profile, _ = choose(given.profile or "auto", resolve(given.flags, {}))
    return build(resolve(given.flags, {}, profile))


def test_all_hardware_with_all_goals_is_rendered_parsed_and_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profiles, "local_gpus", lambda: None)
    assert set(PUBLIC + SMALL) <= set(HARDWARE)
    path = tmp_path / "deploy.yaml"
    lines = set()
    for (name, hardware), goal in itertools.product(HARDWARE.items(), GOALS):
        for count in {min(1, hardware.gpus), min(2, hardware.gpus), hardware.gpus}:
            made = make(Request(hardware=name, gpus=str(count), goal=goal), strict=True, gpus=nobody)
            SCHEMA.validate(made)
            settings = settings_of(made["serve"]["argv"])
            path.write_text(yaml.safe_dump(made["deploy_config"]))
            base, files = read_files(str(path))
            profile, _ = choose(base or "none", resolve({}, {}, *files))
            assert build(resolve({}, {}, profile, *files)) == settings
            assert settings.engine.max_num_seqs == made["estimates"]["max_num_seqs"]
            apart = settings.processes.codec_device == "next"
            assert settings.processes.engines * (2 if apart else 1) == max(1, count)
            assert len(made["serve"]["env"].get("CUDA_VISIBLE_DEVICES", "0").split(",")) in (1, count)
            flags = {word for word in made["serve"]["argv"] if word.startswith("--")}
            assert flags == set(made["serve"]["reasons"])
            assert "estimate" in made["estimates"]["source"]
            assert any("untested" in warning for warning in made["warnings"]) is (name != "h200")
            text, markdown = FORMS["text"](made, False), FORMS["md"](made, True)
            assert re.search(f"Configuration: hardware {name} .*\n(.*\n)*.*Install\n(.*\n)*.*Serve\n(.*\n)*.*Guide\n", text)
            assert made["serve"]["docker_command"] in markdown
            assert FORMS["argv"](made, False).split("\n")[:-1] == made["serve"]["argv"]
            lines.add(made["serve"]["command"])
    assert len(lines) > 2 * len(HARDWARE)


def test_flags_follow_from_the_hardware_and_the_goal() -> None:
    def flags(**asked: str) -> dict[str, str]:
        argv = make(Request(**asked), strict=True, gpus=nobody)["serve"]["argv"][3:]
        return dict(zip(argv[::2], argv[1::2], strict=True))

    assert flags(hardware="l4")["--profile"] == "fish_qwen3_omni_24gb"
    assert flags(hardware="rtx_5080")["--profile"] == "fish_qwen3_omni_16gb"
    assert flags(hardware="h200")["--profile"] == "fish_qwen3_omni_8gpu"
    assert flags(hardware="h200", gpus="2")["--profile"] == "fish_qwen3_omni_2gpu"
    assert "--engines" not in flags(hardware="h200", gpus="2")
    assert flags(hardware="h200", gpus="1")["--engines"] == "1"
    assert flags(hardware="gb200")["--engines"] == "4"
    assert flags(hardware="dgx_spark")["--quantization"] == "int8"
    assert flags(hardware="h200", variant="fp8")["--quantization"] == "fp8"
    assert flags(hardware="rtx_4090", variant="bf16")["--quantization"] == "none"
    places = [int(flags(hardware="h200", goal=goal)["--max-num-seqs"]) for goal in ("latency", "balanced", "throughput")]
    assert places == sorted(set(places))
    assert flags(goal="latency")["--first-chunk"] == "1"


def test_estimates_are_near_the_targets_and_keep_their_share() -> None:
    for goal, name in itertools.product(GOALS, HARDWARE):
        found = make(Request(hardware=name, goal=goal), gpus=nobody)["estimates"]
        assert found["rtf_full"] <= max(BUSY[goal], found["rtf"]) or found["max_num_seqs"] == 2
    alone = make(Request(hardware="h200", gpus="1"), gpus=nobody)["estimates"]
    assert alone["rtf"] * 46.44 == pytest.approx(TARGET_MS[1], rel=0.05)
    slow = make(Request(hardware="cpu"), gpus=nobody)
    assert any("no stream would play without gaps" in warning for warning in slow["warnings"])


@pytest.mark.parametrize(
    ("asked", "message", "chosen"),
    [
        ({"hardware": "h300"}, "did you mean h200?", "h200"), ({"gpus": "9"}, "gpus '9' has no recipe: it can be 1, 2", 8),
        ({"gpus": "two"}, "gpus 'two'", 8), ({"variant": "int4"}, "did you mean int8?", "default"),
        ({"task": "a2t"}, "it can be t2a", "t2a"), ({"goal": "speed"}, "it can be balanced, latency, throughput", "balanced"),
        ({"hardware": "a100", "variant": "fp8"}, "has no such type", "int8"),
        ({"hardware": "cpu", "variant": "bf16"}, "it can be default", "fp32"),
        ({"model": "duetts-mini", "variant": "fp8"}, "it can be default", "duetts-mini"),
        ({"model": "somebody/other"}, "it can be fishaudio/s2-pro, duetts-mini", "fishaudio/s2-pro"),
    ],
)  # fmt: skip
def test_what_has_no_recipe_is_a_warning_or_strictly_an_error(asked: dict[str, str], message: str, chosen: Any) -> None:
    made = make(Request(**asked), gpus=nobody)
    assert any(message in warning for warning in made["warnings"])
    assert chosen in (*made["configuration"].values(), made["model"]["id"])
    assert made["configuration"]["variant"] == {"a100": "int8"}.get(asked.get("hardware", ""), "default")
    assert made["requested"] == {**dict.fromkeys(Request.__slots__), **asked}
    with pytest.raises(ConfigError, match=re.escape(message)):
        make(Request(**asked), strict=True, gpus=nobody)


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GB200", "gb200"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"), ("NVIDIA GeForce RTX 4090", "rtx_4090"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB10", "dgx_spark"),
        ("NVIDIA RTX PRO 6000 Blackwell", "rtx_pro_6000"), ("NVIDIA T4", None),
    ],
)  # fmt: skip
def test_auto_knows_cards_by_their_names(driver: str, expected: str | None) -> None:
    gpus = [Gpu(driver, 40 * GIB, 40 * GIB)] * 3
    assert recognise(gpus) == (expected, 3)
    made = make(Request(hardware="auto"), gpus=lambda: gpus)
    found = made["configuration"]
    assert (found["hardware"], found["gpu_count"]) == ((expected, 3) if expected else ("h200", 8))
    assert (found["vram_gb_per_gpu"] == 43) is (expected is not None)
    assert any(driver in warning for warning in made["warnings"]) is (expected is None)


def test_auto_without_gpus_and_where_nothing_can_be_told() -> None:
    assert make(Request(hardware="auto"), gpus=list)["configuration"]["hardware"] == "cpu"
    assert "nothing can be told" in make(Request(hardware="auto"), gpus=lambda: None)["warnings"][0]


def test_examples_are_requests_that_the_server_takes() -> None:
    for model in MODELS:
        made = make(Request(model=model), strict=True, gpus=nobody)
        SCHEMA.validate(made)
        for example in made["examples"]:
            words = shlex.split(example["curl"])
            body = json.loads(words[words.index("-d") + 1])
            assert read_order(body, ServerConfig((model,)), 44100, "speech-1")
            compile(example["python"], "example.py", "exec")
            assert repr(body) in example["python"]


def test_the_same_request_gives_the_same_bytes_and_the_command_prints_them() -> None:
    run = duetts_here("recipe", "--hardware", "h300", "--json")
    assert run.returncode == 0
    assert run.stdout == FORMS["json"](make(Request(hardware="h300"), gpus=nobody), False)
    assert "note: hardware 'h300' has no recipe" in run.stderr
    refused = duetts_here("recipe", "--hardware", "h300", "--strict")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "did you mean h200?" in refused.stderr
