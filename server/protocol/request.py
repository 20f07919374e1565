"""A request for tokens as the engine takes it, its sampling parameters, and its HTTP request.

The middleware sets `current_request`. Tasks and threads that a request starts inherit it, so that their log lines
can name it.
"""

from __future__ import annotations

import hashlib
import re
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from deltastore.registry.records import VersionRecord
from server.errors import ContextTooLong, InvalidRequest
from server.protocol.rules import NEUTRAL, GenerationRules

# https://www.w3.org/TR/trace-context/: version, trace id, id of the caller's span, flags; later versions may add more.
TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?"
)
MAX_TRACEPARENT = 512


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One HTTP request.

    Attributes:
        id: its X-Request-Id.
        traceparent: the header of this name, if it is valid.
    """

    id: str
    traceparent: str | None = None

    @classmethod
    def of(cls, request_id: str, traceparent: str | None) -> Self:
        """Make the context of a request; an invalid `traceparent` is ignored, as its specification asks."""
        return cls(request_id, traceparent if trace_id_of(traceparent) else None)


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the trace's id, 32 hex digits, or None if the header is missing or invalid."""
    if traceparent is None or len(traceparent) > MAX_TRACEPARENT:
        return None
    found = TRACEPARENT.fullmatch(traceparent)
    if found is None or (traceparent.startswith("00-") and len(traceparent) != 55):
        return None
    return found[1]


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)


# Tokens of one request whose logits a client may change.
MAX_BIASED = 1024
# Above it, logits that float32 holds differ by nothing.
MAX_TEMPERATURE = 1e30


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, with the meaning that transformers' `GenerationConfig` gives them.

    Raises:
        InvalidRequest: a value is out of range; `param` names the field.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0  # below 1e-4 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None  # sequence `index` uses seed + index
    logprobs: int | None = None  # likeliest tokens to report per token; 0 reports the sampled one alone
    prompt_logprobs: int | None = None  # the same for the prompt's tokens but the first
    n: int = 1  # sequences
    # Of OpenAI's and vLLM's calls: what is taken from the logits of tokens that were generated, for each time and once.
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens, and what is added to their logits
    min_tokens: int = 0  # new ones before `stop_token_ids`
    include_stop_str_in_output: bool = False
    stops_begin_in_prompt: bool = False  # as `generate()` finds those of a generation config
    skip_special_tokens: bool = True
    rules: GenerationRules = NEUTRAL  # of the generation config
    is_constrained: bool = False  # each token is sampled with a mask that the client sends

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        _require(0 <= self.temperature <= MAX_TEMPERATURE, "temperature", f"from 0 to {MAX_TEMPERATURE:g}")
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", "0 or more")
        _require(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        _require(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "from 0.01 to 100")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _require(value is None or 0 <= value <= 20, name, "from 0 to 20")
        _require(1 <= self.n <= 128, "n", "from 1 to 128")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "from -2 to 2")
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", "from -2 to 2")
        _require(0 <= self.min_tokens <= self.max_new_tokens, "min_tokens", "from 0 to the most new tokens")
        _require(len(self.logit_bias) <= MAX_BIASED, "logit_bias", f"of at most {MAX_BIASED} tokens")
        _require(all(self.stop), "stop", "strings that are not empty")


def _require(holds: bool, param: str, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} must be {rule}", param)


# Token ids as int32, from the body of a call to the engine; do not change one that is shared. Beside a tuple, an array
# takes 4 bytes an id instead of 36 and is copied to a message as it is. Beside numpy's, its items are plain integers,
# its equality is one truth value, and short slices cost less.
if TYPE_CHECKING:
    TokenIds = array[int]
else:
    # Python 3.11 has no generic `array`, and msgspec reads annotations.
    TokenIds = array


def token_ids_of(ids: Iterable[int]) -> TokenIds:
    """Return token ids as int32."""
    return array("i", ids)


# Of SHA-256.
HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class PageHashes:
    """The chain of hashes of a prompt's full pages: of each, its tokens and all before them.

    It says nothing of the delta and the tenant, which the prefix cache looks at first.
    """

    page_tokens: int
    chain: bytes  # `HASH_BYTES` for each page

    @classmethod
    def of(cls, token_ids: TokenIds, page_tokens: int) -> Self:
        """Hash the full pages of a prompt."""
        raw, page_bytes = memoryview(token_ids).cast("B"), page_tokens * token_ids.itemsize
        chain, last = bytearray(), b""
        for end in range(page_bytes, len(raw) + 1, page_bytes):
            last = page_hash(last, raw[end - page_bytes : end])
            chain += last
        return cls(page_tokens, bytes(chain))


