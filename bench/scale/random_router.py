"""A request router that takes any replica. Differs from the server's in the order alone, so that both obey pins."""

from __future__ import annotations

import random

from server.scale.request_router import VariantRequestRouter


class RandomRequestRouter(VariantRequestRouter):
    """Shuffles the replicas that have reported."""

    def ranked(self, version: str | None) -> list[str]:
        names = super().ranked(version)
        random.shuffle(names)
        return names
