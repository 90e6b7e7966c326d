"""The application for Ray Serve, and a server that runs it until a signal comes."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from duetts.cluster.fleet import LOOPBACK, OF_THE_PROXY, Fleet, check_secrets, gpus_for, proxy_options, read_line
from duetts.cluster.replica import Replica
from duetts.errors import ConfigError, EngineFailure
from duetts.serving import Plan, is_loopback

NAME = "duetts"
LOOK_S = 2.0  # between two looks at a replica's health
MOST_WAITING = 256  # requests that wait in a proxy while no replica is there
RETRY_S = 5.0
MOST = (
    4096  # requests that a replica gets at least: more than it takes, so that it refuses the rest itself and says when to come
)

PROXIES = "EveryNode"  # one on each machine, behind whatever balances the machines

log = logging.getLogger("duetts.cluster")


def run(arguments: Mapping[str, Any], address: str | None) -> int:
    """`duetts serve --ray`: the application in the cluster of an address, or in one on this machine alone, until SIGTERM or
    SIGINT. Running speech then has the time to drain. Returns the exit code. Raises `ConfigError`."""
    check_secrets(arguments, address)
    proxy = {name: value for name, value in arguments.items() if name in OF_THE_PROXY and value is not None}
    http = proxy_options(proxy)
    application = app({name: value for name, value in arguments.items() if name not in OF_THE_PROXY})
    owned = join(address)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve.start(proxy_location=PROXIES, http_options=http)
        serve.run(application, name=NAME, route_prefix="/")
        scheme = "https" if "ssl_certfile" in http else "http"
        log.info("listening on %s://%s:%d, by Ray Serve", scheme, http["host"], http["port"])
        if not is_loopback(http["host"]) and not {"api_key", "api_key_file"} & set(arguments):
            log.warning("whoever reaches this address may use the server, unless its replicas have API keys of their own")
        threading.Event().wait()
    except KeyboardInterrupt:
        log.info("stopping: open requests have their time to end")
    except RuntimeError as error:  # what a replica could not do stands in its log
        raise EngineFailure(f"Ray Serve cannot run it: {str(error).splitlines()[0]}") from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(RuntimeError, RayError, RayServeException):  # what failed above is what should be told
            serve.delete(NAME)
            if owned:
                serve.shutdown()
        ray.shutdown()
    return 0


def join(address: str | None) -> bool:
    """Joins the cluster of that address, or starts one on this machine alone. Whether it was started. Raises `ConfigError`."""
    try:
        if address is not None:
            ray.init(address=address)
            return False
        ray.init(address="local", include_dashboard=False, _node_ip_address=LOOPBACK)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"Ray cannot be reached at {address}: {error}") from None
    return True


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application: `serve run duetts.cluster:app model=fishaudio/s2-pro max_replicas=4`, or `import_path` and `args` of a
    Serve configuration. Arguments are those of `Fleet` and the settings of `duetts serve`. Raises `ConfigError`."""
    fleet, line = Fleet.take(arguments)
    plan, _ = read_line(line, elsewhere=True)
    deployment = serve.deployment(serve.ingress()(Replica), name=NAME, **options(fleet, plan))
    return deployment.bind(line)


def options(fleet: Fleet, plan: Plan) -> dict[str, Any]:
    """How Ray Serve runs replicas. Each field can be overridden in a Serve configuration, under `deployments`."""
    engines = plan.processes.engines
    gpus = gpus_for(plan) if fleet.gpus_per_replica is None else fleet.gpus_per_replica
    window_s = fleet.scale_up_after / 2
    return {
        "ray_actor_options": {"num_cpus": fleet.cpus_per_replica, "num_gpus": gpus},
        "max_ongoing_requests": max(MOST, 2 * engines * (plan.engine.max_num_seqs + plan.engine.max_queue)),
        "max_queued_requests": MOST_WAITING,
        "backpressure_config": {"status_code": 503, "retry_after_s": RETRY_S},
        "request_router_config": {"request_router_class": "duetts.cluster.routing.FewerOfTwo"},
        "health_check_period_s": LOOK_S,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": plan.processes.drain_s,
        "autoscaling_config": {
            "min_replicas": fleet.min_replicas,
            "max_replicas": fleet.max_replicas,
            "look_back_period_s": window_s,
            "metrics_interval_s": max(0.2, window_s / 5),
            "upscale_delay_s": window_s,
            "downscale_delay_s": fleet.scale_down_after,
            "policy": {"policy_function": "duetts.cluster.policy:by_line_and_lateness"},
        },
    }
