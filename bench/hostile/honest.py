"""The honest tenant beside an attack: its streams, and the calls that must not be refused."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from bench.http.clients import StreamedRequest, read_streams
from bench.serving import prompts, text_of
from bench.streams import gap_seconds
from bench.synthetic import LlamaShapes

TENANT = "honest"
# In place of the status of a reply that did not come.
BROKEN = 599
PROMPT_TOKENS = 32
# Between two rounds of calls. A round has a scrape in each `SCRAPE_EVERY`.
ROUND_S = 0.25
SCRAPE_EVERY = 8


@dataclass(slots=True)
class Watched:
    """The outcome of the honest tenant's calls."""

    health_s: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    num_calls: int = 0
    is_same: bool = True  # the text of each greedy request


class HonestTenant:
    """An honest tenant's client, and the operator's.

    Args:
        keys: of the honest tenant and of a scraper; both None without keys.
        artifact: published in each measurement, under a new name.
    """

    def __init__(
        self,
        url: str,
        keys: tuple[str | None, str | None],
        artifact: Path,
        shapes: LlamaShapes,
        num_streams: int,
        num_new: int,
    ) -> None:
        texts = [text_of(one, "x") for one in prompts(num_streams, PROMPT_TOKENS, shapes.vocabulary)]
        key, scraper = keys
        self._streams = [StreamedRequest(text, num_new, "v1", key=key) for text in texts]
        self._url = url
        self._client = httpx.Client(base_url=url, headers=_headers(key), timeout=600.0)
        self._operator = httpx.Client(base_url=url, headers=_headers(scraper), timeout=600.0)
        self._artifact = artifact.read_bytes()
        self._num_uploads = 0
        self._body = {"prompt": texts[0], "max_new_tokens": 4, "temperature": 0}
        self._expected = self._text(
            self._client.post("/generate?variant=v1", json=self._body).raise_for_status()
        )

    def close(self) -> None:
        self._client.close()
        self._operator.close()

    def gaps(self) -> list[float]:
        """Read all streams to their ends and return the seconds between their tokens."""
        return gap_seconds(read_streams(self._url, self._streams).streams)

    def is_served(self) -> bool:
        """Ask for the greedy output once; False if that is refused.

        Raises:
            RuntimeError: another output came.
        """
        reply = self._client.post("/generate?variant=v1", json=self._body)
        if not reply.is_error and self._text(reply) != self._expected:
            raise RuntimeError("the honest tenant got another output than before")
        return not reply.is_error

    @contextmanager
    def watching(self) -> Iterator[Watched]:
        """Make the honest calls while the block runs."""
        watched, over = Watched(), threading.Event()
        thread = threading.Thread(target=self._watch, args=(watched, over))
        thread.start()
        try:
            yield watched
        finally:
            over.set()
            thread.join()

    def _watch(self, watched: Watched, over: threading.Event) -> None:
        self._publish(watched)
        for number in count():
            start = time.perf_counter()
            self._call(watched, self._client, "GET", "/health")
            watched.health_s.append(time.perf_counter() - start)
            if number % SCRAPE_EVERY == 0:
                self._call(watched, self._operator, "GET", "/metrics")
            else:
                self._call(
                    watched, self._client, "GET", ("/variants/v1", "/v1/models/v1", "/v1/models")[number % 3]
                )
            reply = self._call(watched, self._client, "POST", "/generate?variant=v1", json=self._body)
            if not reply.is_error and self._text(reply) != self._expected:
                watched.is_same = False
            if over.wait(ROUND_S):
                return

    def _publish(self, watched: Watched) -> None:
        self._num_uploads += 1
        headers = {"Content-Type": "application/octet-stream"}
        name = f"upload-{self._num_uploads}"
        self._call(
            watched, self._client, "POST", f"/variants?name={name}", content=self._artifact, headers=headers
        )

    def _call(
        self, watched: Watched, client: httpx.Client, method: str, path: str, **body: Any
    ) -> httpx.Response:
        watched.num_calls += 1
        try:
            reply = client.request(method, path, **body)
            outcome = str(reply.status_code)
        except httpx.TransportError as error:
            reply, outcome = httpx.Response(BROKEN), type(error).__name__
        if reply.is_error:
            watched.refused[f"{method} {path.partition('?')[0]}: {outcome}"] += 1
        return reply

    @staticmethod
    def _text(reply: httpx.Response) -> str:
        return str(reply.json()["outputs"][0]["text"])


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"X-API-Key": key}
