"""What /openapi.json promises, and that odd requests of its making get no fault, no hang and no answer but those."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import ormsgpack
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from duetts.config import AccessConfig, Limits, MediaConfig, ServerConfig
from duetts.server.app import create_app
from duetts.server.auth import PUBLIC
from duetts.voices.fetch import Fetcher
from tests.internet import Internet
from tests.server.conftest import LIMITS, NATIVE
from tests.server.sine import SineService
from tests.server.test_auth import serving
from tests.waiting import LIMIT_S, wait_until

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FEW, MANY = 12, 100  # requests to each operation
KEY = "a-key-of-24-characters!!"
DESCRIBED = create_app(SineService(Limits()), ServerConfig((NATIVE,))).openapi()
OPERATIONS = [(method.upper(), path) for path, methods in DESCRIBED["paths"].items() for method in methods]


@schemathesis.serializer("application/msgpack")
def packed(_: Any, value: Any) -> bytes:
    """Numbers that msgpack has no room for are sent as texts."""
    return ormsgpack.packb(value, default=str, option=ormsgpack.OPT_NON_STR_KEYS | ormsgpack.OPT_PASSTHROUGH_BIG_INT)


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """A server with keys, which reaches nobody."""
    internet = Internet()
    fetcher = Fetcher(MediaConfig(), LIMITS, resolve=internet.resolve, transport=internet.transport)
    config = ServerConfig((NATIVE,), limits=LIMITS, access=AccessConfig(keys=(KEY,)))
    with serving(create_app(SineService(LIMITS, fetcher=fetcher), config)) as http:
        wait_until(lambda: http.get("/ready").status_code == 200)
        yield str(http.base_url)


@pytest.fixture(scope="module")
def schema(base: str) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    return schemathesis.openapi.from_url(f"{base}/openapi.json", headers=headers)


def try_odd_requests(schema: Any, base: str, method: str, path: str, count: int) -> None:
    """That many requests to one operation, half of them as its description wants them, half not."""
    operation = schema[path][method]
    cases = st.one_of(operation.as_strategy(mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE))
    session = requests.Session()
    session.trust_env = False

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=count < MANY, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases)
    def attempt(case: Any) -> None:
        case.call_and_validate(
            base_url=base, session=session, headers={"Authorization": f"Bearer {KEY}"}, checks=CHECKS, timeout=LIMIT_S
        )

    with session:
        attempt()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_odd_requests_get_what_is_promised(schema: Any, base: str, method: str, path: str) -> None:
    try_odd_requests(schema, base, method, path, FEW)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_many_odd_requests_get_what_is_promised(schema: Any, base: str, method: str, path: str) -> None:
    try_odd_requests(schema, base, method, path, MANY)


def test_every_failure_has_its_shape_and_meaning() -> None:
    for path, methods in DESCRIBED["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            assert "422" not in answers
            assert {"500", "503"} <= answers.keys(), (method, path)
            assert all(answer["description"] for answer in answers.values())
            assert "security" not in operation


def test_where_keys_are_asked_for_it_says_so(base: str) -> None:
    told = httpx.get(f"{base}/openapi.json", trust_env=False).json()  # needs no key itself
    assert told["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in told["paths"].items():
        for operation in methods.values():
            assert operation.get("security", []) == ([] if path in PUBLIC else [{"key": []}]), path
            assert ("401" in operation["responses"]) is (path not in PUBLIC)
            if path not in PUBLIC and "{" not in path:
                method = next(name for name, one in methods.items() if one is operation)
                assert httpx.request(method, base + path, trust_env=False).status_code == 401
