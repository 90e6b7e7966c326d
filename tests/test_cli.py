"""The command, run as a person runs it; mistakes in this process, by the same entry."""

import os
import subprocess
import sys
import wave
from pathlib import Path

import pytest
from typer.testing import CliRunner

from duetts.cli import app


def duetts(*arguments: str, stdin: str | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "duetts", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, env={**os.environ, **environment}, timeout=200)


def duetts_here(*arguments: str, stdin: str | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The same command in this process, which has loaded torch already: that is nearly all that a short command costs."""
    run = CliRunner().invoke(app, list(arguments), input=stdin, env=environment, prog_name="duetts")
    if run.exception is not None and not isinstance(run.exception, SystemExit):
        raise run.exception
    return subprocess.CompletedProcess(arguments, run.exit_code, run.stdout, run.stderr)


def test_help_lists_the_commands_and_loads_no_torch() -> None:
    run = duetts("--help")
    assert run.returncode == 0
    for command in ("say", "serve", "doctor"):
        assert command in run.stdout
    check = "import sys, duetts.cli; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_say_writes_a_wav_and_the_same_one_for_the_same_seed(tiny_folder: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.wav", tmp_path / "b.wav"]
    first = duetts("say", "Hi there.", "--model", str(tiny_folder), "-o", str(files[0]), "--seed", "3", "--device", "cpu")
    second = duetts_here("say", "-", "-o", str(files[1]), "--seed", "3", stdin="Hi there.\n", DUETTS_MODEL=str(tiny_folder))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "44100 Hz" in first.stdout
    assert files[0].read_bytes() == files[1].read_bytes()
    with wave.open(str(files[0])) as file:
        assert file.getframerate() == 44100
        assert file.getnframes() % 2048 == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["say", "...", "--model", "{tiny}"], 1, "nothing to speak"),
        (["say", "Hi.", "--model", "{tiny}", "--temperature", "9"], 1, "temperature is 9"),
        (["say", "Hi.", "--model", "{tiny}", "--ref-text", "x"], 1, "reference is missing"),
        (["say", "Hi.", "--model", "/no/such/model"], 3, "no folder"),
        (["say", "Hi.", "--model", "{tiny}", "--device", "warp"], 2, "warp"),
        (["serve", "/no/such/model"], 3, "no folder"),
        (["serve", "{tiny}", "--port", "99999"], 2, "99999"),
        (["serve", "{tiny}", "--load-format", "magic"], 2, "magic"),
        (["doctor", "/no/such/model"], 3, "no folder"),
        (["speak"], 2, "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_end_with_a_line_and_a_code(
    tiny_folder: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    filled = [argument.replace("{tiny}", str(tiny_folder)) for argument in arguments]
    if filled[0] == "say":
        filled += ["-o", str(tmp_path / "x.wav")]
    run = (duetts if filled[0] == "serve" else duetts_here)(*filled, COLUMNS="200")
    assert run.returncode == code, run.stderr
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_doctor_reports_a_whole_folder_and_a_broken_one(tiny_folder: Path, tmp_path: Path) -> None:
    run = duetts_here("doctor", str(tiny_folder), "--device", "cpu")
    assert run.returncode == 0, run.stdout
    for topic in ("language model", "codec", "tokenizer", "memory", "untrained"):
        assert topic in run.stdout
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "codec_config.json"):
        (broken / name).write_bytes((tiny_folder / name).read_bytes())
    (broken / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes()[:-100])
    run = duetts_here("doctor", str(broken), "--device", "cpu")
    assert run.returncode == 1
    assert "truncated" in run.stdout
    assert "tokenizer.json is missing" in run.stdout
    apart = duetts_here("doctor", str(tiny_folder), "--device", "cpu", "--codec-device", "next")
    assert apart.returncode == 0
    sums = [line for line in apart.stdout.splitlines() if " memory " in line]
    assert [line.split()[1] for line in sums] == ["engine", "codec"]
    assert "codec 0.00" in sums[0]
    assert "weights 0.00" in sums[1]
    assert duetts_here("doctor", str(tiny_folder), "--device", "cpu", "--codec-device", "cuda:77").returncode == 1
    too_much = duetts_here("doctor", str(tiny_folder), "--device", "cpu", "--max-num-seqs", "100000000")
    assert too_much.returncode == 1
    assert "does not fit" in too_much.stdout
