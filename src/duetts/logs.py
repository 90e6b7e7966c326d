"""Where a process of the server writes its lines, and what they look like."""

from __future__ import annotations

import logging

from duetts.config import LogConfig
from duetts.errors import ConfigError

# What uvicorn reports as an error after every socket that was refused as it should be.
NO_HANDSHAKE = "ASGI callable returned without completing handshake."


def start_log(config: LogConfig, who: str = "") -> None:
    """Lines to standard error or the file, those of one of several processes with its name. uvicorn's own lines hold addresses
    with all that clients put into them. Raises `ConfigError`."""
    form = f"%(asctime)s %(levelname)s %(name)s: {who and who + ': '}%(message)s"
    try:
        logging.basicConfig(level=config.level.upper(), filename=config.file, format=form)
    except OSError as error:
        raise ConfigError(f"log_file {config.file} cannot be written: {error.strerror}") from None
    protocol = logging.getLogger("uvicorn.error")
    protocol.setLevel(logging.WARNING)
    protocol.addFilter(lambda record: record.msg != NO_HANDSHAKE)
