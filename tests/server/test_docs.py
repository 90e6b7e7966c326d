"""docs/api.md: its commands run against a real server, and its tables name what there is."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from duetts.audio.formats import FORMATS
from duetts.server import websocket
from duetts.server.fish import OWN
from duetts.server.schemas import FIELDS
from tests.audio.listening import hear
from tests.inputs import clip
from tests.server.conftest import Door
from tests.waiting import LIMIT_S

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def first_cells(columns: int) -> list[list[str]]:
    """The cells of every table row with that many columns."""
    rows = [line.replace("\\|", "/").strip("|").split("|") for line in TEXT.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows if len(row) == columns]


@pytest.mark.skipif(shutil.which("curl") is None, reason="runs curl as a reader would")
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_do_what_they_say(door: Door, command: str, tmp_path: Path) -> None:
    local = command.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{door.port}").replace(
        "curl ", "curl --fail -sS --noproxy '*' "
    )
    sample = tmp_path / "anna.wav"
    sample.write_bytes(clip("control_pcm16.wav"))
    shown = subprocess.run(["bash", "-ec", local], cwd=tmp_path, capture_output=True, timeout=LIMIT_S, check=True).stdout
    files = [path for path in tmp_path.iterdir() if path != sample]
    if files:
        assert len(hear(files[0].read_bytes())[0])
    elif "/batch" in command:
        assert [result["status"] for result in json.loads(shown)["results"]] == ["success", "success", "error"]
    else:
        assert b"event: speech.audio.done" in shown


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_do_what_they_say(door: Door, program: str, tmp_path: Path) -> None:
    local = program.replace("127.0.0.1:8000", f"127.0.0.1:{door.port}")
    environment = {**os.environ, "NO_PROXY": "*", "no_proxy": "*"}
    subprocess.run([sys.executable, "-c", local], cwd=tmp_path, env=environment, timeout=LIMIT_S, check=True)
    files = list(tmp_path.iterdir())
    assert files
    assert all(len(hear(path.read_bytes())[0]) for path in files)


def test_every_message_of_the_socket_is_told() -> None:
    """Those that the code takes and sends, each in its table."""
    source = inspect.getsource(websocket)
    sent = set(re.findall(r'"type": "([a-z.]+)"', source)) - {"pong"}
    taken = set(re.findall(r'case "([a-z.]+)"', source)) | {"session.close"}
    rows = {row[0].strip("`") for row in first_cells(2)}
    assert taken <= rows
    assert sent - {"audio.chunk"} <= rows
    assert "`audio.chunk` with `binary` false" in TEXT


def test_every_field_of_fish_audios_is_told() -> None:
    told = TEXT[TEXT.index("## Fish Audio's API") :]
    for name in OWN:
        assert f"`{name}`" in told


def test_the_tables_name_every_field_that_is_accepted() -> None:
    named = {name for row in first_cells(3) for name in re.findall(r"`(\w+)`", row[0])}
    assert named == {name for name, field in FIELDS.items() if field.only is None}


@pytest.mark.parametrize("row", first_cells(4), ids=lambda row: row[0].strip("`"))
def test_the_table_of_formats_is_that_of_the_code(row: list[str]) -> None:
    chosen = FORMATS[row[0].strip("`")]
    assert f"`{chosen.content_type.format(rate='R')}`" in row[1]
    if "as `wav`" not in row[2]:
        assert {int(number) for number in re.findall(r"\d{4,}", row[2])} == set(chosen.rates)
    bitrates = [int(number) for number in re.findall(r"\d+", row[3].split("(")[0])]
    assert sorted(bitrates) == sorted(chosen.bitrates)
    assert not bitrates or bitrates[0] == chosen.bitrates[0]


def test_all_formats_have_a_row() -> None:
    assert [row[0].strip("`") for row in first_cells(4)] == list(FORMATS)
