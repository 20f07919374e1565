"""Decides by which measure Ray Serve scales the engines.

Serve counts the ongoing requests of a deployment: those that run, and those that wait in an engine or for a replica.
An engine runs `max_num_seqs` sequences at a time. With that number as Serve's target per replica, the requests above it
are those that wait, and as many replicas are added as would run them all. A replica is taken away once the others could
run all requests without a queue. This needs no policy of our own, and an operator may override it in Serve's file.
"""

from __future__ import annotations

from ray.serve.config import AutoscalingConfig

from server.settings import Settings

# A new replica loads a base first, and one that goes takes its resident variants with it: wait longer than a burst.
UPSCALE_DELAY_S = 10.0
DOWNSCALE_DELAY_S = 600.0


def autoscaling_config(settings: Settings, min_replicas: int, max_replicas: int) -> AutoscalingConfig:
    """Return Serve's configuration that adds replicas while requests wait.

    Raises:
        ValueError: `max_replicas` is less than `min_replicas` or 1.
    """
    return AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        target_ongoing_requests=settings.max_num_seqs,
        upscale_delay_s=UPSCALE_DELAY_S,
        downscale_delay_s=DOWNSCALE_DELAY_S,
    )
