"""The command line of a server: options made from the table, and the ways of other servers to write them. Knows no command."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from duetts.errors import ConfigError
from duetts.settings.table import BY_NAME, FOREIGN, MISSING_SECTIONS, SETTINGS, Foreign, Setting
from duetts.settings.values import SWITCH, UNITS, hint

BY_FLAG = {flag: setting for setting in SETTINGS for flag in (setting.flag, *setting.flags)}
NEGATED = {f"--no-{flag[2:]}": flag for flag, setting in BY_FLAG.items() if setting.is_switch}
FOREIGN_PREFIX = "foreign"  # of parameters: no setting's name begins so


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for every setting. It gets them as `line`, to make `Given` of; its own options stay."""
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "line"]

    def run(**line: Any) -> None:
        command(**{one.name: line.pop(one.name) for one in own}, line=line)

    run.__doc__, run.__name__ = command.__doc__, command.__name__
    parameters = [*_parameters(), *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


class Given:
    """What stood on the command line: `flags` as `values.resolve` takes them, the file's path, and what has no effect."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for a flag of another server that asks for what is missing here."""
        self.flags: dict[str, tuple[str, list[str]]] = {}
        self.config: str | None = values["config"]
        self.profile: str | None = values["profile"]
        self.notes: list[str] = []
        for setting in SETTINGS:
            if values[setting.name]:
                texts = values[setting.name] if setting.is_list else [values[setting.name]]
                self._add(setting.name, setting.flag, texts)
        if values["model_argument"] is not None:
            self._add("model", "MODEL", [values["model_argument"]])
        for assignment in values["set_values"] or ():
            self._assign(assignment)
        for flag, foreign in FOREIGN.items():
            value = values[_parameter_name(flag)]
            if value:
                self._translate(flag, foreign, value)

    def _add(self, name: str, flag: str, texts: list[str]) -> None:
        if name in self.flags and self.flags[name][1] != texts:
            raise ConfigError(f"{name} is given twice, as {self.flags[name][0]} and as {flag}")
        self.flags[name] = (flag, texts)

    def _assign(self, assignment: str) -> None:
        target, equals, text = assignment.partition("=")
        section, _, key = target.strip().rpartition(".")
        setting = BY_NAME.get(key.replace("-", "_"))
        if not equals:
            raise ConfigError(f"--set {assignment}: it is not like NAME=VALUE")
        if section in MISSING_SECTIONS:
            raise ConfigError(f"--set: {section} is no section here: {MISSING_SECTIONS[section]}")
        if setting is None or section not in ("", setting.section):
            known = [*BY_NAME, *(f"{one.section}.{one.name}" for one in SETTINGS)]
            raise ConfigError(f"--set: {target} is unknown{hint(target, known)}")
        self._add(setting.name, f"--set {target}", [text])

    def _translate(self, flag: str, foreign: Foreign, value: Any) -> None:
        if foreign.only is not None and value not in foreign.only:
            raise ConfigError(f"{flag} is not supported: {foreign.note}")
        sets = dict(foreign.sets)
        if flag == "--listen":
            sets["host"], _, sets["port"] = value.rpartition(":")
        if flag == "--stage-overrides":
            self._override_stages(flag, value)
        for name, text in sets.items():
            self._add(name, flag, [text])
        if foreign.note and foreign.only is None:
            self.notes.append(f"{flag} has no effect: {foreign.note}")

    def _override_stages(self, flag: str, text: str) -> None:
        """Settings as another server has them, by stage: 0 is the language model, and the codec, 1, follows it here."""
        try:
            stages = json.loads(text)
        except ValueError:
            stages = None
        if not isinstance(stages, dict) or not all(isinstance(values, dict) for values in stages.values()):
            raise ConfigError(f'{flag} must be JSON such as {{"0": {{"max_num_seqs": 16}}}}')
        own = [setting.name for setting in SETTINGS if setting.section == "engine"]
        for stage, name, value in [
            (stage, name, value) for stage, values in stages.items() for name, value in values.items() if value is not None
        ]:
            where, other = f"{flag} {stage}.{name}", FOREIGN.get("--" + name.replace("_", "-"))
            if stage not in ("0", "1") or (name not in own and other is None):
                raise ConfigError(f"{where} is unknown{hint(name, own)}")
            if stage == "1":
                self.notes.append(f"{where} has no effect: the codec follows the language model")
            elif other is not None:
                self._translate(where, other, str(value))
            else:
                self._add(name, where, [value if isinstance(value, str) else json.dumps(value)])


def _parameters() -> list[inspect.Parameter]:
    model = typer.Argument(metavar="MODEL", help=BY_NAME["model"].note, show_default=False)
    config = _option(
        "--config", "--deploy-config", "-c", metavar="FILE", help="YAML, TOML or JSON file of settings [DUETTS_CONFIG]."
    )
    profile = _option("--profile", metavar="NAME", help="Settings that ship with duetts, under those of the file: auto "
                      "(by model and GPUs), none, or a name [auto].")  # fmt: skip
    assign = _option("--set", metavar="NAME=VALUE", help="Any setting by its name, also as SECTION.NAME; repeatable.")
    parameters = [
        _parameter("model_argument", Annotated[str | None, model]),
        _parameter("config", Annotated[str | None, config]),
        _parameter("profile", Annotated[str | None, profile]),
        _parameter("set_values", Annotated[list[str] | None, assign]),
    ]
    for setting in SETTINGS:
        kind = list[str] | None if setting.is_list else str | None
        names = (setting.flag, *setting.flags)
        option = _option(*names, metavar=_metavar(setting), help=_help(setting), hidden=setting.quiet)
        parameters.append(_parameter(setting.name, Annotated[kind, option]))
    for flag, foreign in FOREIGN.items():
        option, name = _option(flag, hidden=True), _parameter_name(flag)
        takes = Annotated[str | None, option] if foreign.takes_value else Annotated[bool, option]
        parameters.append(_parameter(name, takes, None if foreign.takes_value else False))
    return parameters


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(*flags: str, **more: Any) -> Any:
    return typer.Option(*flags, show_default=False, **more)


def _parameter_name(flag: str) -> str:
    return FOREIGN_PREFIX + flag.replace("-", "_")


def _metavar(setting: Setting) -> str:
    if setting.is_switch:
        return "[on|off]"
    if setting.words:
        return "|".join(setting.words)
    if setting.is_size:
        return "BYTES"
    names = {int: "N", float: "SECONDS", str: "TEXT", Path: "PATH", tuple[str, ...]: "TEXT"}
    return names.get(setting.kind, "NAME=VALUE")


def _help(setting: Setting) -> str:
    return f"{setting.note} [{shown_default(setting)}]"


def shown_default(setting: Setting) -> str:
    """The default in words, the same on every machine."""
    if setting.standard:
        return setting.standard
    words = {value: word for word, value in (setting.words or {"on": True, "off": False}).items()}
    default = setting.default
    if isinstance(default, bool):
        return words[default]
    if setting.is_size and default and default % UNITS["M"] == 0:
        return f"{default // UNITS['M']}MiB"
    return "none" if default in (None, (), "") else f"{default:g}" if isinstance(default, float) else str(default)


# -- how other servers write their lines ---------------------------------------------------------------------------------


def rewrite(arguments: Iterable[str]) -> list[str]:
    """The line with switches as `--flag=on`, and with a flag before every item of a list: `--flag A B` becomes `--flag A
    --flag B`, once the model is named; before that B could be the model."""
    given, out = list(arguments), []
    named = False
    while given:
        word = given.pop(0)
        flag, equals, _ = word.partition("=")
        setting = BY_FLAG.get(NEGATED.get(flag, flag))
        foreign = FOREIGN.get(flag)
        out.append(word)
        if setting is not None and setting.is_switch and not equals:
            stated = given.pop(0) if given and flag not in NEGATED and given[0].lower() in SWITCH else None
            out[-1] = f"{setting.flag}={stated or ('off' if flag in NEGATED else 'on')}"
        elif word == "--":
            return [*out, *given]
        elif not word.startswith("-"):
            named = True
        elif not equals and given and (setting is not None or flag in OWN_FLAGS or (foreign and foreign.takes_value)):
            named = named or (setting is not None and setting.name == "model")
            out.append(given.pop(0))
            while setting is not None and setting.is_list and named and given and not given[0].startswith("-"):
                out += [setting.flag, given.pop(0)]
    return out


OWN_FLAGS = ("--config", "--deploy-config", "-c", "--profile", "--set")
