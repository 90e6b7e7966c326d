"""What a server does before it serves: its port, and the folder of its model found without torch."""

import socket
from pathlib import Path

import pytest

from duetts.config import ServerConfig
from duetts.errors import ConfigError, ModelNotFound
from duetts.serving import find_folder, finding, listen, read_finding

from .test_cli import duetts


def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen on 127"):
        listen(ServerConfig(("x",), port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match="cannot listen on 192"):
        listen(ServerConfig(("x",), host="192.0.2.1", port=0))


def test_a_free_port_is_had() -> None:
    with listen(ServerConfig(("x",), port=0)) as listener:
        assert listener.getsockname()[1] > 0


async def test_a_folder_is_itself(tiny_folder: Path) -> None:
    assert await find_folder(str(tiny_folder), None) == tiny_folder


@pytest.mark.slow
async def test_what_is_no_folder_is_looked_for_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="no-one/nothing"):
        await find_folder("no-one/nothing", "main")
    folder = await find_folder("duetts-mini", None)
    assert (folder / "config.json").exists()


def test_findings_come_back_as_they_were(tmp_path: Path) -> None:
    assert read_finding(finding(tmp_path).encode(), "x") == tmp_path
    assert read_finding(b"some library talks\n" + finding(tmp_path).encode() + b"\n", "x") == tmp_path
    with pytest.raises(ModelNotFound, match="no such thing"):
        read_finding(finding(ModelNotFound("no such thing")).encode(), "x")
    for nothing in (b"", b"Killed"):
        with pytest.raises(ModelNotFound, match="without a result"):
            read_finding(nothing, "x")


@pytest.mark.parametrize("options", [["--engines", "0"], ["--drain-timeout", "-1"]])
def test_settings_that_cannot_be_end_the_command(tiny_folder: Path, options: list[str]) -> None:
    run = duetts("serve", str(tiny_folder), *options)
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_model_that_cannot_be_read_ends_the_command(tmp_path: Path) -> None:
    run = duetts("serve", str(tmp_path), "--port", "0")
    assert run.returncode == 1
    assert "config.json" in run.stderr
    assert "Traceback" not in run.stderr
