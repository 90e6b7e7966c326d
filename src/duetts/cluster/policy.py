"""How many replicas there should be: by who waits and who is late, never by how busy they are. An engine with batch work is
always busy, and it makes room for listeners by itself. And when one of them should be replaced.

Ray's controller runs this. It is sent there by itself, so it imports nothing of the package.
"""

from __future__ import annotations

import math
from typing import Any

WAITING = 0.5  # requests in line of a replica, on average, from which there is a line
LATE = 0.2  # share of the time that some listener was late, from which a replica has too much to do
FILLED = 0.7  # of the places, by what runs, when one replica less has to be enough
PATIENCE, SLACK_S = 2.0, 30.0  # an engine may take so many times its last start, and so much more, to be back


def replicas_wanted(replicas: int, places: float, running: float, waiting: float, late: float) -> int:
    """The number of replicas for what all of them together have: places, requests that are spoken and that wait, and how many
    replicas had somebody late (a replica that was late half of the time counts as a half)."""
    if replicas < 1 or places <= 0:
        return max(1, replicas)
    each = places / replicas
    if waiting >= WAITING * replicas or late >= LATE * replicas:
        # A listener may have to wait although places are free, as one more would make others late: so one more at least.
        return max(replicas + 1, math.ceil((running + waiting) / each))
    if waiting or late:
        return replicas
    return min(replicas, max(1, math.ceil(running / (FILLED * each))))


def by_line_and_lateness(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray's form of it. `context` has the means over the last seconds of what each replica tells of itself; one that has not
    told yet counts like the others."""
    told = {name: list(each.values()) for name, each in (context.aggregated_metrics or {}).items()}
    replicas = int(context.current_num_replicas)
    heard = len(told.get("places", ()))
    if heard == 0:  # nothing is known: nothing changes
        return int(context.target_num_replicas), {}
    places = sum(told["places"]) / heard * replicas
    running, waiting, late = (sum(told.get(name, ())) for name in ("running", "waiting", "late"))
    return replicas_wanted(replicas, places, running, waiting, late), {}


def unhealthy(sick: str, stats: dict[str, Any], was_up: float, now: float) -> str:
    """Why a replica should be replaced by another; empty if it should not. `was_up` is when an engine was last seen up."""
    if not sick:
        return ""
    start_s = max((each.get("start_s", 0.0) for each in stats.get("engines", [])), default=0.0)
    if not stats.get("alive", True) and now - was_up < PATIENCE * start_s + SLACK_S:
        return ""
    return sick
