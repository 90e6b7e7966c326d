"""docs/api.md: its commands run against a real server, and its tables name what there is."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from duetts.audio.formats import FORMATS
from duetts.server.schemas import FIELDS
from tests.audio.listening import hear
from tests.inputs import clip
from tests.server.conftest import Door

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


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
    shown = subprocess.run(["bash", "-ec", local], cwd=tmp_path, capture_output=True, timeout=20, check=True).stdout
    files = [path for path in tmp_path.iterdir() if path != sample]
    if files:
        assert len(hear(files[0].read_bytes())[0])
    else:
        assert b"event: speech.audio.done" in shown


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
