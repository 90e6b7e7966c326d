"""Which replica gets a request: of two that are drawn, the one with fewer, wherever it is. Ray's own choice prefers replicas on
the proxy's machine for as long as they take more; but replicas here take all that comes and refuse the rest themselves.

Ray sends this module by itself to its proxies, so it imports nothing of the package.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import RequestRouter


class FewerOfTwo(RequestRouter):
    """Ray asks the replicas that are chosen here how many requests they have, and takes the one with fewer. What is `known` of
    a speech is asked of the replica that is named, if it is there."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Two of the replicas, or as many as there are. If none takes the request, Ray waits a little and asks again."""
        named = []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            if pending_request.metadata.call_method == "known":
                named = [one for one in candidate_replicas if one.replica_id.unique_id == pending_request.args[0]]
        chosen = named or random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        return [chosen] if chosen else []
