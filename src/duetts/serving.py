"""One server: its port, its engine processes, the application between them, and an orderly end of all three. No torch.
With several HTTP processes (`workers`) each of them is such a server, but for the port and the engines.

The port answers from the first moment (`/live`, and 503 for the rest), so that whoever watches sees a server that loads.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from duetts.config import EMBEDDED, EngineConfig, ProcessConfig, ServerConfig, TlsConfig
from duetts.engine import wire
from duetts.engine.null import NULL_COMMAND
from duetts.engine.remote import RemoteSpeaker, keeping
from duetts.engine.supervisor import ENGINE_COMMAND
from duetts.errors import ConfigError, DuettsError, ModelNotFound
from duetts.server.app import create_app, create_waiting_app
from duetts.server.gate import Gate
from duetts.server.health import Health
from duetts.server.metrics import Metrics
from duetts.synthesizer import Synthesizer

HURRIED = 1  # exit code after a second signal
KEEP_ALIVE_S = 75  # longer than proxies and clients keep idle connections: one that is used again has not just been closed
LAST_WORDS_S = 2  # for answers that are cut short to be sent

log = logging.getLogger("duetts")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be served, and how. `model` is a folder, a hub id or "duetts-mini"."""

    model: str
    revision: str | None
    engine: EngineConfig
    processes: ProcessConfig
    server: ServerConfig


Start = Callable[[Plan, Health], Awaitable[Synthesizer]]
MakeApp = Callable[..., ASGIApp]  # of a service, `config`, `metrics` and `health`, as `create_app`


def run(plan: Plan) -> int:
    """`serve` in an event loop of its own, the fastest one that is installed."""
    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        return runner.run(serve(plan))


async def serve(plan: Plan) -> int:
    """Serves until SIGTERM or SIGINT, then finishes what runs within the time to drain; a second signal ends at once.

    Returns the exit code. Raises what keeps a server from starting.
    """
    check_tls(plan.server.tls)
    with listening(plan.server) as listener:
        return await serve_at(listener, plan, Signals(), start_synthesizer, create_app)


async def serve_at(listener: socket.socket, plan: Plan, signals: Signals, start: Start, make_app: MakeApp) -> int:
    """Serves at a socket until `signals` say that it is the end: an application over what `start` gives. Returns and raises as
    `serve`."""
    tls = plan.server.tls
    metrics, health = Metrics(), Health(plan.server.watchdog_s)
    metrics.places.set(plan.processes.engines * plan.engine.max_num_seqs)
    gate = Gate(create_waiting_app(plan.server, metrics, health))
    server = uvicorn.Server(
        uvicorn.Config(
            gate, root_path=plan.server.root_path, lifespan="off", log_config=None, access_log=False,
            timeout_graceful_shutdown=LAST_WORDS_S, timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=tls.certfile, ssl_keyfile=tls.keyfile,
            ssl_ca_certs=None if tls.ca_certs is None else str(tls.ca_certs),
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls.ca_certs else ssl.CERT_NONE,
        )
    )  # fmt: skip
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():  # noqa: ASYNC110 uvicorn has no event for it
            await asyncio.sleep(0.01)
        signals.catch()
        make = partial(make_app, config=plan.server, metrics=metrics, health=health)
        return await _serve_model(plan, gate, signals, health, start, make)
    finally:
        server.should_exit = True
        await serving


class Signals:
    """The signals that ask for the end: the first is for an orderly one, the second for one at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def catch(self) -> None:
        """In the place of uvicorn's own handlers, which would close the port at once and then end the process by the signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    async def released(self) -> None:
        """Until a server with nothing open may close its port: at once, unless others at it are still at work."""

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """The listening socket, and nothing of it afterwards. Raises `ConfigError` as `listen` does."""
    with listen(config) as listener:
        try:
            yield listener
        finally:
            if config.uds is not None:
                config.uds.unlink(missing_ok=True)


def listen(config: ServerConfig, is_shared: bool = False) -> socket.socket:
    """The listening socket, after telling of it. Raises `ConfigError` when the address is taken or none of this machine's."""
    if config.uds is not None:
        return _listen_at(config.uds)
    listener = bind(config, is_shared)
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.tls.certfile else "http"
    log.info("listening on %s://%s:%d", scheme, host, listener.getsockname()[1])
    if not config.access.keys and not is_loopback(config.host):
        log.warning("whoever reaches this address may use the server: it has no API keys")
    return listener


def bind(config: ServerConfig, is_shared: bool = False) -> socket.socket:
    """A listening socket at host and port; if it `is_shared`, one of several, to which the kernel shares connections out.
    Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, reuse_port=is_shared)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror or error}") from error


def _listen_at(path: Path) -> socket.socket:
    """A unix socket. One that a server left behind is replaced, one that a server listens at is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(ConnectionRefusedError):
                probe.connect(str(path))
                raise FileExistsError(None, "a server listens there")
            path.unlink()
        listener.bind(str(path))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error.strerror or error}") from error
    log.info("listening at %s", path)
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_tls(config: TlsConfig) -> None:
    """Raises `ConfigError` if certificate, key or authorities cannot be used."""
    if config.certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.certfile, config.keyfile)
        if config.ca_certs is not None:
            context.load_verify_locations(config.ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"certificate, key or authorities cannot be used: {error.strerror or error}") from None


