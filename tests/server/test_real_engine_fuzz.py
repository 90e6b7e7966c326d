"""Bodies that no client should send, and callers that leave, against the real engine on the tiny model.

Bounded by `SECONDS` whatever the machine. What is asked: every answer is one that the table of errors knows, none is a 5xx
(but for a random model that ends before its first frame twice), no thread dies, nothing is left open, and the same request
gives the same bytes before and after.
"""

import base64
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from duetts.server.schemas import FIELDS
from tests.inputs import REF_TEXT, clip

from .real import Served, serve

pytestmark = pytest.mark.slow

SECONDS = 40.0  # of each of the two parts
THREADS, LEAST = 8, 7  # tries of each, however slow the machine is
BUSY = {429}  # the line is short on purpose
EMPTY = '"code": "empty_generation"'
ANSWERS = {200, 400, 403, 404, 405, 413, 415, *BUSY}

TEXTS = [
    "Hi.",
    "Hello, how are you?",
    "Zwölf Boxkämpfer 😀",
    "<|speaker:0|>A.\n<|speaker:1|>B.",
    "<|im_end|>x",
    "",
    " ",
    "\x00",
]
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x",
    "default", "\ud800", "\x00", "a" * 5000, "../../etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x.wav",
    "data:audio/wav;base64,UklGRg==", "data:,", "AAAA", "🙂" * 50, [], [[]], [None], ["x"], [{}], {}, {"id": None},
    {"id": "default"}, {"audio": "AAAA", "text": "x"}, {"a": {"b": {"c": []}}}, [1] * 500, "<|im_start|>", "1e999",
]  # fmt: skip
MEDIA_TYPES = [
    "application/json", "application/json; charset=utf-16", "text/plain", "", ";", "multipart/form-data",
    "multipart/form-data; boundary=", "multipart/form-data; boundary=b", f"multipart/form-data; boundary={'b' * 300}",
    "multipart/form-data; boundary*=utf-8''%E2%82%AC", 'multipart/form-data; boundary="b', "application/x-www-form-urlencoded",
]  # fmt: skip


@pytest.fixture
def fuzzed(tiny_folder: Path) -> Iterator[Served]:
    yield from serve(tiny_folder, max_num_seqs=4, max_queue=4)


def json_bodies(rng: random.Random) -> bytes:
    """A plausible request with a few odd fields, sometimes damaged as bytes."""
    fields: dict[str, Any] = {"input": rng.choice(TEXTS), "max_new_tokens": rng.choice([1, 3, 8]), "seed": rng.randrange(9)}
    if rng.random() < 0.3:
        fields |= {"ref_audio": base64.b64encode(damaged(clip("control_pcm16.wav"), rng)).decode(), "ref_text": REF_TEXT}
    for _ in range(rng.randrange(4)):
        fields[rng.choice([*FIELDS, "unknown", "\ud800", "x" * 300])] = rng.choice(ODD)
    body = json.dumps(fields).encode()
    return damaged(body, rng) if rng.random() < 0.2 else body


def odd_bodies(rng: random.Random) -> bytes:
    """Bytes that are no request at all."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.choice([0, 1, 100, 20000]))
    if kind == 1:
        return b"[" * rng.choice([10, 100_000])
    if kind == 2:
        return b'{"a":' * rng.choice([10, 100_000])
    if kind == 3:
        return b'{"input":"Hi.","seed":' + b"9" * rng.choice([30, 10_000]) + b"}"
    if kind == 4:
        return json.dumps(rng.choice(ODD)).encode()
    if kind == 5:
        return b'{"input":"' + b"a" * (17 << 20) + b'"}'
    if kind == 6:
        return b'{"input":"Hi.","input":"Ho."}'
    return "{'input': 'Hi.'}".encode("utf-16")


def form_bodies(rng: random.Random) -> bytes:
    """Parts of a form with the boundary b, whole or not."""
    heads = [
        'Content-Disposition: form-data; name="input"', 'Content-Disposition: form-data; name="ref_audio"; filename="a.wav"',
        'Content-Disposition: form-data; name="ref_text"', 'Content-Disposition: form-data; name="max_new_tokens"',
        "Content-Disposition: form-data", "Content-Disposition: attachment", "X-Nothing: 1", "",
        'Content-Disposition: form-data; name="input"\r\nContent-Transfer-Encoding: base64',
        'Content-Disposition: form-data; name="input"\r\nContent-Transfer-Encoding: quoted-printable',
        "Content-Disposition: form-data; name*=utf-8''%E2%82%AC", 'Content-Disposition: form-data; name="\xff"',
    ]  # fmt: skip
    values = [b"Hi.", b"3", b"\xff\xfe", b"{", b"[1]", b"", REF_TEXT.encode(), clip("control_pcm16.wav"), rng.randbytes(999)]
    parts = [
        b"--b\r\n" + rng.choice(heads).encode("latin-1") + b"\r\n\r\n" + rng.choice(values) + b"\r\n"
        for _ in range(rng.choice([0, 1, 2, 3, 70]))
    ]
    body = b"".join(parts) + rng.choice([b"--b--\r\n", b"--b--", b"--b", b""])
    return damaged(body, rng) if rng.random() < 0.2 else body


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut off, or with some bytes changed, or as it was."""
    if not data or rng.random() < 0.3:
        return data
    if rng.random() < 0.5:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(rng.choice([1, 10])):
        changed[rng.randrange(min(len(changed), 200))] = rng.randrange(256)
    return bytes(changed)