def page_hash(before: bytes, tokens: bytes | memoryview) -> bytes:
    """Return the hash of a page's tokens, int32, behind the page with the hash `before`; empty for the first."""
    return hashlib.sha256(before + tokens).digest()


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Its version is resolved before and stays the same until its last token."""

    id: str
    tenant: str
    name: str | None  # the variant's name as the client wrote it; None is the base
    record: VersionRecord | None  # without its fidelity report, which may be long; None is the base
    prompt_ids: TokenIds
    num_embeddings: int  # rows of the variant's embedding; token ids are below it
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    traceparent: str | None = None  # of the HTTP request, as W3C's Trace Context has it
    page_hashes: PageHashes | None = None  # without them, the engine hashes the prompt

    @property
    def version(self) -> str | None:
        """The label of the version, whose delta has a slot; None is the base."""
        return None if self.record is None else self.record.label

    @property
    def digest(self) -> str | None:
        """The SHA-256 of the delta's artifact; None is the base."""
        return None if self.record is None else self.record.digest

    @property
    def log_fields(self) -> dict[str, str | None]:
        """Fields of log lines about the request: its X-Request-Id, which its own id begins with, and its trace."""
        return {"request_id": self.id.rpartition("-")[0], "trace_id": trace_id_of(self.traceparent)}

    def check(self, max_model_len: int) -> None:
        """Refuse a request that no step could serve.

        Args:
            max_model_len: most tokens of prompt and output together.

        Raises:
            InvalidRequest: names the field at fault.
        """
        if not self.prompt_ids:
            raise InvalidRequest("the prompt is empty: it has no tokens", "prompt")
        check_token_ids(self.prompt_ids, self.num_embeddings, "prompt")
        for token_id, _ in self.sampling_params.logit_bias:
            if not 0 <= token_id < self.num_embeddings:
                raise InvalidRequest(
                    f"logit_bias: token ids must be from 0 to {self.num_embeddings - 1}, got {token_id}",
                    "logit_bias",
                )
        num_prompt, num_new = len(self.prompt_ids), self.sampling_params.max_new_tokens
        if num_prompt + num_new > max_model_len:
            raise ContextTooLong(
                f"{num_prompt} prompt tokens and {num_new} new ones are {num_prompt + num_new}, more than the "
                f"{max_model_len} that fit: shorten the prompt or lower max_new_tokens",
                "max_new_tokens" if num_prompt < max_model_len else "prompt",
            )
        hashes = self.page_hashes
        if hashes is not None and len(hashes.chain) != num_prompt // hashes.page_tokens * HASH_BYTES:
            raise InvalidRequest(
                f"{len(hashes.chain)} bytes are no hashes of the pages of {num_prompt} tokens: send the request again",
                "prompt",
            )


def max_model_len_of(record: VersionRecord | None, max_model_len: int, longest: int | None) -> int:
    """Return the most tokens of prompt and output together for a version.

    Args:
        record: the version; None is the base.
        max_model_len: that of the base, and of variants with its context.
        longest: the most that the engine holds; None: as of the base.
    """
    own = None if record is None else record.max_positions
    return max_model_len if own is None else min(own, longest or max_model_len)


def check_token_ids(ids: TokenIds, num_embeddings: int, param: str) -> None:
    """Raise InvalidRequest, with the request's field, unless all token ids are below `num_embeddings`."""
    # The supervisor imports this module and has no other use for numpy.
    import numpy as np

    # One that is negative is a large one here.
    found = np.frombuffer(ids, np.uint32)
    if len(found) and found.max() >= num_embeddings:
        raise InvalidRequest(f"token ids must be from 0 to {num_embeddings - 1}", param)


# OpenTelemetry's values of `gen_ai.operation.name`.
Operation = Literal["chat", "text_completion"]


@dataclass(slots=True)
class TracedRequest:
    """A submitted request.

    Attributes:
        num_tokens: generated tokens by sequence.
        submitted_at: in seconds since 1970.
    """

    request: Request
    operation: Operation
    num_tokens: Counter[int] = field(default_factory=Counter)
    submitted_at: float = field(default_factory=time.time)
