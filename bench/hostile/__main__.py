"""Measure the streams of one tenant while another sends what costs a server time and memory.

Two honest streams of a variant with its own tokenizer run on `peraxis serve` with API keys, alone and then beside each
attack, in turns. The hostile tenant has no limits. Beside each attack the honest tenant also asks for the same greedy
output again, and for `GET /health`. The hostile clients run on the same processors as the server.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch

from bench.hostile.attacks import KINDS, TENANT, Attack, attacks, publish_hostile, running
from bench.http.clients import StreamedRequest, read_streams
from bench.process import serve_command, serving
from bench.report import RESULTS, describe, write_result
from bench.serving import SHAPES, SMALL, prompts, publish, text_of, tokenizer_files, write_base
from bench.streams import gap_seconds, p99
from bench.synthetic import LlamaShapes, write_delta
from deltastore.base.base import Base
from deltastore.base.checkpoint import Checkpoint
from deltastore.registry import Registry
from demo.table import table
from server.tenants.audit import AuditLog, Auditor
from server.tenants.keys import KeyStore

HONEST = "honest"
PROMPT_TOKENS = 32
# Gives an attack time to occupy the workers.
HEAD_START_S = 1.0


@dataclass(frozen=True, slots=True)
class HostileScope:
    """Sizes of a run."""

    shapes: LlamaShapes
    num_streams: int = 2
    num_new: int = 200
    prompt_chars: int = 8 << 20
    num_patterns: int = 2300


FULL_SCOPE = HostileScope(SHAPES["1.1b"])
SMALL_SCOPE = HostileScope(SMALL, num_new=16, prompt_chars=1 << 16, num_patterns=20)


@dataclass(frozen=True, slots=True)
class Beside:
    """Figures of the honest tenant alone and beside one attack."""

    attack: str
    alone_s: Sequence[float]  # gaps between tokens
    beside_s: Sequence[float]
    is_same: bool  # the text of a greedy request
    health_s: float
    replies: dict[str, int]  # to the hostile tenant, by status and code

    def results(self) -> dict[str, Any]:
        """Return the figures for the JSON document."""
        return {
            "attack": self.attack,
            **{f"alone_{name}": value for name, value in _figures(self.alone_s).items()},
            **{f"beside_{name}": value for name, value in _figures(self.beside_s).items()},
            "same_text": self.is_same,
            "health_s": round(self.health_s, 4),
            "replies": self.replies,
        }


class HonestTenant:
    """The honest tenant's client."""

    def __init__(self, url: str, key: str, scope: HostileScope) -> None:
        texts = [
            text_of(one, "x") for one in prompts(scope.num_streams, PROMPT_TOKENS, scope.shapes.vocabulary)
        ]
        self._streams = [StreamedRequest(text, scope.num_new, "v1", key=key) for text in texts]
        self._url = url
        self._client = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=600.0)
        self._body = {"prompt": texts[0], "max_new_tokens": 16, "temperature": 0}

    def close(self) -> None:
        self._client.close()

    def text(self) -> str:
        """Return the text of one greedy request."""
        reply = self._client.post("/generate", params={"variant": "v1"}, json=self._body).raise_for_status()
        return str(reply.json()["outputs"][0]["text"])

    def gaps(self) -> list[float]:
        """Read all streams to their ends and return the seconds between their tokens."""
        return gap_seconds(read_streams(self._url, self._streams).streams)

    def health_s(self) -> float:
        """Return the seconds that `GET /health` takes."""
        start = time.perf_counter()
        self._client.get("/health").raise_for_status()
        return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    scope = SMALL_SCOPE if args.small else FULL_SCOPE
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        found = measure(Path(name), scope, args.attacks)
    print(f"{describe(device)}\n\n{_table(found)}")
    if out := args.out or (None if args.small else RESULTS / "hostile.json"):
        figures = {"settings": asdict(scope), "results": [one.results() for one in found]}
        write_result(out, "hostile", device, figures)


def measure(directory: Path, scope: HostileScope, kinds: Sequence[str]) -> list[Beside]:
    """Serve both tenants and measure the honest one beside attacks of these kinds."""
    base, registry = write_base(directory / "base", scope.shapes), Registry(directory / "registry")
    files = tokenizer_files(directory, scope.shapes)
    path = directory / "honest.safetensors"
    identity = Base.of(Checkpoint.open(base))
    write_delta(path, scope.shapes, 1, files, identity)
    publish(registry, path, "v1", HONEST)
    publish_hostile(registry, directory, scope.shapes, files, identity)
    store, auditor = KeyStore(registry.root), Auditor(AuditLog(registry.root))
    keys = {tenant: store.create(auditor, tenant, ["inference"]).text for tenant in (HONEST, TENANT)}
    flags = ("--auth", "keys", "--max-gpu-deltas", 8, "--max-host-cache-gb", 0, "--kv-cache-gb", 0.5)
    with ExitStack() as stack:
        server = stack.enter_context(serving(serve_command(base, registry.root, *flags)))
        honest = HonestTenant(server.url, keys[HONEST], scope)
        stack.callback(honest.close)
        expected = honest.text()
        return [
            _beside(attack, honest, expected, (server.url, keys[TENANT]))
            for attack in attacks(scope.prompt_chars, scope.num_patterns)
            if attack.kind in kinds
        ]


def _beside(attack: Attack, honest: HonestTenant, expected: str, hostile: tuple[str, str]) -> Beside:
    alone = honest.gaps()
    with running(attack, *hostile) as replies:
        time.sleep(HEAD_START_S)
        beside, health_s = honest.gaps(), honest.health_s()
        is_same = honest.text() == expected
    return Beside(attack.kind, alone, beside, is_same, health_s, dict(replies))


def _table(found: Sequence[Beside]) -> str:
    heads = (
        "attack", "p99 alone, ms", "p99 beside, ms", "ratio", "longest, ms", "same text", "/health, ms", "replies",
    )  # fmt: skip
    rows = [
        (
            one.attack,
            f"{1e3 * p99(one.alone_s):.0f}",
            f"{1e3 * p99(one.beside_s):.0f}",
            f"{p99(one.beside_s) / p99(one.alone_s):.2f}",
            f"{1e3 * max(one.beside_s):.0f}",
            "yes" if one.is_same else "NO",
            f"{1e3 * one.health_s:.0f}",
            ", ".join(f"{count} x {reply}" for reply, count in sorted(one.replies.items())),
        )
        for one in found
    ]
    return table(heads, rows)


def _figures(gaps: Sequence[float]) -> dict[str, float]:
    named = {"median_s": median(gaps), "p99_s": p99(gaps), "max_s": max(gaps)}
    return {name: round(value, 5) for name, value in named.items()}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hostile", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model; writes JSON only with --out")
    parser.add_argument("--attacks", nargs="+", choices=KINDS, default=KINDS, help="all by default")
    parser.add_argument("--dir", type=Path, help="where the checkpoints and the registry are made")
    parser.add_argument("--out", type=Path, help="the JSON file; bench/results/hostile.json by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
