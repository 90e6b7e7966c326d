"""The door before a replica's application, without Ray: leaving, request ids, numbers of all replicas."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families as families
from starlette.types import Message, Receive, Scope, Send

from duetts.cluster.door import Door
from duetts.server.metrics import Metrics
from duetts.server.peers import numbers_of_all
from tests.waiting import turns


def scope_for(path: str, method: str = "GET", kind: str = "http") -> Scope:
    return {"type": kind, "method": method, "path": path, "root_path": "", "headers": [(b"authorization", b"Bearer k")]}


class Application:
    """An application that answers with what it is told to, and keeps what it was asked."""

    def __init__(self, status: int = 200, body: bytes = b"") -> None:
        self.status, self.body = status, body
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        headers = [(b"x-request-id", b"mine"), (b"content-length", str(len(self.body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


async def answered(door: Door, scope: Scope) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    await door(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(message["body"] for message in sent[1:])


async def test_the_request_id_is_left_to_the_proxy() -> None:
    status, headers, body = await answered(Door(Application(200, b"x")), scope_for("/v1/models"))
    assert (status, body) == (200, b"x")
    assert b"x-request-id" not in headers


def test_numbers_of_all_replicas_are_one_text() -> None:
    metrics = Metrics()
    metrics.places.set(3)
    metrics.answered("speech", 200, "stop")
    text = metrics.written()
    told = list(families(numbers_of_all({"here": text, "there": text}, "replica").decode()))
    assert len({family.name for family in told}) == len(told)
    before = [sample for family in families(text.decode()) for sample in family.samples]
    after = [sample for family in told for sample in family.samples]
    assert len(after) == 2 * len(before)
    assert {sample.labels["replica"] for sample in after} == {"here", "there"}
    for sample in before:
        same = [s for s in after if s.name == sample.name and sample.labels.items() <= s.labels.items()]
        assert len([s for s in same if s.labels.keys() == {*sample.labels, "replica"}]) == 2


def test_labels_that_users_could_choose_stay_whole() -> None:
    lines = b'# HELP a A.\n# TYPE a gauge\na{x="}{ 1",y="\\""} 2.0\na 3\n'
    told = numbers_of_all({"r": lines}, "replica")
    (family,) = families(told.decode())
    assert [sample.labels for sample in family.samples] == [{"replica": "r", "x": "}{ 1", "y": '"'}, {"replica": "r"}]


# -- leaving -------------------------------------------------------------------------------------------------------------


class Listener:
    """An application that waits for its client to leave."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.started = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started.set()
        self.heard.append(await receive())
        self.heard.append(await receive())


async def silence() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def failure() -> Message:
    raise ConnectionError("the request was cancelled")


async def nothing(message: Message) -> None:
    return None


@pytest.mark.parametrize(("kind", "told"), [("http", "http.disconnect"), ("websocket", "websocket.disconnect")])
async def test_a_cancelled_request_is_a_client_that_has_left(kind: str, told: str) -> None:
    app = Listener()
    door = Door(app)
    task = asyncio.ensure_future(door(scope_for("/v1/audio/speech", "POST", kind), silence, nothing))
    await app.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [message["type"] for message in app.heard] == [told, told]


async def test_what_can_no_longer_be_received_is_a_client_that_has_left() -> None:
    app = Listener()
    door = Door(app)
    await door(scope_for("/v1/audio/speech", "POST"), failure, nothing)
    assert [message["type"] for message in app.heard] == ["http.disconnect", "http.disconnect"]


async def test_a_handler_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duetts.cluster.door.LEAVING_S", 0.05)
    ended: list[str] = []

    async def deaf(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    door = Door(deaf)
    task = asyncio.ensure_future(door(scope_for("/v1/audio/speech", "POST"), silence, nothing))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns()
    assert ended == ["ended"]


async def test_a_failure_of_the_application_reaches_ray() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("broken off")

    door = Door(broken)
    with pytest.raises(RuntimeError, match="broken off"):
        await door(scope_for("/v1/audio/speech", "POST"), silence, nothing)


async def test_sockets_know_when_the_replica_drains() -> None:
    app = Application()
    door = Door(app)
    await door(scope_for("/v1/audio/speech/stream", kind="websocket"), silence, nothing)
    assert app.scopes[0]["state"]["draining"] is door.draining
