"""Text of one variant or of the base: prompts to token ids and token ids to text. Event loop only.

The base's tokenizer runs in this process. A variant's own tokenizer, and every chat template, run in worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

from deltastore.registry.records import VersionRecord
from server.errors import InvalidRequest
from server.fair_limiter import Share
from server.text.chat_template import NO_BASE_TEMPLATE, NO_TEMPLATE, render
from server.text.conversation import Conversation
from server.text.decoding.incremental import NewText, NewTokens
from server.text.generation_config import Generation
from server.text.loaded_tokenizer import LoadedTokenizer
from server.text.local_tokenizer import LocalTokenizer
from server.text.staging import Staging
from server.text.variant_work import VariantWork
from server.text.worker_tasks import NotLoaded, with_tokenizer

CHARS_PER_TOKEN = 4
# Names the content of the base's tokenizer.
BASE_KEY = "base"

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Facts of a variant's text that do not depend on the tenant.

    Args:
        num_embeddings: rows of the embedding; token ids are below it.
        key: the name of its own tokenizer's content; None if the base's tokenizer serves.
        template: the chat template, if the base's tokenizer serves.
    """

    num_embeddings: int
    generation: Generation
    key: str | None
    template: str | None


class VariantText:
    """Encodes and decodes with a variant's tokenizer, chat template and generation defaults.

    All methods raise InvalidRequest if the variant's files need too much time or memory, QueueFull if too much work of
    the tenant on this variant waits, and VariantNotFound or VariantQuarantined if its files are needed and gone.
    """

    def __init__(
        self,
        facts: TextFacts,
        base: LocalTokenizer,
        work: VariantWork,
        staging: Staging,
        record: VersionRecord | None,
    ) -> None:
        self.num_embeddings = facts.num_embeddings
        self.generation = facts.generation
        self._facts = facts
        self._base = base
        self._work = work
        self._staging = staging
        self._record = record

    async def encode(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            add_special_tokens: those that the tokenizer adds to a text are among them.

        Raises:
            InvalidRequest: the prompt has more than `max_tokens` tokens. A much longer one is not tokenized.
        """
        return await self._run(
            len(text), LoadedTokenizer.encode, text, max_tokens, add_special_tokens, "prompt"
        )

    async def render_chat(self, conversation: Conversation, max_tokens: int) -> list[int]:
        """Return the token ids of a conversation rendered by the chat template.

        Raises:
            InvalidRequest: there is no chat template, it refuses the messages, or they have too many tokens.
        """
        if self._facts.key is not None:
            return await self._in_worker(LoadedTokenizer.render_chat, conversation, max_tokens)
        if self._facts.template is None:
            raise InvalidRequest(NO_BASE_TEMPLATE if self._record is None else NO_TEMPLATE, "messages")
        variables = self._base.loaded.template_variables
        text = await self._work.run(render, self._facts.template, conversation, variables)
        special = conversation.add_special_tokens
        return await self._run(len(text), LoadedTokenizer.encode, text, max_tokens, special, "messages")

    async def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return await self._run(_num_chars(ids), LoadedTokenizer.decode, ids, skip_special_tokens)

    async def decode_each(self, ids: list[int]) -> list[str]:
        """Return the text of each token alone, as log-probabilities show it."""
        return await self._run(_num_chars(ids), LoadedTokenizer.decode_each, ids)

    async def decode_streams(self, new: list[NewTokens]) -> list[NewText]:
        """Decode the new tokens of many sequences in one call; the results are in the order of `new`."""
        num_chars = sum(_num_chars(tokens.ids) for tokens in new)
        return await self._run(num_chars, LoadedTokenizer.decode_streams, new)

    async def token_strings(self, ids: list[int]) -> list[str]:
        """Return each token as the vocabulary has it."""
        return await self._run(_num_chars(ids), LoadedTokenizer.token_strings, ids)

    async def _run(self, num_chars: int, function: Callable[[LoadedTokenizer, *Ts], T], *args: *Ts) -> T:
        """Call a function of the variant's tokenizer, which may be the base's."""
        if self._facts.key is None:
            return await self._base.run(self._work.share, num_chars, function, *args)
        return await self._in_worker(function, *args)

    @property
    def share(self) -> Share:
        """The tenant and the digest, whose work has a queue of its own."""
        return self._work.share

    @property
    def label(self) -> str:
        """The variant's name in error messages."""
        return self._work.label

    @property
    def tokenizer_key(self) -> str:
        """The name of the content of the tokenizer that serves this variant."""
        return self._facts.key or BASE_KEY

    async def run_in(
        self,
        work: VariantWork | None,
        warm: Callable[[LoadedTokenizer], T],
        cold: Callable[[LoadedTokenizer], T],
    ) -> T:
        """Call ``warm(tokenizer)`` in a worker, or ``cold(tokenizer)`` with more time if `warm` raises NotLoaded.

        The base's tokenizer, too, is loaded in the worker. Raises as the functions and `VariantWork` do.

        Args:
            work: the share of a pool; None is that of the variant's other text.
        """
        work = work or self._work
        key, label = self.tokenizer_key, self._work.label
        try:
            return await work.run(with_tokenizer, key, None, label, warm, ())
        except NotLoaded:
            if self._facts.key is None or self._record is None:
                return await work.load(with_tokenizer, key, self._staging.base_dir, label, cold, ())
            async with self._staging.staged(self._record, self._work.share) as staged:
                return await work.load(with_tokenizer, key, staged.path, label, cold, ())

    async def _in_worker(self, function: Callable[[LoadedTokenizer, *Ts], T], *args: *Ts) -> T:
        """Call a function of the variant's own tokenizer; send its files to a worker that lacks them."""
        key, record = self._facts.key, self._record
        assert key is not None
        assert record is not None
        try:
            return await self._work.run(with_tokenizer, key, None, self._work.label, function, args)
        except NotLoaded:
            async with self._staging.staged(record, self._work.share) as staged:
                return await self._work.load(
                    with_tokenizer, key, staged.path, self._work.label, function, args
                )


def _num_chars(ids: Sized) -> int:
    """Return about how many characters tokens have."""
    return CHARS_PER_TOKEN * len(ids)
