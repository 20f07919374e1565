"""An engine's part in constrained output, without a model: draws tokens that masks allow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from deltastore.errors import PeraxisError
from server.grammar.service import MaskFeed
from server.protocol.engine_client import EngineClient
from server.protocol.messages import Event, FinishEvent, TokenEvent
from server.protocol.request import Request, SamplingParams, token_ids_of


def allowed(mask: bytes) -> set[int]:
    """Return the token ids that a mask allows."""
    return {token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1}


class MaskReceiver(EngineClient):
    """Keeps the masks that are sent."""

    def __init__(self) -> None:
        super().__init__("test")
        self.masks: dict[tuple[str, int], dict[int, bytes]] = {}
        self.arrived = asyncio.Event()

    def send_mask(self, request_id: str, index: int, position: int, bits: bytes | None) -> None:
        assert bits is not None
        self.masks.setdefault((request_id, index), {})[position] = bits
        self.arrived.set()


class Drawing:
    """One request of `n` sequences, whose tokens are drawn as its masks allow.

    Args:
        request_id: must not be used twice.
    """

    def __init__(self, receiver: MaskReceiver, feed: MaskFeed, request_id: str, eos: int, n: int = 1) -> None:
        params = SamplingParams(n=n, stop_token_ids=frozenset([eos]))
        self._receiver = receiver
        self._feed = feed
        self._request = Request(request_id, "default", None, None, token_ids_of([1]), 300, params)
        self.events: list[Event] = []
        self._receive = feed.before(self.events.append)
        self._eos = eos
        self.failed: asyncio.Future[PeraxisError] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self._feed.start(self._request, self.failed.set_result)

    async def draw(
        self, index: int, seed: int, num_tokens: int = 10_000, begun: Sequence[int] = ()
    ) -> list[int]:
        """Return the tokens of one sequence: up to its end, or as many as are asked for.

        Args:
            begun: the tokens that earlier calls returned.
        """
        drawing, tokens = random.Random(seed), list(begun)
        while len(tokens) < num_tokens:
            mask = await self._mask(index, len(tokens))
            choices = sorted(allowed(mask))
            token = drawing.choice(choices) if choices else self._eos
            if choices:
                self._receive(TokenEvent(index, token))
            if token == self._eos:
                self._receive(FinishEvent(index, "stop"))
                break
            tokens.append(token)
        return tokens

    async def _mask(self, index: int, position: int) -> bytes:
        if position == 0:
            return self._feed.first_mask
        masks = self._receiver.masks.setdefault((self._request.id, index), {})
        while position not in masks:
            self._receiver.arrived.clear()
            waiting: asyncio.Future[Any] = asyncio.ensure_future(self._receiver.arrived.wait())
            futures: set[asyncio.Future[Any]] = {waiting, self.failed}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if self.failed.done():
                raise self.failed.result()
        return masks[position]
