"""What a fleet of replicas is told: how many, on what, and the settings of each, which are those of `duetts serve`. No Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from duetts.config import EMBEDDED, environment
from duetts.deploy.profiles import NONE, settle
from duetts.errors import ConfigError
from duetts.serving import Plan
from duetts.settings.arguments import Given
from duetts.settings.table import BY_NAME
from duetts.settings.values import build, hint

DRAIN_S = 120.0  # by default; the longest stream takes about 80 s
OTHER_NAMES = ("config", "profile")
LOOPBACK, DEFAULT_PORT = "127.0.0.1", 8000
# Settings that belong to whoever has the port, which is Ray Serve's proxy.
OF_THE_PROXY = {
    "host": "http_options.host", "port": "http_options.port", "root_path": "route_prefix and http_options.root_path",
    "uds": "no unix sockets", "ssl_certfile": "http_options.ssl_certfile", "ssl_keyfile": "http_options.ssl_keyfile",
    "ssl_ca_certs": "http_options.ssl_ca_certs",
    "workers": "num_replicas, each with its engines",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many replicas there are and what each takes of its machine.

    `gpus_per_replica` None is one for each engine, and none for duetts-mini and on a CPU. Replicas are added when there was a
    line, or somebody late, for `scale_up_after` seconds, and taken away when fewer were enough for `scale_down_after` seconds.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    gpus_per_replica: float | None = None
    cpus_per_replica: float = 1.0
    scale_up_after: float = 10.0
    scale_down_after: float = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(f"min_replicas {self.min_replicas} and max_replicas {self.max_replicas} are no range from 1 on")
        for name in ("gpus_per_replica", "cpus_per_replica"):
            if (self.numbers()[name] or 0) < 0:
                raise ConfigError(f"{name} is {self.numbers()[name]}, below 0")
        for name in ("scale_up_after", "scale_down_after"):
            if not self.numbers()[name] > 0:
                raise ConfigError(f"{name} is {self.numbers()[name]}; it must be above 0 seconds")

    def numbers(self) -> dict[str, Any]:
        """Every field by its name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def take(cls, arguments: Mapping[str, Any]) -> tuple[Fleet, dict[str, Any]]:
        """The fleet of an application's arguments, and the rest, which are settings of each replica. Raises `ConfigError`."""
        names = {one.name: one for one in fields(cls)}
        line = {str(name).replace("-", "_"): value for name, value in arguments.items()}
        for name in line:
            if name in OF_THE_PROXY:
                raise ConfigError(f"{name} is Ray Serve's: {OF_THE_PROXY[name]}")
            known = [*names, *BY_NAME, *OTHER_NAMES]
            if name not in known:
                raise ConfigError(f"{name} is no argument of the application{hint(name, known)}")
        given = {name: _number(name, line.pop(name), whole=name.endswith("_replicas")) for name in names if name in line}
        if "max_replicas" not in given and given.get("min_replicas", 1) > 1:
            given["max_replicas"] = given["min_replicas"]
        return cls(**given), line


def read_line(line: Mapping[str, Any], elsewhere: bool = False) -> tuple[Plan, list[str]]:
    """The plan that arguments, this machine's variables, files and GPUs make, in this order; and what should be told.

    Texts are read as on a command line, anything else as in a file. Without a profile, which goes by a machine's GPUs, if the
    replicas are `elsewhere`. Raises `ConfigError`.
    """
    line = dict(line)
    others = {name: str(line.pop(name)) for name in OTHER_NAMES if name in line}
    if elsewhere:
        others["profile"] = NONE
    variables = {name: value for name, value in environment().items() if name not in line and name not in others}
    flags = {name: (name, [value]) for name, value in line.items() if isinstance(value, str)}
    typed = {name: value for name, value in line.items() if not isinstance(value, str)}
    layers = (("the application's arguments", typed),) if typed else ()
    values, notes = settle(flags, variables, others.get("config"), others.get("profile"), *layers)
    settings = build(values)
    processes = settings.processes
    if values["drain_timeout"].source == "default":
        processes = replace(processes, drain_s=DRAIN_S)
    return Plan(settings.model.model or EMBEDDED, settings.model.revision, settings.engine, processes, settings.server), notes


def arguments_of(given: Given, variables: Mapping[str, str]) -> dict[str, Any]:
    """The application's arguments that a command line and its machine's variables are."""
    named = {"config": given.config, "profile": given.profile}
    return {
        **{name: value for name, value in variables.items() if name in BY_NAME or name in OTHER_NAMES},
        **{name: texts if BY_NAME[name].is_list else texts[-1] for name, (_, texts) in given.flags.items()},
        **{name: value for name, value in named.items() if value is not None},
    }


def proxy_options(proxy: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of whoever has the port, as Ray Serve's `http_options`. Raises `ConfigError`."""
    proxy = dict(proxy)
    if str(proxy.pop("workers", 1)) != "1":
        raise ConfigError("workers: Ray Serve starts replicas, each with engines of its own; take more of these")
    if "uds" in proxy:
        raise ConfigError("uds: Ray Serve's proxy does not listen at unix sockets")
    if ("ssl_certfile" in proxy) != ("ssl_keyfile" in proxy):
        raise ConfigError("Ray Serve's proxy needs both ssl_certfile and ssl_keyfile, or neither")
    port = str(proxy.get("port", DEFAULT_PORT))
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"port is {port}; Ray Serve's proxy needs one in 1..65535")
    return {"host": LOOPBACK, **proxy, "port": int(port)}


def gpus_for(plan: Plan) -> int:
    """How many GPUs a replica's engines and their codec processes take, unless somebody says it."""
    engines, codec = plan.processes.engines, plan.processes.codec_device
    if plan.model == EMBEDDED or plan.engine.device == "cpu":
        return 0
    if codec == "next":
        return 2 * engines
    return max(engines, int(codec[5:]) + 1) if codec.startswith("cuda:") else engines


def check_secrets(arguments: Mapping[str, Any], address: str | None) -> None:
    """Arguments of a cluster's application stand in its status for everybody. Raises `ConfigError` if a key is among them."""
    if address is not None and "api_key" in arguments:
        raise ConfigError(
            "api_key: a cluster shows an application's arguments; name an api_key_file that all its machines have"
        )


def _number(name: str, value: Any, whole: bool) -> Any:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {value!r}, not a number") from None
    if isinstance(value, bool) or number != number or (whole and number != int(number)):
        raise ConfigError(f"{name} is {value!r}, not a {'whole ' if whole else ''}number")
    return int(number) if whole else number
