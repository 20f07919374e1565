"""Configurations of the processes that the supervisor starts, as JSON on their standard input."""

from __future__ import annotations

from msgspec import Struct


class EngineConfig(Struct, frozen=True):
    """All that an engine process is given."""

    settings: str  # `Settings` as JSON
    address: str  # of the ROUTER that it binds
    parent_id: int


class HttpProcessConfig(Struct, frozen=True):
    """All that an HTTP process is given."""

    settings: str  # `Settings` as JSON
    identity: str  # names it to the engine
    parent_id: int
    link: int  # descriptor of its end of the control link
    listening: list[int]  # descriptors of the public socket and, if there is one, of the admin port's
