"""What answers tell of the pieces of a long text, and the field that sets their size."""

import pytest

from duetts.server.speech import MAX_LISTED, _outcome_headers
from duetts.types import Outcome, Pieces, Suspect
from tests.server.conftest import Door


def test_the_size_of_pieces_reaches_the_service(door: Door) -> None:
    answer = door.speak(chunk_length=200)
    assert answer.status_code == 200
    assert answer.headers["X-Pieces"] == "1"
    assert not {"X-Pieces-Retried", "X-Pieces-Suspect"} & {name.title() for name in answer.headers}
    assert door.service.requests[0].chunk_length == 200
    assert door.speak(stream_format="audio").headers["X-Pieces"] == "1"
    assert door.service.requests[1].chunk_length is None


@pytest.mark.parametrize("value", ["200", 200.5, True, [200]])
def test_the_size_of_pieces_is_an_integer(door: Door, value: object) -> None:
    door.refused(400, "invalid_type", "chunk_length", input="Hi.", chunk_length=value)


def test_pieces_that_were_redone_or_are_suspect_are_named() -> None:
    pieces = Pieces(9, 9, (2, 5), (Suspect(5, "too_short"), Suspect(7, "length")))
    headers = _outcome_headers(Outcome("length", 10, 7, pieces=pieces), 1.0)
    assert headers["X-Pieces-Retried"] == "2, 5"
    assert headers["X-Pieces-Suspect"] == "5=too_short, 7=length"


def test_a_header_of_many_pieces_stays_short() -> None:
    pieces = Pieces(500, 500, tuple(range(500)), tuple(Suspect(index, "too_short") for index in range(500)))
    headers = _outcome_headers(Outcome("stop", 10, 7, pieces=pieces), 1.0)
    assert headers["X-Pieces-Retried"].split(", ") == [*map(str, range(MAX_LISTED)), "..."]
    assert max(len(value) for value in headers.values()) < 2000