def one_odd_request(http: httpx.Client, rng: random.Random) -> str:
    """Sends one, and returns what to count. Raises what is wrong with the answer."""
    if rng.random() < 0.6:
        body, media_type = json_bodies(rng), "application/json"
    elif rng.random() < 0.5:
        body, media_type = form_bodies(rng), "multipart/form-data; boundary=b"
    else:
        body, media_type = odd_bodies(rng), rng.choice(MEDIA_TYPES)
    method = "POST" if rng.random() < 0.97 else rng.choice(["GET", "PUT", "HEAD", "DELETE"])
    path = "/v1/audio/speech" + rng.choice(["", "", "", "/", "?seed=1"])
    try:
        answer = http.request(method, path, content=body, headers={"Content-Type": media_type})
    except httpx.TransportError:
        if len(body) > 1 << 20:  # a refused upload may be cut off while it is sent
            return "cut off"
        raise
    expected = answer.status_code in ANSWERS or EMPTY in answer.text
    assert expected, f"{answer.status_code} {answer.text[:200]} for {media_type} {body[:300]!r}"
    if answer.status_code != 200 and method != "HEAD":
        assert answer.json()["error"]["type"].endswith("_error")
        assert "Traceback" not in answer.text
    return str(answer.status_code)


def one_leaving_caller(served: Served, rng: random.Random) -> str:
    """Speaks raw HTTP and closes the connection at some point, sometimes with a reset."""
    fields: dict[str, Any] = {
        "input": "Hello, how are you?",
        "max_new_tokens": rng.choice([5, 60, 400]),
        "response_format": "pcm",
    }
    if rng.random() < 0.7:
        fields["stream_format"] = "audio"
    if rng.random() < 0.3:
        audio = bytearray(clip("control_pcm16.wav"))
        audio[-2:] = rng.randbytes(2)  # another clip each time: none is known
        fields |= {"ref_audio": base64.b64encode(audio).decode(), "ref_text": REF_TEXT}
    body = json.dumps(fields).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sent = head.encode() + body
    port = int(served.base.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        if rng.random() < 0.3:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset instead of a goodbye
        if rng.random() < 0.2:
            connection.sendall(sent[: rng.randrange(len(sent))])
            return "left while sending"
        connection.sendall(sent)
        time.sleep(rng.choice([0, 0.005, 0.05]))
        if rng.random() < 0.3:
            return "left at once"
        answer = connection.recv(5000).decode("latin-1")
        status = answer[9:12]
        assert int(status) in ANSWERS or EMPTY in answer, answer[:300]
        return f"left after {status}"


def until_time_is_up(work: Callable[[random.Random], str], seed: int) -> Counter[str]:
    """Repeats the work in several threads and counts what it says; the first failure ends all."""
    end = time.monotonic() + SECONDS
    failed = threading.Event()

    def repeat(index: int) -> Counter[str]:
        rng, counts = random.Random(1000 * seed + index), Counter[str]()
        while (time.monotonic() < end or counts.total() < LEAST) and not failed.is_set():
            try:
                counts[work(rng)] += 1
            except BaseException:
                failed.set()
                raise
        return counts

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(repeat, range(THREADS)), Counter())


def test_odd_requests_and_leaving_callers_leave_nothing(fuzzed: Served, caplog: pytest.LogCaptureFixture) -> None:
    control = {"input": "One two three.", "seed": 1, "max_new_tokens": 20}
    before = fuzzed.speak(**control)
    threads = set(threading.enumerate())
    for seed, work in enumerate((lambda rng: one_odd_request(fuzzed.http, rng), lambda rng: one_leaving_caller(fuzzed, rng))):
        counts = until_time_is_up(work, seed)
        print(f"{counts.total()} in {SECONDS:g} s:", dict(counts.most_common()), fuzzed.synthesizer.stats())
        assert counts.total() >= THREADS * LEAST
        fuzzed.settled()
    stats = fuzzed.synthesizer.stats()
    assert stats["open"] == 0
    assert stats["alive"]
    assert not [record for record in caplog.records if record.name.startswith("duetts") and record.levelname == "ERROR"]
    assert all(thread.is_alive() for thread in threads if thread.name.startswith("duetts"))
    references = fuzzed.synthesizer._references
    assert not references._readings._open
    assert not references._encodings._open
    assert stats["encoding"] == 0
    fuzzed.synthesizer._speaker._engine.assert_idle()
    assert before.status_code == 200
    assert fuzzed.speak(**control).content == before.content
