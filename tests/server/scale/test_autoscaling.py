"""Scaling of a real Ray Serve deployment by requests that wait."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra ray: pip install -e '.[ray]'")

from ray import serve

from server.scale.engines import autoscaling_config
from server.settings import Settings
from tests.server.scale.helpers.fake_engines import CAPACITY, ENGINES, generating, states
from tests.server.scale.helpers.local_ray import until


@pytest.mark.deploy
# Serve compares the period with a deprecated field instead of the environment, which conftest.py sets.
@pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")
def test_waiting_requests_add_a_replica_and_it_goes_when_none_waits(serve_port: int, tmp_path: Path) -> None:
    settings = Settings(base=tmp_path, registry=str(tmp_path), max_num_seqs=CAPACITY)
    config = autoscaling_config(settings, min_replicas=1, max_replicas=2)
    at_once = {
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "look_back_period_s": 1.0,
    }
    handle = serve.run(
        ENGINES.options(num_replicas="auto", autoscaling_config=config.model_copy(update=at_once)).bind(),
        name="scaled",
        route_prefix=None,
    )
    running = [generating(handle, None, is_held=True) for _ in range(CAPACITY)]
    for one in running:
        next(one)
    assert len(states(handle)) == 1
    waiting = generating(handle, None, is_held=True)
    next(waiting)
    until(lambda: len(states(handle)) == 2)
    handle.broadcast("release").results(timeout_s=30)
    until(lambda: len(states(handle)) == 1)
    serve.delete("scaled")


def test_the_bounds_of_replicas_must_agree(tmp_path: Path) -> None:
    settings = Settings(base=tmp_path, registry=str(tmp_path))
    with pytest.raises(ValueError, match="max_replicas"):
        autoscaling_config(settings, min_replicas=3, max_replicas=2)
