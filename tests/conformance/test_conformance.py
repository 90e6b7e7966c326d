"""The list of cases: on the tiny model, and on duetts-mini as `duetts serve` without arguments runs it."""

from collections.abc import Iterator

import httpx
import pytest

from tests.conformance.cases import CASES, Case
from tests.conformance.target import Target
from tests.server.real import NATIVE, Served
from tests.server.test_serve import running
from tests.waiting import LIMIT_S

EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number} {case.what}")


@pytest.fixture(scope="module")
def tiny(tiny_served: Served) -> Iterator[Target]:
    target = Target(tiny_served.http, NATIVE, patience_s=LIMIT_S)
    with target.voice("anna"):
        yield target


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with (
        running("--port", "0") as server,
        httpx.Client(base_url=server.address, timeout=600, trust_env=False) as http,
    ):
        server.until(http, "/ready", 200)
        target = Target(http, "duetts-mini", patience_s=LIMIT_S)
        with target.voice("anna"):
            yield target


@EACH
def test_on_the_tiny_model(tiny: Target, case: Case) -> None:
    case.check(tiny)


@pytest.mark.slow
@pytest.mark.timeout(900)
@EACH
def test_on_duetts_mini(mini: Target, case: Case) -> None:
    case.check(mini)


def test_the_list_is_complete() -> None:
    assert [case.number for case in CASES] == list(range(1, 26))
