"""The routers of this process, in the order in which Serve made them."""

from __future__ import annotations

from server.scale.request_router import VariantRequestRouter

ROUTERS: list[VariantRequestRouter] = []
