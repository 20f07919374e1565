"""Clients of a server over HTTP: whole answers with their timings, and streams with how they ended."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

CALL_S = 120.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests whose variants follow Zipf's law, from clients that each wait for one answer after the other."""

    variants: Sequence[str]
    exponent: float = 1.0
    num_clients: int = 6
    new_tokens: int = 16

    def draw(self, chance: random.Random) -> str:
        weights = [(place + 1) ** -self.exponent for place in range(len(self.variants))]
        return chance.choices(self.variants, weights)[0]


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """One stream; times are seconds of `time.perf_counter`."""

    began: float
    first_token: float | None
    ended: float
    # done, or why not: error (an event), cut off, or refused (with the status)
    outcome: str


def ask(client: httpx.Client, variant: str | None, new_tokens: int, chance: random.Random) -> bool:
    """Send one request and return whether its variant had to be loaded.

    Raises:
        RuntimeError: it was not answered.
    """
    reply = client.post("/generate", params=_params(variant), json=_body(new_tokens, chance))
    if reply.is_error:
        raise RuntimeError(f"{reply.status_code} {reply.text}")
    return bool(reply.json()["timings"]["cold"])


def cold_starts(url: str, traffic: Traffic, num_requests: int) -> int:
    """Send a number of requests and return how many waited for a load."""

    def some(number: int) -> int:
        chance = random.Random(number)
        with httpx.Client(base_url=url, timeout=CALL_S) as client:
            return sum(
                ask(client, traffic.draw(chance), traffic.new_tokens, chance)
                for _ in range(num_requests // traffic.num_clients)
            )

    with ThreadPoolExecutor(traffic.num_clients) as pool:
        return sum(pool.map(some, range(traffic.num_clients)))


def latencies_s(url: str, num_requests: int) -> list[float]:
    """Send requests of one token to the base, one after the other, and return the seconds of each."""
    chance, found = random.Random(0), []
    with httpx.Client(base_url=url, timeout=CALL_S) as client:
        for _ in range(num_requests):
            begun = time.perf_counter()
            ask(client, None, 1, chance)
            found.append(time.perf_counter() - begun)
    return found


def tokens_per_s(url: str, num_clients: int, num_requests: int, new_tokens: int) -> float:
    """Stream answers of the base to clients at the same time and return the rate of all tokens.

    Raises:
        RuntimeError: a stream has no end.
    """

    def some(number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=url, timeout=CALL_S) as client:
            for _ in range(num_requests // num_clients):
                if (ended := stream(client, None, new_tokens, chance)).outcome != "done":
                    raise RuntimeError(f"a stream ended with {ended.outcome}")

    begun = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as pool:
        list(pool.map(some, range(num_clients)))
    return num_requests // num_clients * num_clients * new_tokens / (time.perf_counter() - begun)


def stream_until(url: str, traffic: Traffic, stopped: threading.Event) -> list[StreamEnd]:
    """Stream answers until `stopped`, and return all streams."""

    def some(number: int) -> list[StreamEnd]:
        chance, found = random.Random(number), []
        with httpx.Client(base_url=url, timeout=CALL_S) as client:
            while not stopped.is_set():
                found.append(stream(client, traffic.draw(chance), traffic.new_tokens, chance))
        return found

    with ThreadPoolExecutor(traffic.num_clients) as pool:
        return [each for found in pool.map(some, range(traffic.num_clients)) for each in found]


def stream(client: httpx.Client, variant: str | None, new_tokens: int, chance: random.Random) -> StreamEnd:
    """Stream one answer to its end, however it ends."""
    began, first_token, event = time.perf_counter(), None, ""
    body = {**_body(new_tokens, chance), "stream": True}
    try:
        with client.stream("POST", "/generate", params=_params(variant), json=body) as reply:
            if reply.is_error:
                return StreamEnd(began, None, time.perf_counter(), f"refused with {reply.status_code}")
            for line in reply.iter_lines():
                key, _, value = line.partition(": ")
                if key == "event":
                    event = value
                    if event == "token" and first_token is None:
                        first_token = time.perf_counter()
    except httpx.TransportError:
        event = "cut off"
    outcome = event if event in ("done", "error") else "cut off"
    return StreamEnd(began, first_token, time.perf_counter(), outcome)


def _params(variant: str | None) -> dict[str, str]:
    return {} if variant is None else {"variant": variant}


def _body(new_tokens: int, chance: random.Random) -> dict[str, object]:
    # Prompts differ, so that none finds another's pages in the prefix cache.
    prompt = " ".join(f"w{chance.randrange(1, 250)}" for _ in range(16))
    return {"prompt": prompt, "max_new_tokens": new_tokens, "temperature": 0}
