"""The list of trial requests, each with the status that it may have."""

import base64
import json
import re
from typing import Any

import pytest

from tests.inputs import INPUTS, REF_TEXT, clip
from tests.server.conftest import Door

ROWS = [json.loads(line) for line in (INPUTS / "requests.jsonl").read_text(encoding="utf-8").splitlines()]


def filled(value: Any) -> Any:
    """A field with its placeholders replaced."""
    if value == "<ref_text>":
        return REF_TEXT
    found = re.fullmatch(r"<(data|base64):(\w+)(?: as (\S+))?>", value) if isinstance(value, str) else None
    if not found:
        return value
    kind, name, media_type = found.groups()
    encoded = base64.b64encode(clip(f"{name}.wav")).decode()
    return encoded if kind == "base64" else f"data:{media_type or 'audio/wav'};base64,{encoded}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_status_is_one_of_the_allowed(door: Door, row: dict[str, Any]) -> None:
    body = row.get("raw_body") or json.dumps({name: filled(value) for name, value in row["body"].items()})
    answer = door.http.post("/v1/audio/speech", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in row["status_allowed"], answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    assert door.speak().status_code == 200
