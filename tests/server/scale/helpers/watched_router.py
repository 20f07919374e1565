"""A router that tests find. Serve copies this module into the class, and the copy keeps references to modules alone.

The list of routers is therefore reached through its module.
"""

from __future__ import annotations

from server.scale.request_router import VariantRequestRouter
from tests.server.scale.helpers import routers


class WatchedRouter(VariantRequestRouter):
    """A router that tests find in `ROUTERS`."""

    def initialize_state(self, **costs: float) -> None:
        super().initialize_state(**costs)
        routers.ROUTERS.append(self)
