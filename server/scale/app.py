"""`server.scale.app:app`, which `serve run`, `serve deploy` and a RayService import. Needs the extra `ray`."""

from __future__ import annotations

from typing import Any

from deltastore.errors import SettingsError
from server.settings import Settings
from server.settings_sources import load_settings

try:
    from ray import serve
    from ray.serve import Application
    from ray.serve.config import RequestRouterConfig
except ModuleNotFoundError as error:
    raise SettingsError("server.scale.app needs Ray Serve: pip install 'peraxis[ray]'") from error

from server.scale.engines import EngineReplica, autoscaling_config
from server.scale.ingress import Ingress
from server.scale.shared import SharedReplica

# Between health checks, so that a killed replica is replaced soon.
HEALTH_S = 2.0
# The place of settings, for messages: in a file of Serve's, or NAME=VALUE of `serve run`.
ARGS = "args of the application"
ROUTER = "server.scale.request_router.VariantRequestRouter"
# Between two reports of a replica to the routers.
ROUTING_STATS_S = 0.25
# Beyond `shutdown_timeout`, for the last bytes.
LAST_BYTES_S = 5.0
# Calls about a request or a delta that a replica takes beside requests, which its engine bounds.
MAX_CALLS = 4096


def app(args: dict[str, Any]) -> Application:
    """Return the application.

    Args:
        args: settings by name, over those of the PERAXIS_* environment. `num_replicas` is the number of engines; with
            `max_replicas`, it is the fewest, and Serve adds engines while requests wait.

    Raises:
        SettingsError: a setting is wrong, or means nothing under Ray Serve.
    """
    given = dict(args)
    number = {name: given.pop(name) for name in ("num_replicas", "max_replicas") if name in given}
    settings = load_settings(given, given_by=ARGS).settings
    _check(settings)
    options = {**_number_of_engines(settings, **number), **_engine_options(settings)}
    engines = serve.deployment(name="Engine", **options)(EngineReplica)
    # No CPU of Ray's, so that as many engines fit on a machine as it has CPUs.
    life = {**_life(settings), "ray_actor_options": {"num_cpus": 0}}
    shared = serve.deployment(name="Shared", num_replicas=1, max_ongoing_requests=MAX_CALLS, **life)(
        SharedReplica
    )
    ingress = serve.deployment(name="Ingress", max_ongoing_requests=settings.max_connections, **life)(Ingress)
    handle = engines.bind(settings)
    return ingress.bind(settings, handle, shared.bind(settings, handle))


def _number_of_engines(settings: Settings, num_replicas: Any = 1, max_replicas: Any = None) -> dict[str, Any]:
    try:
        if max_replicas is None:
            return {"num_replicas": int(num_replicas)}
        return {"autoscaling_config": autoscaling_config(settings, int(num_replicas), int(max_replicas))}
    except (TypeError, ValueError) as error:
        if max_replicas is None:
            raise SettingsError(f"num_replicas is {num_replicas!r}: give a whole number") from error
        raise SettingsError(
            f"num_replicas is {num_replicas!r} and max_replicas {max_replicas!r}: give whole numbers, "
            "max_replicas at least num_replicas"
        ) from error


def _engine_options(settings: Settings) -> dict[str, Any]:
    """Return the options of the engine deployment. Its engine refuses requests beyond its queue itself."""
    return {
        "max_ongoing_requests": settings.max_num_seqs + settings.max_queue + MAX_CALLS,
        "request_router_config": RequestRouterConfig.model_validate(
            {"request_router_class": ROUTER, "request_routing_stats_period_s": ROUTING_STATS_S}
        ),
        "ray_actor_options": {"num_gpus": 1} if settings.device == "cuda" else {},
        **_life(settings),
    }


def _life(settings: Settings) -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_S,
        # The web application logs requests; calls between replicas come every second.
        "logging_config": {"enable_access_log": False},
        "graceful_shutdown_timeout_s": settings.shutdown_timeout + LAST_BYTES_S,
        "graceful_shutdown_wait_loop_s": 0.5,
    }


def _check(settings: Settings) -> None:
    if not settings.base.is_dir():
        raise SettingsError(
            f"base is {settings.base}, and Ray Serve starts engines on any node: give a directory that all nodes have"
        )
    if settings.admin_port is not None:
        raise SettingsError("admin_port is set, and Ray Serve has one port: use --auth keys and leave it out")
    if settings.http_workers != 1:
        raise SettingsError(
            f"http_workers is {settings.http_workers}: set num_replicas of the deployment Ingress instead"
        )
    if settings.auth == "none" and not settings.allow_unauthenticated:
        raise SettingsError(
            "auth is none, and Ray Serve chooses the address: take auth keys, or set allow_unauthenticated if only "
            "trusted clients reach it"
        )
