"""Configurations of the processes that the supervisor starts, as JSON on their standard input."""

from __future__ import annotations

import sys

from msgspec import Struct

from server.protocol.messages import VERSION


class EngineConfig(Struct, frozen=True):
    """All that an engine process is given."""

    settings: str  # `Settings` as JSON
    address: str  # of the ROUTER that it binds
    parent_id: int
    version: str = VERSION


class HttpProcessConfig(Struct, frozen=True):
    """All that an HTTP process is given."""

    settings: str  # `Settings` as JSON
    identity: str  # names it to the engine
    parent_id: int
    link: int  # descriptor of its end of the control link
    listening: list[int]  # descriptors of the public socket and, if there is one, of the admin port's
    version: str = VERSION


def check_version(config: EngineConfig | HttpProcessConfig) -> None:
    """Exit with a message if the process that sent the configuration is of another version."""
    if config.version != VERSION:
        sys.exit(
            f"error: a server of version {config.version} started a process of version {VERSION}, "
            "as after an upgrade: restart the server"
        )
