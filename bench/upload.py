"""Measure the time of an upload beside `sha256sum` and a plain copy, and the growth of the server's memory.

The file is an artifact of an 8B Llama's shapes with random contents, a gigabyte. It goes over loopback HTTP to a server
in a process of its own: the real routes, registry and checks, each byte durable before the reply. The engine is
replaced by the base's shapes and the size of a slot, which is all that an upload reads of it, so no model is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import torch

from bench.process import serving
from bench.report import RESULTS, describe, write_result
from bench.synthetic import LlamaShapes, write_delta
from deltastore.base.base import Base
from deltastore.format.artifact import Artifact
from deltastore.format.validate import check_artifact
from demo.table import table
from server.api.service import Backend
from server.app import create_app
from server.frontend.listen import listen, url_of
from server.process import run
from server.settings import Settings

FULL = LlamaShapes(num_layers=32, hidden=4096, intermediate=14336, kv=1024, vocabulary=128256)
SMALL = LlamaShapes(num_layers=2, hidden=512, intermediate=1408, kv=128, vocabulary=8000)
MAX_RATIO = 2.0  # of an upload's time to that of sha256sum
MAX_GROWTH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Figures:
    """Median seconds of each operation on one file, and the greatest growth of the server's memory."""

    num_bytes: int
    sha256sum_s: float
    copy_s: float  # durable
    check_s: float  # every number of the artifact, in this process
    upload_s: float
    growth_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {
            "bytes": self.num_bytes,
            "sha256sum_s": round(self.sha256sum_s, 3),
            "plain_copy_s": round(self.copy_s, 3),
            "check_s": round(self.check_s, 3),
            "upload_s": round(self.upload_s, 3),
            "upload_over_sha256sum": round(self.upload_s / self.sha256sum_s, 3),
            "server_growth_bytes": self.growth_bytes,
        }


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    if args.serve:
        sys.exit(serve(args.serve, SMALL if args.small else FULL))
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        figures = measure(Path(name), args.small, args.repeats)
    device = torch.device("cpu")
    print(
        f"{describe(device)}; {figures.num_bytes / 1e6:.0f} MB, median of {args.repeats}, page cache warm\n"
    )
    print(table(("what", "seconds", "of sha256sum"), list(_rows(figures))))
    print()
    print(table(("goal", "limit", "reached", ""), list(_goals(figures))))
    if out := args.out or (None if args.small else RESULTS / "upload.json"):
        settings = {"repeats": args.repeats, "statistic": "median", "page_cache": "warm"}
        write_result(out, "upload", device, {"settings": settings, "results": figures.as_json()})


def measure(directory: Path, small: bool, repeats: int) -> Figures:
    """Measure all operations in turns, so that other work on the machine slows each of them."""
    path = directory / "delta.safetensors"
    write_delta(path, SMALL if small else FULL, files={})
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
    runs: dict[str, list[float]] = {}
    command = [sys.executable, "-m", "bench.upload", "--serve", directory, *(["--small"] if small else [])]
    with serving(command) as server:
        # Imports modules, and fills the page cache.
        _upload(server.url, path, "first", digest)
        for number in range(repeats):
            before = server.memory()["VmRSS"]
            server.peak.restart()
            name = f"v{number}"
            timed = {
                "sha256sum": _seconds(partial(_sha256sum, path)),
                "copy": _seconds(partial(_copy, path, directory / "copy")),
                "check": _seconds(partial(_check, path)),
                "upload": _seconds(partial(_upload, server.url, path, name, digest)),
            }
            (directory / "copy").unlink()
            timed["growth"] = max(0, server.memory()["VmHWM"] - before)
            for what, value in timed.items():
                runs.setdefault(what, []).append(value)
    medians = {what: median(values) for what, values in runs.items()}
    return Figures(
        path.stat().st_size,
        medians["sha256sum"],
        medians["copy"],
        medians["check"],
        medians["upload"],
        int(max(runs["growth"])),
    )


def serve(directory: Path, shapes: LlamaShapes) -> int:
    """Serve a registry under `directory` without an engine; print the address when it takes uploads."""
    settings = Settings(base=directory, registry=directory / "registry", port=0)
    base = Base(
        id="synthetic",
        fingerprint="0" * 64,
        shapes=dict(shapes.tensors()),
        config={},
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
    )
    nothing = dict.fromkeys(("drain", "close"), lambda *_: None)
    engine = SimpleNamespace(base=base, slot_bytes=1 << 40, alive=lambda: True, **nothing)
    tokenizers = SimpleNamespace(check=lambda _: None, close=lambda: None)
    app = create_app(
        settings, lambda *_: cast("Backend", SimpleNamespace(engine=engine, tokenizers=tokenizers))
    )
    with listen(settings.host, settings.port) as listening:
        line = f"uploads are served at {url_of(listening)}"
        return run({listening: app}, app.state.service, lambda: print(line, flush=True))


def _upload(url: str, path: Path, name: str, digest: str) -> None:
    """Upload once; the kernel sends the file from the page cache, so that the client takes little processor time."""
    connection = HTTPConnection(urlsplit(url).netloc)
    with path.open("rb") as file:
        connection.putrequest("POST", f"/variants?name={name}")
        connection.putheader("Content-Type", "application/octet-stream")
        connection.putheader("Content-Length", str(path.stat().st_size))
        connection.endheaders()
        connection.sock.sendfile(file)
        response = connection.getresponse()
        reply = json.load(response)
    connection.close()
    if response.status != 201 or (digest and reply["digest"] != f"sha256:{digest}"):
        raise RuntimeError(f"the upload was answered {response.status}: {reply}")


def _sha256sum(path: Path) -> None:
    subprocess.run(["sha256sum", str(path)], check=True, stdout=subprocess.DEVNULL)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _check(path: Path) -> None:
    with Artifact.open(path) as artifact:
        check_artifact(artifact)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _rows(figures: Figures) -> Iterator[tuple[str, str, str]]:
    for what, seconds in (
        ("sha256sum", figures.sha256sum_s),
        ("plain copy, durable", figures.copy_s),
        ("checks of all numbers", figures.check_s),
        ("upload over HTTP", figures.upload_s),
    ):
        yield what, f"{seconds:.3f}", f"{seconds / figures.sha256sum_s:.2f}"


def _goals(figures: Figures) -> Iterator[tuple[str, str, str, str]]:
    ratio, growth = figures.upload_s / figures.sha256sum_s, figures.growth_bytes
    met = "met" if ratio <= MAX_RATIO else "missed"
    yield "upload / sha256sum", f"at most {MAX_RATIO:g}", f"{ratio:.2f}", met
    met = "met" if growth <= MAX_GROWTH_BYTES else "missed"
    yield "server's growth, MiB", f"at most {MAX_GROWTH_BYTES >> 20}", f"{growth / 2**20:.1f}", met


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.upload", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few megabytes; writes JSON only with --out")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where the files are made; a disk with 8 GB of room")
    parser.add_argument("--out", type=Path, help="the JSON file; bench/results/upload.json by default")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
