"""Dockerfile and Kubernetes manifest, as far as they can be tried without a Docker engine and a cluster: what they name is
there, what they run runs, and what they say is understood by whoever reads it."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from duetts.cluster.fleet import DRAIN_S, Fleet, read_line
from duetts.settings.table import BY_NAME, OTHER_VARIABLES
from tests.server.real import Served
from tests.test_cli import duetts_here

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
MANIFEST = ROOT / "deploy" / "kuberay.yaml"

# What the schema of Ray itself says of a Serve configuration, and what it makes of its arguments.
DEPLOYED = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from duetts.cluster import app
config = ServeDeploySchema.model_validate(yaml.safe_load(sys.stdin))
(application,) = config.applications
assert application.import_path == "duetts.cluster:app"
deployment = app(application.args)._bound_deployment
assert deployment.name == application.deployments[0].name
print(deployment.name)
"""


def instructions() -> list[tuple[str, str]]:
    """Words and arguments of the Dockerfile, with lines put together that belong together."""
    lines = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions():
        if word == "FROM":
            found[rest.split(" AS ")[1]] = [(word, rest)]
        elif found:
            list(found.values())[-1].append((word, rest))
    return found


def variables() -> dict[str, str]:
    return dict(
        pair.split("=", 1) for word, rest in stages()["runtime"] if word == "ENV" for pair in rest.split() if "=" in pair
    )  # fmt: skip


def test_both_targets_are_the_runtime_with_what_was_built() -> None:
    found = stages()
    for target in ("cpu", "cuda"):
        assert found[target] == [("FROM", f"runtime AS {target}"), ("COPY", f"--from=built-{target} /usr/local /usr/local")]
        assert f"built-{target}" in found
    assert "whl/cpu" in str(found["built-cpu"])
    assert "--index-url" not in str(found["built-cuda"])


def test_all_that_is_copied_is_there_and_is_sent() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for name in rest.split()[:-1]
    }  # fmt: skip
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_whoever_runs_it_can_write_where_it_writes() -> None:
    found = stages()["runtime"]
    user = next(rest for word, rest in found if word == "USER")
    assert re.fullmatch(r"[1-9][0-9]+:0", user)
    made = next(rest for word, rest in found if word == "RUN").rpartition("install -d -m 1777 ")[2].split()
    for name in ("HOME", "DUETTS_CACHE_DIR", "DUETTS_VOICES_DIR", "HF_HOME", "TRITON_CACHE_DIR"):
        assert any(variables()[name].startswith(folder) for folder in made), name
    known = {*BY_NAME, *OTHER_VARIABLES}
    assert all(name.removeprefix("DUETTS_").lower() in known for name in variables() if name.startswith("DUETTS_"))


def test_what_it_runs_is_understood() -> None:
    assert ("ENTRYPOINT", '["duetts"]') in stages()["runtime"]
    command, *options = json.loads(dict(stages()["runtime"])["CMD"])
    assert command == "serve"
    run = duetts_here("config", *options)
    assert run.returncode == 0
    assert re.search(r"host: .?0\.0\.0\.0", run.stdout)


def test_the_health_check_tells_a_server_from_none(tiny_served: Served) -> None:
    _, program, *arguments = json.loads(dict(stages()["runtime"])["HEALTHCHECK"].partition("CMD ")[2])
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()[1]
    for port, code in ((tiny_served.base.rpartition(":")[2], 0), (str(nobody), 1)):
        run = subprocess.run(
            [sys.executable, program, *arguments], env={**os.environ, "DUETTS_PORT": port}, capture_output=True, check=False
        )
        assert run.returncode == code, run.stderr


def test_a_linter_has_nothing_to_say() -> None:
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed: make setup-ray")
    run = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=200, check=False)
    assert (run.returncode, run.stdout) == (0, "")


# -- Kubernetes ----------------------------------------------------------------------------------------------------------


def manifest() -> dict[str, Any]:
    claim, service = yaml.safe_load_all(MANIFEST.read_text())
    assert (claim["kind"], service["apiVersion"], service["kind"]) == ("PersistentVolumeClaim", "ray.io/v1", "RayService")
    return dict(service["spec"])


def test_the_parts_of_the_manifest_fit_each_other() -> None:
    spec = manifest()
    config = yaml.safe_load(spec["serveConfigV2"])
    (application,) = config["applications"]
    fleet, line = Fleet.take(application["args"])
    settings, _ = read_line(line, elsewhere=True)
    cluster = spec["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    asked = application["deployments"][0]["ray_actor_options"]
    assert asked["num_gpus"] == settings.processes.engines == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert asked["num_cpus"] < int(container["resources"]["limits"]["cpu"])
    assert workers["minReplicas"] == fleet.min_replicas
    assert workers["maxReplicas"] == fleet.max_replicas
    assert settings.processes.drain_s == DRAIN_S < pod["terminationGracePeriodSeconds"]
    assert {"name": "serve", "containerPort": config["http_options"]["port"]} in container["ports"]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/cache", "/dev/shm"}
    assert "DUETTS_API_KEY" in {one["name"] for one in container["env"]}
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.slow
def test_ray_understands_the_configuration() -> None:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: make setup-ray")
    run = subprocess.run(
        [sys.executable, "-c", DEPLOYED],
        input=manifest()["serveConfigV2"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.stdout == "duetts\n", run.stderr
