"""Engines of the process that imports this look for their end every 10 ms: tests end hundreds of them."""

from __future__ import annotations

from server.engine import engine

engine.IDLE_S = 0.01
