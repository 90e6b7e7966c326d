"""The humming server of tests/server, for clients of their own kind."""

from tests.server.conftest import door, served

__all__ = ["door", "served"]
