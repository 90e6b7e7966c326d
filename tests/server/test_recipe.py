"""GET /v1/recipe."""

import json
from pathlib import Path

import jsonschema_rs

from duetts.recipe.making import Request, make
from tests.server.conftest import NATIVE, Door, error_of

SCHEMA = Path(__file__).parents[2] / "docs" / "recipe.schema.json"


def test_the_server_answers_with_the_same(door: Door) -> None:
    answer = door.http.get("/v1/recipe", params={"hardware": "l4", "goal": "latency"})
    made = answer.json()
    jsonschema_rs.validate(json.loads(SCHEMA.read_text()), made)
    assert made == make(Request(NATIVE, "l4", goal="latency"))
    error_of(door.http.get("/v1/recipe", params={"goal": "speed", "strict": "true"}), 400, "invalid_value", "goal")
    error_of(door.http.get("/v1/recipe", params={"strict": "maybe"}), 400, "invalid_value", "strict")
