"""The bound on requests: who is counted, what counts, and what a client is told. Others are served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import ormsgpack
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from duetts.config import AccessConfig, Limits, ServerConfig
from duetts.errors import ConfigError, RateLimited
from duetts.server import auth
from duetts.server.app import create_app
from duetts.server.auth import Allowances, client_of
from tests.server.conftest import NATIVE, error_of
from tests.server.sine import SineService
from tests.server.test_auth import serving
from tests.waiting import LIMIT_S


@contextmanager
def limited(rate: int, *keys: str) -> Iterator[httpx.Client]:
    """A server whose clock stands: nothing fills up, however long a test takes."""
    limits = Limits()
    access = AccessConfig(keys, rate_limit=rate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "Allowances", lambda per_minute: Allowances(per_minute, Clock()))
        with serving(create_app(SineService(limits), ServerConfig((NATIVE,), limits=limits, access=access))) as http:
            yield http


def speak(http: httpx.Client, key: str = "") -> httpx.Response:
    return http.post("/v1/audio/speech", json={"input": "Hi."}, headers={"Authorization": f"Bearer {key}"} if key else {})


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_fill_up_evenly() -> None:
    clock = Clock()
    allowances = Allowances(6, clock)
    for _ in range(6):
        allowances.take("a")
    for _ in range(2):
        with pytest.raises(RateLimited) as caught:
            allowances.take("a")
        assert caught.value.retry_after_s == pytest.approx(10)
    allowances.take("b")
    clock.now += 9.9
    with pytest.raises(RateLimited):
        allowances.take("a")
    clock.now += 0.2
    allowances.take("a")
    clock.now += 3600
    for _ in range(6):
        allowances.take("a")
    with pytest.raises(RateLimited):
        allowances.take("a")


def test_more_than_a_minutes_at_once_wait_for_all_and_are_made_up_for() -> None:
    clock = Clock()
    allowances = Allowances(10, clock)
    allowances.take("a")
    with pytest.raises(RateLimited):
        allowances.take("a", 25)
    clock.now += 6
    allowances.take("a", 25)
    clock.now += 90  # 15 that were lent
    with pytest.raises(RateLimited):
        allowances.take("a")
    clock.now += 6
    allowances.take("a")


def test_without_a_bound_nobody_is_counted() -> None:
    allowances = Allowances(None)
    for _ in range(1000):
        allowances.take("a", 1000)
    assert not allowances._left


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MOST_CLIENTS", 3)
    allowances = Allowances(1, Clock())
    for who in ("a", "b", "c", "d"):
        allowances.take(who)
    assert list(allowances._left) == ["b", "c", "d"]


def test_no_bound_below_one() -> None:
    with pytest.raises(ConfigError, match="rate_limit"):
        AccessConfig(rate_limit=0)


@pytest.mark.parametrize(
    ("client", "who"),
    [(("127.0.0.1", 5), "127.0.0.1"), (("2001:db8:1:2:3::4", 5), "2001:db8:1:2::/64"), (("fe80::1%eth0", 5), "fe80::/64"),
     (None, "")],
)  # fmt: skip
def test_whose_requests_are_counted_together(client: Any, who: str) -> None:
    assert client_of({"client": client}) == who


def test_each_key_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with limited(2, "first", "second") as http:
        assert [speak(http, "first").status_code for _ in range(3)] == [200, 200, 429]
        refused = speak(http, "first")
        message = error_of(refused, 429, "rate_limited", None)
        assert "2 requests a minute" in message
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["Retry-After"]) <= 31
        assert speak(http, "second").status_code == 200
        assert speak(http, "third").status_code == 401
        counted = http.get("/metrics", headers={"Authorization": "Bearer second"}).text
        assert 'duetts:requests_total{door="speech",reason="rate_limited",status="429"} 2.0' in counted


def test_without_keys_an_address_is_counted_and_reading_is_free() -> None:
    with limited(2) as http:
        for path in ("/v1/models", "/v1/audio/voices", "/health", "/v1/audio/voices/default"):
            assert all(http.get(path).status_code == 200 for _ in range(3))
        assert all(http.post("/v1/health").status_code == 200 for _ in range(3))
        assert [speak(http).status_code for _ in range(3)] == [200, 200, 429]
        answer = http.post("/v1/tts", json={"text": "Hi."})
        assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
        assert http.get("/v1/models").status_code == 200


def test_a_batch_counts_as_its_items() -> None:
    body = {"items": [{"input": "Hi."}] * 3}
    with limited(5) as http:
        assert http.post("/v1/audio/speech/batch", json=body).status_code == 200
        error_of(http.post("/v1/audio/speech/batch", json=body), 429, "rate_limited", None)
        assert speak(http).status_code == 200


def test_the_codec_counts_its_clips() -> None:
    with limited(5) as http:
        tokens = {"tokens": [[[1], [1], [1], [1]]] * 3}
        assert [http.post("/v1/vqgan/decode", json=tokens).status_code for _ in range(2)] == [200, 429]


def hear(socket: ClientConnection, kind: str) -> dict[str, Any]:
    while not isinstance(raw := socket.recv(LIMIT_S), str) or json.loads(raw)["type"] != kind:
        pass
    return dict(json.loads(raw))


def utter(socket: ClientConnection, *words: str) -> None:
    for word in words:
        socket.send(json.dumps({"type": "input.text", "text": word}))
    socket.send(json.dumps({"type": "input.done"}))


def test_a_socket_counts_its_utterances() -> None:
    with limited(2) as http:
        address = str(http.base_url).replace("http", "ws", 1).rstrip("/") + "/v1/audio/speech/stream"
        with connect(address, proxy=None) as socket:
            socket.send(json.dumps({"type": "session.config"}))
            for _ in range(2):
                utter(socket, "Hello. ", "It is late.")
                assert hear(socket, "session.done")["total_sentences"] == 2
            utter(socket, "Hello. ", "It is late.")
            error = hear(socket, "error")
            assert (error["code"], error["partial_audio"]) == ("rate_limited", False)
            assert 0 < error["retry_after"] <= 30
            assert hear(socket, "session.done")["total_sentences"] == 0  # and no second error
            socket.send(json.dumps({"type": "session.config"}))
            assert hear(socket, "error")["code"] == "rate_limited"
        with pytest.raises(InvalidStatus) as caught:
            connect(address, proxy=None)
        assert caught.value.response.status_code == 429
        assert int(caught.value.response.headers["Retry-After"]) >= 1


def test_a_live_socket_counts_its_starts() -> None:
    with limited(1) as http:
        address = str(http.base_url).replace("http", "ws", 1).rstrip("/") + "/v1/tts/live"
        with connect(address, proxy=None) as socket:
            told = []
            for _ in range(2):
                socket.send(ormsgpack.packb({"event": "start", "request": {"text": "Hi."}}))
                with suppress(ConnectionClosed):  # the second start may have been answered already
                    socket.send(ormsgpack.packb({"event": "stop"}))
                while (answer := ormsgpack.unpackb(socket.recv(LIMIT_S)))["event"] != "finish":  # type: ignore[arg-type]
                    pass
                told.append(answer)
            assert [answer["reason"] for answer in told] == ["stop", "error"]
            assert "1 requests a minute" in told[1]["message"]
            with pytest.raises(ConnectionClosed):
                socket.recv(LIMIT_S)
