"""A Prometheus server in a process of its own, which scrapes one target on loopback."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.process import free_port
from tests.helpers.debian import debian_tool
from tests.server.helpers.live_server import eventually

SCRAPE_S = 1


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus."""

    client: httpx.Client

    def query(self, expression: str) -> list[float]:
        """Return the values of an instant query, one per series."""
        answer = self._get("/api/v1/query", query=expression)
        assert answer["resultType"] in ("vector", "scalar"), answer
        return [float(series["value"][1]) for series in answer["result"]]

    def label_values(self, label: str, series: str) -> list[str]:
        """Return the values that a label of some series has."""
        values: list[str] = self._get(f"/api/v1/label/{label}/values", **{"match[]": series})
        return values

    def rules(self) -> list[dict[str, Any]]:
        """Return every rule with its state, in the order of the file."""
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def await_scrapes(self, number: int) -> None:
        """Wait until the target has been scraped so often from now on."""
        before = self._num_scrapes()
        assert eventually(lambda: self._num_scrapes() >= before + number)

    def is_ready(self) -> bool:
        try:
            return self.client.get("/-/ready").is_success
        except httpx.TransportError:
            return False

    def _num_scrapes(self) -> float:
        return sum(self.query("count_over_time(up[10m])"))

    def _get(self, path: str, **parameters: str) -> Any:
        reply = self.client.get(path, params=parameters)
        document = reply.json()
        assert document["status"] == "success", (parameters, document)
        return document["data"]


@contextmanager
def running_prometheus(directory: Path, target: str, rules: Path) -> Iterator[Prometheus]:
    """Run Prometheus until the end of the block, once it has scraped HOST:PORT; skip without its Debian package."""
    program = debian_tool("prometheus")
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "peraxis", "static_configs": [{"targets": [target]}]}],
    }
    file = directory / "prometheus.yaml"
    file.write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{free_port()}"
    command = [
        program, f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip
    with (directory / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=240) as client:
            prometheus = Prometheus(client)
            assert eventually(prometheus.is_ready), Path(log.name).read_text()
            assert eventually(lambda: prometheus.query("up") == [1.0]), Path(log.name).read_text()
            yield prometheus
    finally:
        process.kill()
        process.wait()
