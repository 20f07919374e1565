"""A router that tests find. Serve copies this module into the class, and the copy keeps references to modules alone.

The list of routers is therefore reached through its module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.scale.request_router import VariantRequestRouter
from tests.server.scale.helpers import routers


class WatchedRouter(VariantRequestRouter):
    """A router that tests find in `ROUTERS`."""

    def initialize_state(self, **costs: float) -> None:
        super().initialize_state(**costs)
        routers.ROUTERS.append(self)

    @property
    def reports(self) -> Mapping[str, Mapping[str, Any]]:
        """The latest routing statistics by replica."""
        return self._seen
