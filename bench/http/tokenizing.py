"""Gaps between the tokens of running streams while the server tokenizes long prompts of others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.http.clients import running_clients
from bench.http.subjects import PROMPT_TOKENS, server_for, streamed_requests
from bench.process import Server
from bench.serving import prompts, publish_variants, text_of, tokenizer_files, write_base
from bench.streams import Span, StreamTimes, gaps_meeting, gaps_within, p99
from bench.synthetic import LlamaShapes
from deltastore.registry import Registry

ROOM = 2 * PROMPT_TOKENS  # positions beside the long prompt
BASE, OWN = "base's tokenizer", "variant's own tokenizer"


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """Sizes of the measurement."""

    num_tokens: int = 10_000
    count: int = 40
    num_streams: int = 8
    pause_s: float = 0.1  # between two long prompts
    quiet_s: float = 3.0


def measure_tokenizing(
    directory: Path, shapes: LlamaShapes, long: LongPrompts
) -> dict[str, dict[str, float]]:
    """Return figures by whose tokenizer makes the tokens of the long prompts."""
    positions = long.num_tokens + ROOM
    base = write_base(directory / "base", shapes, positions)
    registry = Registry(directory / "registry")
    publish_variants(registry, base, shapes, 1, tokenizer_files(directory, shapes))
    asked = prompts(long.num_streams, PROMPT_TOKENS, shapes.vocabulary)
    requests = streamed_requests(asked, 0, positions - PROMPT_TOKENS)
    # Short words, so that the prompt is not refused for its length in characters.
    (prompt,) = prompts(1, long.num_tokens, shapes.vocabulary // 10, seed=1)
    figures = {}
    with server_for(base, registry, long.num_streams, 1) as server:
        for name, variant, letter in ((BASE, None, "w"), (OWN, "v1", "x")):
            text = text_of(prompt, letter)
            # Loads the tokenizer.
            _tokenize(server, variant, text)
            with running_clients(server.url, requests) as clients:
                clients.wait_for_first_tokens()
                quiet = [_wait(long.quiet_s / 2)]
                busy = list(_tokenize_often(server, variant, text, long))
                quiet.append(_wait(long.quiet_s / 2))
                streams = clients.stop().streams
            figures[name] = _figures(streams, quiet, busy)
    return figures


def _tokenize_often(server: Server, variant: str | None, text: str, long: LongPrompts) -> Iterator[Span]:
    """Send long prompts one after another; yield the time from each request to its reply."""
    for _ in range(long.count):
        began = time.perf_counter()
        _tokenize(server, variant, text)
        yield Span(began, time.perf_counter())
        time.sleep(long.pause_s)


def _tokenize(server: Server, variant: str | None, text: str) -> None:
    """Let the server tokenize a prompt that it then refuses, because one token more is asked for than fits.

    Raises:
        RuntimeError: it was not refused, or for another reason.
    """
    params = {"variant": variant} if variant else {}
    body = {"prompt": text, "max_new_tokens": ROOM + 1}
    reply = server.client.post("/generate", params=params, json=body)
    if reply.status_code != 400 or "tokens" not in reply.json()["error"]["message"]:
        raise RuntimeError(f"a prompt that is too long was answered {reply.status_code}: {reply.text[:500]}")


def _wait(seconds: float) -> Span:
    began = time.perf_counter()
    time.sleep(seconds)
    return Span(began, time.perf_counter())


def _figures(streams: Sequence[StreamTimes], quiet: Sequence[Span], busy: Sequence[Span]) -> dict[str, float]:
    without, during = gaps_within(streams, quiet), gaps_meeting(streams, busy)
    return {
        "gaps_quiet": len(without),
        "gaps_busy": len(during),
        "reply_p50_s": round(median(span.ended - span.began for span in busy), 6),
        "quiet_p50_s": round(median(without), 6),
        "quiet_p99_s": round(p99(without), 6),
        "busy_p50_s": round(median(during), 6),
        "busy_p99_s": round(p99(during), 6),
    }
