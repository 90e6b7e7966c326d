"""The application's arguments: the fleet's own, settings of replicas as texts or typed, and what is another's."""

from pathlib import Path
from typing import Any

import pytest

from duetts.cluster.fleet import DRAIN_S, Fleet, check_secrets, gpus_for, proxy_options, read_line
from duetts.errors import ConfigError
from tests.test_cli import duetts_here


def test_arguments_are_divided() -> None:
    fleet, line = Fleet.take({"model": "x", "min-replicas": "2", "max_replicas": 4, "gpus_per_replica": "0.5", "max_queue": 9})
    assert fleet == Fleet(2, 4, 0.5)
    assert line == {"model": "x", "max_queue": 9}


def test_what_the_proxy_is_told() -> None:
    assert proxy_options({"port": "8001", "workers": "1", "root_path": "/tts"}) == {
        "host": "127.0.0.1", "port": 8001, "root_path": "/tts",
    }  # fmt: skip
    for wrong, reason in (
        ({"workers": "2"}, "take more of these"),
        ({"uds": "/x"}, "unix sockets"),
        ({"ssl_keyfile": "/x"}, "or neither"),
        ({"port": "0"}, "1..65535"),
    ):
        with pytest.raises(ConfigError, match=reason):
            proxy_options(wrong)


def test_more_at_least_than_one_is_enough_to_say() -> None:
    assert Fleet.take({"min_replicas": 3})[0].max_replicas == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_replica": 2}, "max_replica is no argument .* did you mean max_replicas"),
        ({"max_replicas": "many"}, "max_replicas is 'many', not a number"),
        ({"max_replicas": 1.5}, "not a whole number"),
        ({"max_replicas": True}, "not a whole number"),
        ({"min_replicas": 0}, "no range from 1 on"),
        ({"min_replicas": 3, "max_replicas": 2}, "no range from 1 on"),
        ({"gpus_per_replica": -1}, "gpus_per_replica is -1.0, below 0"),
        ({"scale_up_after": 0}, "above 0 seconds"),
        ({"port": 8000}, "port is Ray Serve's: http_options.port"),
        ({"ssl_certfile": "a.pem"}, "Ray Serve's"),
    ],
)
def test_what_is_wrong_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Fleet.take(arguments)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ({}, 1), ({"engines": "4"}, 4), ({"codec_device": "next", "engines": "2"}, 4), ({"codec_device": "cuda:3"}, 4),
        ({"codec_device": "cpu"}, 1), ({"device": "cpu"}, 0), ({"model": "duetts-mini"}, 0),
    ],
)  # fmt: skip
def test_a_replica_reserves_its_gpus(line: dict[str, Any], count: int) -> None:
    assert gpus_for(read_line({"model": "x", **line}, elsewhere=True)[0]) == count


def test_keys_are_not_shown_to_a_cluster() -> None:
    with pytest.raises(ConfigError, match=r"^api_key: .* name an api_key_file"):
        check_secrets({"model": "x", "api_key": "secret"}, "ray://10.0.0.1:10001")
    check_secrets({"api_key": "secret"}, None)  # a cluster of this process alone
    check_secrets({"api_key_file": "/keys"}, "auto")


def test_settings_are_read_as_texts_or_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUETTS_MAX_QUEUE", "7")
    monkeypatch.setenv("DUETTS_ROWS", "3")
    settings, _ = read_line(
        {"max_num_seqs": "5", "max_queue": 9, "served_model_name": ["a", "b"], "voice_alias": "x=y", "public_catalog": True}
    )
    assert (settings.engine.max_num_seqs, settings.engine.max_queue, settings.engine.rows) == (5, 9, 3)
    assert settings.server.served_model_names == ("a", "b")
    assert settings.server.voices.aliases == (("x", "y"),)
    assert settings.server.access.public_catalog is True
    assert settings.model == "duetts-mini"


def test_a_file_lies_under_arguments(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("engine: {max_num_seqs: 3, max_queue: 4}\n")
    settings, _ = read_line({"config": str(tmp_path / "f.yaml"), "max_queue": 5})
    assert (settings.engine.max_num_seqs, settings.engine.max_queue) == (3, 5)


@pytest.mark.parametrize(("line", "words"), [
    ({"max_num_seqs": "x"}, "max_num_seqs is 'x', not a whole number"), ({"max_num_seqs": [1]}, "must be a whole number"),
    ({"max_num_seqs": 0}, "max_num_seqs"), ({"profile": "nope"}, "profile nope is unknown"),
])  # fmt: skip
def test_wrong_settings_are_named(line: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_line(line)


def test_profiles_are_for_the_machine_of_the_replica() -> None:
    settings, _ = read_line({"model": "fishaudio/s2-pro"}, elsewhere=True)
    assert settings.engine.device == "auto"


def test_there_is_more_time_to_drain_than_for_a_server_unless_somebody_says() -> None:
    assert read_line({})[0].processes.drain_s == DRAIN_S
    assert read_line({"drain_timeout": 7})[0].processes.drain_s == 7.0


def test_numbers_of_replicas_are_for_ray() -> None:
    run = duetts_here("serve", "--max-replicas", "2")
    assert run.returncode == 2
    assert "--max-replicas and --gpus-per-replica are for --ray" in run.stderr
