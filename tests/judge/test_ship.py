"""What goes into the package: a complete model folder with presets, or nothing at all."""

from __future__ import annotations

import json
import shutil
import tomllib
import wave
from pathlib import Path

import numpy as np
import pytest
from training.judge.gates import RESULT, judge
from training.judge.serving import Server, served
from training.judge.sets import Line, write_json, write_lines
from training.samples import record_all
from training.ship import CARD, FILES, TABLE, fill_card, ship

import duetts.embedded
from duetts.config import EngineConfig
from duetts.embedded import SHIPPED, SUMS, check_sums, is_trained, mini_folder
from duetts.engine.inprocess import start_speaker
from duetts.errors import CheckpointError
from duetts.synthesizer import Synthesizer
from duetts.tts import TTS
from duetts.voices.store import read_presets

PROJECT = Path(__file__).parents[2]
RATE = 44100


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> Path:
    """The tiny model as an exported one, which says that it is trained."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "untrained": False}))
    write_json(folder / "generation_config.json", {"temperature": 0.7, "top_p": 0.9, "residual_temperature": 0.6})
    return folder


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    write_lines(folder, [Line("anna", "A first sentence.", "s-1"), Line("bert", "A second one.", "s-2")])
    tone = (8000 * np.sin(np.arange(2 * RATE) * 0.05)).astype("<i2")
    for name in ("anna", "bert"):
        with wave.open(str(folder / f"{name}-original.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(tone.tobytes())
    return folder


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


async def test_a_shipped_model_speaks_and_is_never_written_to(model: Path, clips: Path, tmp_path: Path) -> None:
    into = tmp_path / "package"
    ship(model, clips, "bert", into)
    before = files(into)
    assert {*FILES, SUMS, "LICENSE"} < before
    presets = {stored.voice.name: stored for stored in read_presets(into / "voices")}
    assert {name: stored.is_default for name, stored in presets.items()} == {"anna": False, "bert": True}
    assert {stored.voice.transcript for stored in presets.values()} == {"A first sentence.", "A second one."}
    speaker = start_speaker(into, EngineConfig(device="cpu", cpu_threads=1))
    synthesizer = Synthesizer(into, speaker)
    try:
        assert speaker.info.weights == "trained"
        assert all(stored.codes(speaker.info.codec_id) is not None for stored in presets.values())
        assert synthesizer.voices.default_name == "bert"
    finally:
        await synthesizer.close()
    assert files(into) == before


def test_the_package_serves_what_was_shipped(
    model: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    into = tmp_path / "package"
    monkeypatch.setattr(duetts.embedded, "SHIPPED", into)
    assert not is_trained()
    assert mini_folder() != into
    ship(model, clips, "anna", into)
    assert is_trained()
    assert mini_folder() == into
    before = files(into)
    with TTS(device="cpu") as tts:
        assert tts.say("Hello.", max_new_tokens=3, seed=1).duration_s > 0
        assert tts.say("Hello.", voice="bert", max_new_tokens=3, seed=1).duration_s > 0
    assert files(into) == before
    (into / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not what was shipped"):
        mini_folder()
    (into / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        check_sums(into)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "codec.safetensors").unlink(), "lacks codec.safetensors"),
        (lambda model: (model / "extra.safetensors").write_bytes(bytes(45_000_000)), "more than 45 MB"),
        (lambda model: (model / "config.json").write_text('{"untrained": true}'), "not trained"),
    ],
)
def test_what_must_not_ship_changes_nothing(damage, message: str, model: Path, clips: Path, tmp_path: Path) -> None:
    into = tmp_path / "package"
    ship(model, clips, "anna", into)
    before = {name: (into / name).read_bytes() for name in files(into)}
    damage(model)
    with pytest.raises(SystemExit, match=message):
        ship(model, clips, "anna", into)
    with pytest.raises(SystemExit, match=r"lacks|more than|not trained|no preset"):
        ship(model, clips, "carl", into)
    assert {name: (into / name).read_bytes() for name in files(into)} == before


@pytest.mark.slow
def test_samples_of_all_voices_are_made_of_a_shipped_model(model: Path, clips: Path, tmp_path: Path) -> None:
    ship(model, clips, "anna", tmp_path / "package")
    with (
        served(tmp_path / "package", "--device", "cpu", "--cpu-threads", "1", "--served-model-name", "tiny") as address,
        Server(address) as server,
    ):
        server.wait()
        record_all(server, tmp_path / "samples")
    names = [name for name, _ in sorted((path.name, path) for path in (tmp_path / "samples").iterdir())]
    assert names == ["README.md", "anna.opus", "bert.opus", "default.opus"]
    assert (tmp_path / "samples" / "bert.opus").read_bytes().startswith(b"OggS")
    assert "[anna.opus](anna.opus)" in (tmp_path / "samples" / "README.md").read_text()


def test_a_preset_that_is_not_there_cannot_be_the_default(model: Path, clips: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no preset 'carl'"):
        ship(model, clips, "carl", tmp_path / "package")
    assert not (tmp_path / "package" / SUMS).exists()


def test_the_card_gets_the_judges_table_again_and_again(tmp_path: Path) -> None:
    card = tmp_path / CARD
    shutil.copyfile(SHIPPED / CARD, card)
    for rtf in (0.5, 0.75):
        write_json(tmp_path / "speed.json", {"rtf": rtf})
        rows = [{**vars_of(finding), "passed": finding.passed} for finding in judge(tmp_path, None)]
        write_json(tmp_path / RESULT, {"gates": rows})
        fill_card(card, tmp_path / RESULT)
        assert f"| {rtf} | <= 0.7 |" in card.read_text()
    assert len(TABLE.findall(card.read_text())) == 1
    card.write_text("no marks")
    with pytest.raises(SystemExit, match="0 places"):
        fill_card(card, tmp_path / RESULT)


def vars_of(finding: object) -> dict:
    return {name: getattr(finding, name) for name in finding.__slots__}  # type: ignore[attr-defined]


def test_the_wheel_takes_everything_that_ships() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["duetts"]
    packed = {path for pattern in patterns for path in SHIPPED.parent.glob(pattern)}
    assert {path for path in SHIPPED.rglob("*") if path.is_file()} <= {
        inner for path in packed for inner in ((path,) if path.is_file() else path.rglob("*"))
    }
    assert SHIPPED.name in {path.relative_to(SHIPPED.parent).parts[0] for path in packed}


def test_what_is_in_the_package_is_whole() -> None:
    """Without weights there is nothing to check, and the model says that it is untrained."""
    if is_trained():
        check_sums(SHIPPED)
        assert {stored.voice.name for stored in read_presets(SHIPPED / "voices")}
    else:
        assert json.loads((mini_folder() / "config.json").read_text())["untrained"] is True
