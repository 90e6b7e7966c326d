"""Settings: one table, four sources, one precedence; and what `duetts config` shows of them."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from duetts.cli import read_settings
from duetts.config import ServerConfig, cache_folder
from duetts.errors import ConfigError
from duetts.settings.arguments import BY_FLAG, Given, rewrite
from duetts.settings.files import load
from duetts.settings.shown import as_json, as_markdown, as_text
from duetts.settings.table import BY_NAME, FOREIGN, NESTED, OTHER_VARIABLES, SECTIONS, SETTINGS
from duetts.settings.values import Settings, Value, build, resolve, unknown_variables

from .test_cli import duetts_here

DOCS = Path(__file__).parents[1] / "docs" / "configuration.md"


def line(**given: Any) -> dict[str, Any]:
    """What typer makes of a line: every option, those that were not given empty."""
    foreign = ("foreign" + flag.replace("-", "_") for flag in FOREIGN)
    names = ["model_argument", "config", "profile", "set_values", *BY_NAME, *foreign]
    return {name: given.get(name) for name in names}


def settle(file: dict[str, Any] | None = None, environment: dict[str, str] | None = None, **flags: Any) -> dict[str, Value]:
    return resolve(Given(line(**flags)).flags, environment or {}, ("duetts.yaml", file) if file is not None else None)


def made(*args: Any, **flags: Any) -> Settings:
    return build(settle(*args, **flags))


# -- the table -----------------------------------------------------------------------------------------------------------


def test_every_field_of_the_configuration_is_a_setting() -> None:
    known = {setting.target for setting in SETTINGS}
    missing = {f"{name}.{one.name}" for name, section in SECTIONS.items() for one in fields(section)} - known
    assert missing == NESTED
    assert sorted(known - {"access."}) == sorted({setting.target for setting in SETTINGS if setting.attribute})


def test_names_and_flags_are_used_once() -> None:
    assert len(BY_NAME) == len(SETTINGS)
    assert len(BY_FLAG) == sum(1 + len(setting.flags) for setting in SETTINGS)
    assert not BY_FLAG.keys() & FOREIGN.keys()
    assert not BY_NAME.keys() & OTHER_VARIABLES.keys()
    assert BY_NAME.keys() & SECTIONS.keys() == {"model"}


def test_no_section_has_too_many_fields() -> None:
    assert {name: len(fields(section)) for name, section in SECTIONS.items() if len(fields(section)) > 17} == {}


def test_defaults_are_those_of_the_configuration() -> None:
    settings = made()
    assert settings.engine == SECTIONS["engine"]()
    assert settings.processes == SECTIONS["processes"]()
    assert settings.server == ServerConfig(("duetts-mini",))
    assert settings.model.model is None


# A value for each setting, as a text and as a file may have it, and what it then is. The rest is taken by its kind.
SAMPLES: dict[str, tuple[str, Any, Any]] = {
    "served_model_name": ("a,b", ["a", "b"], ("a", "b")),
    "cors_origin": ("https://a.b", "https://a.b", ("https://a.b",)),
    "api_key": ("k1,k2", ["k1", "k2"], ("k1", "k2")),
    "allowed_media_domains": ("a.b,::1", ["a.b", "::1"], ("a.b", "::1")),
    "voice_alias": ("a=b,c=d", {"a": "b", "c": "d"}, (("a", "b"), ("c", "d"))),
    "voice_consent": ("optional", "optional", False),
    "max_body_bytes": ("2MiB", "2MiB", 2 << 20),
    "port": ("81", 81, 81),
    "dtype": ("float16",) * 3,
    "load_format": ("dummy",) * 3,
    "quantization": ("int8",) * 3,
    "engine_kind": ("null",) * 3,
    "codec_device": ("cuda:2",) * 3,
    "dialect": ("openai",) * 3,
    "log_level": ("debug",) * 3,
    "unknown_fields": ("reject",) * 3,
    "instructions": ("reject",) * 3,
    "wav_stream_size": ("zero",) * 3,
    "root_path": ("/a",) * 3,
    "engine_listen": ("tcp://h:1",) * 3,
    "prefill_block": ("32", 32, 32),
    "ref_max_seconds": ("31.5", 31.5, 31.5),
    "heartbeat": ("0.3", 0.3, 0.3),
    "max_wait": ("0.4", 0.4, 0.4),
    "gpu_memory_utilization": ("0.5", 0.5, 0.5),
}


def sample(name: str) -> tuple[str, Any, Any]:
    setting = BY_NAME[name]
    if name in SAMPLES:
        return SAMPLES[name]
    if setting.is_switch:
        return ("off", False, False) if setting.default else ("on", True, True)
    if setting.kind is int:
        number = int(setting.default or 5000) + 1
        return str(number), number, number
    if setting.kind is float:
        return str(setting.default + 1), setting.default + 1, setting.default + 1
    return ("some", "some", Path("some") if setting.kind is Path else "some")


@pytest.mark.parametrize("name", BY_NAME)
def test_flag_variable_and_key_mean_the_same_and_flags_come_first(name: str) -> None:
    setting = BY_NAME[name]
    text, plain, meant = sample(name)
    texts: Any = [text] if setting.is_list else text
    assert meant != setting.default
    for found, source in (
        (settle(**{name: texts}), setting.flag),
        (settle(environment={name: text}), setting.variable),
        (settle({name: plain}), "duetts.yaml"),
        (settle({setting.section: {name.replace("_", "-"): plain}}), "duetts.yaml"),
        (settle(set_values=[f"{setting.section}.{name}={text}"]), f"--set {setting.section}.{name}"),
        (settle({name: setting.default if setting.optional else plain}, {name: text}), setting.variable),
        (settle({name: plain}, {name: text}, **{name: texts}), setting.flag),
    ):
        assert (found[name].value, found[name].source) == (meant, source)
        assert {value.source for other, value in found.items() if other != name} == {"default"}
    if setting.attribute:
        settings = made(environment=({"ssl_certfile": "x"} if name.startswith("ssl") else {}) | {name: text})
        sections = {"model": settings.model, "engine": settings.engine, "processes": settings.processes} | {
            "server": settings.server, "limits": settings.server.limits, "voices": settings.server.voices,
            "access": settings.server.access, "logs": settings.server.logs, "tls": settings.server.tls,
            "requests": settings.server.requests, "media": settings.server.media,
        }  # fmt: skip
        assert getattr(sections[setting.section], setting.attribute) == meant


# -- mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "environment", "flags", "message"),
    [
        ({"prot": 1}, {}, {}, "duetts.yaml: prot is unknown; did you mean port?"),
        ({"server": {"max_queue": 1}}, {}, {}, "duetts.yaml: max_queue belongs to engine, not to server"),
        ({"engine": {"max_num_seq": 1}}, {}, {}, "did you mean max_num_seqs?"),
        ({"engin": {"max_num_seqs": 1}}, {}, {}, "engin is unknown; did you mean engine?"),
        ({"engine": 3}, {}, {}, "engine is a section"),
        ({"port": "81"}, {}, {}, "duetts.yaml: port is '81'; must be a whole number"),
        ({"port": True}, {}, {}, "port is True; must be a whole number"),
        ({"port": 1.5}, {}, {}, "port is 1.5"),
        ({"port": None}, {}, {}, "port has no value"),
        ({"port": 1, "server": {"port": 1}}, {}, {}, "port is given twice"),
        ({"openai_aliases": "on"}, {}, {}, "must be true or false"),
        ({"host": 3}, {}, {}, "host is 3; must be text"),
        ({"drain_timeout": float("nan")}, {}, {}, "must be a number"),
        ({"served_model_name": [1]}, {}, {}, "must be a list of texts"),
        ({"voice_consent": "maybe"}, {}, {}, "must be one of required, optional"),
        ({"voice_alias": {"a": ""}}, {}, {}, "'a=' is not like NAME=VALUE"),
        ({"max_queue": -1}, {}, {}, "duetts.yaml: max_queue is -1, below 0"),
        ({}, {"max_queue": "-1"}, {}, "DUETTS_MAX_QUEUE is -1, below 0"),
        ({}, {}, {"drain_timeout": "-1"}, "--drain-timeout is -1.0, below 0"),
        ({}, {}, {"ref_min_seconds": "40"}, "reference seconds"),
        ({}, {"port": "x"}, {}, "DUETTS_PORT is 'x', not a whole number"),
        ({}, {"openai_aliases": "maybe"}, {}, "DUETTS_OPENAI_ALIASES is 'maybe'; it must be one of on, true"),
        ({}, {}, {"max_body_bytes": "16MB"}, "--max-body-bytes is '16MB', not a number of bytes"),
        ({}, {}, {"max_body_bytes": "16iB"}, "not a number of bytes"),
        ({}, {}, {"drain_timeout": "inf"}, "--drain-timeout is 'inf', not a number"),
        ({}, {}, {"set_values": ["portt=1"]}, "--set: portt is unknown; did you mean port?"),
        ({}, {}, {"set_values": ["engine.port=1"]}, "--set: engine.port is unknown"),
        ({}, {}, {"set_values": ["port"]}, "not like NAME=VALUE"),
        ({}, {}, {"port": "1", "set_values": ["port=2"]}, "port is given twice, as --port and as --set port"),
        ({}, {}, {"model": "a", "model_argument": "b"}, "model is given twice"),
        ({}, {}, {"dialect": "klingon"}, "'klingon'"),
        ({}, {}, {"cors_origin": ["https://a.b/c"]}, "not an origin"),
        ({}, {}, {"cors_origin": ["a.b"]}, "not an origin"),
        ({}, {}, {"ssl_keyfile": "k.pem"}, "--ssl-keyfile is of no use without a certificate"),
        ({}, {}, {"foreign__tensor_parallel_size": "2"}, "--tensor-parallel-size is not supported: a model is not spread"),
        ({}, {}, {"quantization": "awq"}, "quantization 'awq' is not one of none, fp8, int8"),
    ],
)  # fmt: skip
def test_mistakes_name_their_source(
    file: dict[str, Any], environment: dict[str, str], flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        made(file, environment, **flags)
    assert message in str(raised.value)


def test_unknown_variables_have_a_hint_and_show_no_value() -> None:
    told = unknown_variables({"prot": "secret", "api_kee": "secret", "cache_dir": "x", "port": "1"})
    assert told == [
        "the variable DUETTS_API_KEE is unknown and has no effect; did you mean DUETTS_API_KEY?",
        "the variable DUETTS_PROT is unknown and has no effect; did you mean DUETTS_PORT?",
    ]


# -- the command line of other servers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("m --omni --port 80", "m --omni --port 80"),
        ("m --served-model-name a b --port 80", "m --served-model-name a --served-model-name b --port 80"),
        ("--served-model-name a m", "--served-model-name a m"),
        ("--model m --served-model-name a b", "--model m --served-model-name a --served-model-name b"),
        ("m --served-model-name=a b", "m --served-model-name=a b"),
        ("m --api-key a b", "m --api-key a --api-key b"),
        ("--openai-aliases off m", "--openai-aliases=off m"),
        ("--openai-aliases m", "--openai-aliases=on m"),
        ("--no-openai-aliases m", "--openai-aliases=off m"),
        ("--openai-aliases=off", "--openai-aliases=off"),
        ("--gpu-memory-utilization 0.9 m", "--gpu-memory-utilization 0.9 m"),
        ("--drain-timeout -1", "--drain-timeout -1"),
        ("-c f m --cors-origin a b", "-c f m --cors-origin a --cors-origin b"),
        ("-- --public-catalog", "-- --public-catalog"),
    ],
)
def test_lines_of_other_servers(written: str, meant: str) -> None:
    assert rewrite(written.split()) == meant.split()


def test_flags_of_other_servers_set_settings_or_say_that_they_do_nothing() -> None:
    given = Given(line(foreign__half=True, foreign__listen="0.0.0.0:99", foreign__omni=True, foreign__trust_remote_code=True,
                       foreign__tensor_parallel_size="1"))  # fmt: skip
    assert given.flags == {
        "dtype": ("--half", ["float16"]), "host": ("--listen", ["0.0.0.0"]), "port": ("--listen", ["99"])
    }  # fmt: skip
    assert given.notes == ["--trust-remote-code has no effect: code from a model's folder is never run"]


def test_settings_by_stage() -> None:
    own = {"max_num_seqs": 16, "dtype": "float32", "tensor_parallel_size": 1, "enforce_eager": True, "quantization": None}
    stages = {"0": own, "1": {"max_num_seqs": 1}}
    given = Given(line(foreign__stage_overrides=json.dumps(stages)))
    assert given.flags == {
        "max_num_seqs": ("--stage-overrides 0.max_num_seqs", ["16"]), "dtype": ("--stage-overrides 0.dtype", ["float32"])
    }  # fmt: skip
    assert [note.split(" has no effect")[0] for note in given.notes] == [
        "--stage-overrides 0.enforce_eager", "--stage-overrides 1.max_num_seqs"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON such as"), ("[]", "must be JSON such as"), ('{"0": 5}', "must be JSON such as"),
        ('{"0": {"max_num_seq": 5}}', "0.max_num_seq is unknown; did you mean max_num_seqs?"),
        ('{"2": {"dtype": "x"}}', "2.dtype is unknown"),
        ('{"0": {"api_key": "x"}}', "0.api_key is unknown"), ('{"0": {"tensor_parallel_size": 2}}', "is not supported"),
    ],
)  # fmt: skip
def test_settings_by_stage_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Given(line(foreign__stage_overrides=text))


def test_a_line_for_another_server_runs_with_one_word_changed(tmp_path: Path) -> None:
    (tmp_path / "duetts.toml").write_text("max_queue = 7\n[engine]\nmax_num_seqs = 3\n")
    run = duetts_here(
        "config", "fishaudio/s2-pro", "--profile", "none",
        "--omni", "--host", "0.0.0.0", "--port", "8091", "--served-model-name", "s2", "s2-pro",
        "--gpu-memory-utilization", "0.9", "--trust-remote-code", "--max-model-len", "4096", "--data-parallel-size", "2",
        "--disable-uvicorn-access-log", "--deploy-config", str(tmp_path / "duetts.toml"), "--json",
        DUETTS_MAX_QUEUE="8", DUETTS_QUEUE="9", DUETTS_DTYPE="",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = {row["name"]: (row["value"], row["source"]) for row in json.loads(run.stdout)["settings"]}
    assert {name: pair for name, pair in found.items() if pair[1] not in ("default", "DUETTS_VOICES_DIR")} == {
        "model": ("fishaudio/s2-pro", "MODEL"),
        "host": ("0.0.0.0", "--host"),
        "port": (8091, "--port"),
        "served_model_name": (["s2", "s2-pro"], "--served-model-name"),
        "max_model_len": (4096, "--max-model-len"),
        "gpu_memory_utilization": (0.9, "--gpu-memory-utilization"),
        "engines": (2, "--engines"),
        "log_requests": (False, "--disable-uvicorn-access-log"),
        "max_queue": (8, "DUETTS_MAX_QUEUE"),
        "max_num_seqs": (3, "duetts.toml"),
    }
    assert "--trust-remote-code has no effect" in run.stderr
    assert "DUETTS_QUEUE is unknown" in run.stderr


@pytest.mark.parametrize("flag", ["--max-num-seq=1", "--prot", "--no-omni"])
def test_unknown_flags_end_the_command_with_a_hint(flag: str) -> None:
    run = duetts_here("serve", flag, COLUMNS="200")
    assert run.returncode == 2
    assert "No such option" in run.stderr
    assert {"--max-num-seq=1": "--max-num-seqs", "--prot": "--port", "--no-omni": "--omni"}[flag] in run.stderr


# -- files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "engine:\n  max_num_seqs: 3\nport: 81\n"),
        ("a.YML", "{engine: {max-num-seqs: 3}, server: {port: 81}}"),
        ("a.toml", "port = 81\n[engine]\nmax_num_seqs = 3\n"),
        ("a.json", '{"engine": {"max_num_seqs": 3}, "port": 81}'),
    ],
)
def test_files_of_three_kinds(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    settings = made(dict(load(path)))
    assert (settings.engine.max_num_seqs, settings.server.port) == (3, 81)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "port: [", "a.yaml: not valid YAML in line"),
        ("a.yaml", "port: 1\nport: 2\n", "a.yaml: port is given twice"),
        ("a.json", '{"port": 1, "port": 2}', "a.json: port is given twice"),
        ("a.yaml", "- port", "must hold names and values"),
        ("a.yaml", "!!python/object/apply:os.system [ls]", "not valid YAML"),
        ("a.toml", "port = ", "a.toml: not valid TOML"),
        ("a.json", "{", "a.json: not valid JSON"),
        ("a.json", "[" * 100_000, "a.json: not valid JSON"),
        ("a.ini", "port=1", "must end with .yaml, .yml, .toml, .json"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert message in str(raised.value)


def test_an_empty_file_and_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing yet\n")
    assert load(tmp_path / "a.yaml") == {}
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(tmp_path / "c.yaml")


def test_the_file_is_named_by_a_flag_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, port in (("a", 81), ("b", 82)):
        (tmp_path / f"{name}.yaml").write_text(f"port: {port}\n")
    monkeypatch.setenv("DUETTS_CONFIG", str(tmp_path / "a.yaml"))
    assert read_settings(line())[0]["port"].value == 81
    assert read_settings(line(config=str(tmp_path / "b.yaml")))[0]["port"].value == 82


# -- keys ----------------------------------------------------------------------------------------------------------------


def test_keys_come_from_flags_variables_and_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst\n\n  second  \n")
    assert made(api_key_file=str(path)).server.access.keys == ("first", "second")
    assert made(environment={"api_key": "a,b"}, api_key_file=str(path)).server.access.keys == ("a", "b", "first", "second")
    assert made(api_key=["a", "b"]).server.access.keys == ("a", "b")


@pytest.mark.parametrize("content", [None, b"", b"# none\n", b"with space\n", b"\xff\n", "schl\u00fcssel\n".encode()])
def test_a_file_without_fit_keys_stops_the_start_and_shows_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        made(api_key_file=str(path))
    assert "space" not in str(raised.value)
    assert "schl" not in str(raised.value)


@pytest.mark.parametrize("texts", [[""], [","], ["a b"], ["x" * 513]])
def test_keys_that_are_none_stop_the_start(texts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        made(api_key=texts)
    assert "a b" not in str(raised.value)


def test_keys_are_shown_nowhere(tmp_path: Path) -> None:
    values = settle({"api_key": "hidden-1"}, {"api_key": "hidden-2"}, api_key=["hidden-3", "hidden-4"])
    text = as_text(values.values()) + as_json(values.values()) + repr(build(values))
    assert "hidden" not in text
    assert "# api_key: 2 given, not shown" in text
    (tmp_path / "a.yaml").write_text("api_key: {hidden: hidden")
    for file in ({"api_key": {"hidden": 1}}, {"api_key": ["hidden hidden"]}, {"api_key": [["hidden"]]}):
        with pytest.raises(ConfigError) as raised:
            made(file)
        assert "hidden" not in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        load(tmp_path / "a.yaml")
    assert "hidden" not in str(raised.value)


# -- shown ---------------------------------------------------------------------------------------------------------------


def test_what_is_shown_is_a_file_with_the_same_values(tmp_path: Path) -> None:
    values = settle(environment={name: sample(name)[0] for name in BY_NAME if name not in ("api_key", "api_key_file")})
    path = tmp_path / "shown.yaml"
    path.write_text(as_text(values.values()))
    again = settle(dict(load(path)))
    assert {name: value.value for name, value in again.items()} == {name: value.value for name, value in values.items()}
    assert "DUETTS_PORT" in path.read_text()


def test_the_tables_of_the_documentation_are_those_of_the_code() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert as_markdown() in text, "docs/configuration.md is not up to date: `duetts config --tables` prints its tables"
    for name in OTHER_VARIABLES.keys() - {"config"}:
        assert f"`DUETTS_{name.upper()}`" in text


def test_the_documented_file_can_be_read(tmp_path: Path) -> None:
    text = DOCS.read_text(encoding="utf-8")
    path = tmp_path / "duetts.yaml"
    path.write_text(text.split("```yaml\n")[1].split("```")[0])
    build(settle({key: value for key, value in load(path).items() if key != "access"}))


def test_help_is_quick_to_make_and_knows_no_server() -> None:
    heavy = ("torch", "fastapi", "uvicorn", "starlette", "yaml", "rich", "asyncio", "numpy", "zmq", "prometheus_client")
    command = [sys.executable, "-X", "importtime", "-m", "duetts", "serve", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {row.rsplit("|", 1)[1].strip() for row in shown.stderr.splitlines() if "|" in row}
    assert not loaded & set(heavy)
    assert "duetts.settings.table" in loaded


def test_the_cache_folder_stays_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUETTS_CACHE_DIR", "/somewhere")
    assert cache_folder() == Path("/somewhere")
