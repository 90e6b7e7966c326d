"""More than one machine, with Ray Serve: `serve run duetts.cluster:app`. Only `app` needs Ray, which duetts[ray] brings."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`app` when it is asked for, so that all else here can be used without Ray."""
    if name == "app":
        from duetts.cluster.application import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
