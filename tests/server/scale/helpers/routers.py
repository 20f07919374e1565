"""The routers of this process, in the order in which Serve made them."""

from __future__ import annotations

from typing import Any

ROUTERS: list[Any] = []  # of `WatchedRouter`, whose module imports this one
