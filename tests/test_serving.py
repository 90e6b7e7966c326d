"""What a server does before it serves: its port, and the folder of its model found without torch."""

import socket
from pathlib import Path

import pytest

from duetts import serving
from duetts.config import AccessConfig, EngineConfig, ProcessConfig, ServerConfig, TlsConfig
from duetts.errors import ConfigError, ModelNotFound
from duetts.server.gate import Gate
from duetts.server.health import Health
from duetts.serving import Plan, Signals, check_tls, find_folder, finding, is_loopback, listen, read_finding, tell_licences

from .test_cli import duetts


def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen on 127"):
        listen(ServerConfig(("x",), port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match="cannot listen on 192"):
        listen(ServerConfig(("x",), host="192.0.2.1", port=0))


def test_a_free_port_is_had() -> None:
    with listen(ServerConfig(("x",), port=0)) as listener:
        assert listener.getsockname()[1] > 0


def test_a_unix_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    config = ServerConfig(("x",), uds=path)
    with listen(config), pytest.raises(ConfigError, match="a server listens there"):
        listen(config)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot listen at"):
        listen(ServerConfig(("x",), uds=tmp_path / "file"))
    assert (tmp_path / "file").exists()


def test_an_open_server_on_a_public_address_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    keyed = AccessConfig(("a-key",))
    for config, warned in (
        (ServerConfig(("x",), host="0.0.0.0", port=0), True),
        (ServerConfig(("x",), host="0.0.0.0", port=0, access=keyed), False),
        (ServerConfig(("x",), port=0), False),
    ):
        caplog.clear()
        listen(config).close()
        assert bool(caplog.records) is warned
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")] == [True] * 3 + [
        False
    ] * 2


def test_a_certificate_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "broken.pem").write_text("broken")
    check_tls(TlsConfig())
    for name in ("broken.pem", "missing.pem"):
        with pytest.raises(ConfigError, match="certificate"):
            check_tls(TlsConfig(tmp_path / name))


def test_the_licence_of_the_weights_is_told_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        tell_licences(tmp_path)
        (tmp_path / "LICENSE.md").touch()
        tell_licences(tmp_path)
    assert "ask where it came from" in caplog.messages[0]
    assert "see LICENSE.md in its folder" in caplog.messages[1]
    assert all("duetts is Apache-2.0" in message for message in caplog.messages)


async def test_a_folder_is_itself(tiny_folder: Path) -> None:
    assert await find_folder(str(tiny_folder), None) == tiny_folder


@pytest.mark.slow
async def test_what_is_no_folder_is_looked_for_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="no-one/nothing"):
        await find_folder("no-one/nothing", "main")
    folder = await find_folder("duetts-mini", None)
    assert (folder / "config.json").exists()


@pytest.mark.parametrize("stopped", [True, False])
async def test_a_signal_to_all_also_ends_who_looks_for_the_model(stopped: bool) -> None:
    """Then the server ends as it was asked to, not for want of a model."""
    signals = Signals()

    async def start(plan: Plan, health: Health) -> None:
        if stopped:
            signals._on_signal()
        raise ModelNotFound("the process that looked for it has ended")

    plan = Plan("no-one/nothing", None, EngineConfig(), ProcessConfig(), ServerConfig(("x",)))
    serve = serving._serve_model(plan, Gate(None), signals, Health(1.0), start, lambda _: None)  # type: ignore[arg-type]
    if stopped:
        assert await serve == 0
    else:
        with pytest.raises(ModelNotFound):
            await serve


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