def tell_licences(folder: Path) -> None:
    """The program's licence, and what the folder says of the weights', which have one of their own."""
    files = sorted(path.name for path in folder.glob("LICENSE*"))
    told = f"see {files[0]} in its folder" if files else "its folder has no LICENSE file: ask where it came from"
    log.info("duetts is Apache-2.0. The weights of %s have a licence of their own: %s", folder.name, told)


async def _serve_model(
    plan: Plan, gate: Gate, signals: Signals, health: Health, start: Start, make_app: Callable[[Synthesizer], ASGIApp]
) -> int:
    """The model's life behind the gate."""
    stopped = asyncio.create_task(signals.first.wait())
    starting: asyncio.Future[Synthesizer] = asyncio.ensure_future(start(plan, health))
    synthesizer = None
    try:
        await first_of(starting, stopped)
        if signals.first.is_set() and not _succeeded(starting):  # a signal to all processes also ends the one that looks
            log.info("stopped while loading")
            return 0
        synthesizer = starting.result()
        info = synthesizer.info
        log.info("%s (%s weights) is ready on %s in %s", plan.model, info.weights, info.device, info.dtype)
        gate.open(make_app(synthesizer))
        await stopped
        health.draining = True
        return await _drain(gate, signals, plan.processes.drain_s)
    finally:
        starting.cancel()
        stopped.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
        if synthesizer is not None:
            await synthesizer.close()


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Until one of them has ended."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _succeeded(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def start_synthesizer(plan: Plan, health: Health) -> Synthesizer:
    """The text side over engines that are up and have spoken. Leaves no process behind when it fails or is cancelled."""
    health.phase = "the model is looked for"
    folder = await look_for(plan)
    health.phase = "the model is loading"
    engines = keeping(folder, plan.engine, plan.processes, engine_command(plan))
    return await start_text_side(plan, health, folder, RemoteSpeaker(engines, plan.engine, plan.processes))


def engine_command(plan: Plan) -> Sequence[str]:
    """What starts an engine process."""
    return NULL_COMMAND if plan.processes.kind == "null" else ENGINE_COMMAND


async def look_for(plan: Plan) -> Path:
    """The folder of the model that is planned. Raises as `find_folder`."""
    folder = await find_folder(plan.model, plan.revision)
    places, queue = plan.engine.max_num_seqs, plan.engine.max_queue
    log.info("loading %s, engines: %d, with %d places and a line of %d each", plan.model, plan.processes.engines, places, queue)
    tell_licences(folder)
    return folder


async def start_text_side(plan: Plan, health: Health, folder: Path, speaker: RemoteSpeaker) -> Synthesizer:
    """The text side over a speaker, when its engines are up and have spoken. Closes it when that fails or is cancelled."""
    async with AsyncExitStack() as undoing:
        undoing.push_async_callback(speaker.close)
        await speaker.up()
        synthesizer = Synthesizer(folder, speaker, plan.server.limits, plan.server.voices, plan.server.media)
        undoing.push_async_callback(synthesizer.close)
        health.phase = "the engine speaks its first words"
        await synthesizer.prepare()
        await health.prove(synthesizer)
        undoing.pop_all()
        return synthesizer


async def _drain(gate: Gate, signals: Signals, drain_s: float) -> int:
    log.info("stopping: open requests have %g s to end; a second signal ends them at once", drain_s)

    async def drain() -> bool:
        has_ended = await gate.drain(drain_s)
        await signals.released()
        return has_ended

    draining = asyncio.create_task(drain())
    hurried = asyncio.create_task(signals.second.wait())
    try:
        await first_of(draining, hurried)
        if draining.done() and not draining.result():
            log.warning("the time to drain is over: what is still open is broken off")
        return 0 if draining.done() else HURRIED
    finally:
        draining.cancel()
        hurried.cancel()
        await asyncio.gather(draining, hurried, return_exceptions=True)


# -- the model's folder --------------------------------------------------------------------------------------------------


async def find_folder(model: str, revision: str | None) -> Path:
    """The folder of a model. A folder is itself; whatever else must be fetched or made is found by a process of its own, which
    may load torch. Raises what `duetts.tts.resolve_model` raises."""
    if model != EMBEDDED and (folder := local_folder(model)) is not None:
        return folder
    finder = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "duetts", "find", *(["--revision", revision] if revision else []), "--", model,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, _ = await finder.communicate()
    finally:
        if finder.returncode is None:
            with suppress(ProcessLookupError):
                finder.kill()
            await finder.wait()
    return read_finding(output, model)


def local_folder(model: str) -> Path | None:
    """The folder of that path, if it is one."""
    path = Path(model).expanduser()
    return path if path.is_dir() else None


def finding(result: Path | DuettsError) -> str:
    """What the process that looks for a folder prints."""
    return json.dumps({"error": wire.error_to_plain(result)} if isinstance(result, DuettsError) else {"folder": str(result)})


def read_finding(output: bytes, model: str) -> Path:
    """The folder that was found. Raises the error that was met, `ModelNotFound` if there is no such word at all."""
    try:
        found: Any = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        raise ModelNotFound(f"{model}: the search for it has ended without a result") from None
    if "error" in found:
        raise wire.error_from_plain(found["error"])
    return Path(found["folder"])
