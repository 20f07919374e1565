"""The alternatives inside transformers as contenders: merged weights swapped in, static and continuous batching."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.peers.contender import Contender
from bench.peers.peer_process import PeerProcess, running_peer

SWAPPED, STATIC, CONTINUOUS = "merged weights swapped in", "transformers, static", "transformers, continuous"


@contextmanager
def running_library(base: Path, num_merged: int) -> Iterator[PeerProcess]:
    """Start a process with the base's model and so many copies of merged weights."""
    command = [sys.executable, "-m", "bench.peers.library_program"]
    config = {"base": str(base), "num_merged": num_merged}
    with running_peer(command, config, base.parent / "library.log") as peer:
        yield peer


def library_contenders(
    peer: PeerProcess, num_requests: Sequence[int], counts: Sequence[int]
) -> list[Contender]:
    """Return batching of the base at each number of requests, and swapping of variants at the smallest of them."""
    ways = {STATIC: "static", CONTINUOUS: "continuous"}
    batching = [
        Contender(name, number, 0, partial(peer.answer, way=way))
        for number in num_requests
        for name, way in ways.items()
    ]
    swapping = [
        Contender(SWAPPED, min(num_requests), k, partial(peer.answer, way="swapped", num_variants=k))
        for k in counts
    ]
    return [*swapping, *batching]
