"""Compiles grammars with llguidance and advances their matchers. Runs in worker processes only.

Compiled grammars, matchers and the vocabularies that llguidance reads stay in the worker's memory within bounds. All of
it can be made again from what a call brings: a worker may die at any time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from msgspec import Struct

from deltastore.errors import PeraxisError
from server.errors import EngineFailed, InvalidRequest
from server.fairness import FairCache
from server.grammar.grammar import Grammar
from server.text.failures import failures_as
from server.text.tokenizer import LoadedTokenizer
from server.text.worker_tasks import NotLoaded
from server.workers.pool import WORK_LIMITS
from server.workers.worker_main import allow

# Modules that a worker with matchers imports before its first task.
WORKER_MODULES = ("server.text.without_torch", "server.text.worker_tasks", "server.grammar.matching")
MAX_VOCABULARIES = 8
MAX_COMPILED = 64
MAX_MATCHERS = 1024
# Masks that one call returns: tokens that the grammar forces are known ahead.
MAX_AHEAD = 16
# Time and memory of a grammar, in llguidance's units; a step ends with an error past them. A millisecond is 50,000
# units of initial and 14,000 of step fuel, or 20,000 items. With 128,000 tokens, schemas of 200 properties, of 1000
# values, of 30 levels and of 100 formats pass with a fifth of these. A state has 1 to 2 kB, and each character of a
# string with `maxLength` may take one.
PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=50_000,
    max_grammar_size=250_000,
    verbose_errors=False,
)
# Processor time to compile a grammar and to compute its first masks; the vocabulary is read before. With 128,000 tokens
# schemas of 200 properties take 0.02 s, and of 1000 values 0.01 s. Lanes, which tenants share, compile it again.
MAX_TRIAL_CPU_S = 0.25
# Processor time after which a call of a lane advances no further sequence: other tenants' turns come between.
SLICE_CPU_S = 0.02
# Processor time of one step. llguidance's limits end most steps much earlier.
MAX_STEP_CPU_S = 0.1
TOO_SLOW = "the schema is too complex for this output: a step took too much time: simplify it"
# First and last tokens of the first mask that a trial takes a step with.
NUM_TRIED = 2
MAX_REASON_CHARS = 300
# In llguidance's error after a token that a mask excludes. All others are limits; it names no kinds.
MISMATCH = "doesn't satisfy the grammar"
# The beginning and the end of llguidance's errors.
PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
SOURCE_LINES = re.compile(r"\n *\d+ \| .*", re.DOTALL)

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids that a variant's output can have.

    Args:
        key: the name of its tokenizer's content.
        num_embeddings: rows of its embedding; ids are below it.
        eos_token_ids: tokens that end a sequence, and are allowed where the grammar may end.
    """

    key: str
    num_embeddings: int
    eos_token_ids: tuple[int, ...]


class NewSampled(Struct, frozen=True):
    """Tokens of one sequence that its matcher has not consumed.

    Args:
        matcher: names the sequence.
        num_consumed: tokens of the sequence before `token_ids`; with 0 a lost matcher is made again.
        token_ids: without end tokens.
    """

    matcher: str
    grammar: Grammar
    num_consumed: int
    token_ids: tuple[int, ...]


class NextMasks(Struct, frozen=True):
    """Masks of one sequence at consecutive positions; all but the last allow one token, which is in `forced`.

    A mask has one bit per row of the embedding, little-endian, in whole words of four bytes. One without a bit ends the
    sequence.
    """

    masks: tuple[bytes, ...]
    forced: tuple[int, ...]


@dataclass(slots=True)
class _Matcher:
    """A matcher, and the number of tokens of its sequence that it has consumed, forced ones included."""

    matcher: LLMatcher
    excluded: tuple[int, ...]  # end tokens of llguidance that are none of the vocabulary
    num_consumed: int = 0


_vocabularies: FairCache[Vocabulary, LLTokenizer] = FairCache(MAX_VOCABULARIES)
_compiled: FairCache[tuple[Vocabulary, str], LLMatcher] = FairCache(MAX_COMPILED)
_matchers: FairCache[str, _Matcher] = FairCache(MAX_MATCHERS)


def opening_masks(tokenizer: LoadedTokenizer, vocabulary: Vocabulary, grammar: Grammar) -> NextMasks:
    """Try a grammar: compile it, take steps that a lane would take first, and return the masks at its beginning.

    Raises:
        NotLoaded: this worker has not read the vocabulary.
        InvalidRequest: llguidance refuses the grammar, it is too complex, or the trial took over `MAX_TRIAL_CPU_S`.
    """
    ll_tokenizer, began = _vocabulary(vocabulary), time.process_time()
    found = _started(_compile(ll_tokenizer, grammar), ll_tokenizer, vocabulary)
    opening = _advance(found, vocabulary, ())
    _try_steps(found, vocabulary, opening.masks[-1])
    if time.process_time() - began > MAX_TRIAL_CPU_S:
        raise InvalidRequest(
            f"{grammar.param}: the schema takes too much time to compile: simplify it", grammar.param
        )
    return opening


def _try_steps(found: _Matcher, vocabulary: Vocabulary, mask: bytes) -> None:
    """Take a step with each of some tokens that a mask allows; InvalidRequest says that one is too complex."""
    ids = range(8 * len(mask))
    first, last = (islice(_allowed(mask, some, vocabulary), NUM_TRIED) for some in (ids, reversed(ids)))
    for token in {*first, *last}:
        step = _Matcher(found.matcher.deep_copy(), found.excluded, found.num_consumed)
        _advance(step, vocabulary, (token,))


def _allowed(mask: bytes, ids: Iterable[int], vocabulary: Vocabulary) -> Iterator[int]:
    """Return those of `ids` that a mask allows and that do not end the sequence."""
    ends = vocabulary.eos_token_ids
    return (token for token in ids if mask[token // 8] >> token % 8 & 1 and token not in ends)


def advance_all(
    vocabulary: Vocabulary, owner: str, all_new: list[NewSampled], ended: list[str]
) -> list[NextMasks | PeraxisError | None]:
    """Have matchers consume new tokens and return the masks behind them, or the error of a sequence that failed.

    Compiles nothing, and advances no further sequence once `SLICE_CPU_S` of processor time is used.

    Args:
        owner: the tenant of all these sequences.
        ended: matchers that no sequence needs any more.

    Returns:
        one result for each of the first sequences, at least for one; None where `make_matcher` must be called, because
        this worker has neither the matcher nor, for a sequence at its beginning, the compiled grammar.

    Raises:
        NotLoaded: this worker has not read the vocabulary.
    """
    for name in ended:
        _matchers.drop(name)
    ll_tokenizer, began = _vocabulary(vocabulary), time.process_time()
    results: list[NextMasks | PeraxisError | None] = []
    for new in all_new:
        if results and time.process_time() - began > SLICE_CPU_S:
            break
        results.append(_result(ll_tokenizer, vocabulary, owner, new))
    return results


def make_matcher(vocabulary: Vocabulary, owner: str, new: NewSampled) -> NextMasks:
    """Compile the grammar of a sequence if need be, have a new matcher consume all its tokens, and return the masks.

    Args:
        owner: the tenant of the sequence.
        new: the sequence from its beginning.

    Raises:
        NotLoaded: this worker has not read the vocabulary.
        InvalidRequest: llguidance refuses the grammar or reached a limit.
        EngineFailed: a token does not match the grammar.
    """
    ll_tokenizer, key = _vocabulary(vocabulary), (vocabulary, new.grammar.key)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compile(ll_tokenizer, new.grammar)
        _compiled.put(key, compiled, owner)
    found = _started(compiled.deep_copy(), ll_tokenizer, vocabulary)
    masks = _advance(found, vocabulary, new.token_ids)
    _matchers.put(new.matcher, found, owner)
    return masks


def read_vocabulary(tokenizer: LoadedTokenizer, vocabulary: Vocabulary, owner: str) -> None:
    """Have llguidance read a vocabulary, if this worker has not yet.

    Raises:
        InvalidRequest: llguidance does not support the tokenizer.
    """
    if _vocabularies.get(vocabulary) is None:
        _vocabularies.put(vocabulary, _read(tokenizer, vocabulary), owner)


def reading_vocabulary(
    tokenizer: LoadedTokenizer, vocabulary: Vocabulary, function: Callable[..., V], *args: object
) -> V:
    """Call ``function(tokenizer, vocabulary, *args)`` after reading the vocabulary, if this worker has not yet.

    Raises:
        InvalidRequest: llguidance does not support the tokenizer.
        PeraxisError: as `function` raises it.
    """
    if _vocabularies.get(vocabulary) is None:
        # Here no sequence waits for what another tenant's vocabulary replaces: the least recently used one goes.
        read_vocabulary(tokenizer, vocabulary, "")
        # The call had time and memory for the vocabulary; what is left is only for the grammar.
        allow(WORK_LIMITS)
    return function(tokenizer, vocabulary, *args)


def _read(tokenizer: LoadedTokenizer, vocabulary: Vocabulary) -> LLTokenizer:
    num_tokens = max(vocabulary.num_embeddings, len(tokenizer.fast))
    with failures_as(
        lambda reason: InvalidRequest(
            f"the output cannot be constrained, because llguidance does not support this tokenizer: {reason}"
        )
    ):
        return from_tokenizer(tokenizer.fast, num_tokens, _end_tokens(tokenizer, vocabulary))


def _end_tokens(tokenizer: LoadedTokenizer, vocabulary: Vocabulary) -> list[int]:
    """Return the end tokens for llguidance, which needs one; masks allow only those of the vocabulary."""
    own = [token for token in vocabulary.eos_token_ids if 0 <= token < len(tokenizer.fast)]
    return own or tokenizer.fast.all_special_ids[:1] or [len(tokenizer.fast) - 1]


def _vocabulary(vocabulary: Vocabulary) -> LLTokenizer:
    found = _vocabularies.get(vocabulary)
    if found is None:
        raise NotLoaded("the vocabulary was not read in this worker")
    return found


def _compile(ll_tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    with failures_as(lambda reason: _refused(grammar, reason)):
        compiled = LLMatcher(ll_tokenizer, grammar.text, log_level=0, limits=PARSER_LIMITS)
    if compiled.is_error():
        raise _refused(grammar, compiled.get_error())
    return compiled


def _started(matcher: LLMatcher, ll_tokenizer: LLTokenizer, vocabulary: Vocabulary) -> _Matcher:
    own = vocabulary.eos_token_ids
    rows = range(vocabulary.num_embeddings)
    return _Matcher(
        matcher, tuple(token for token in ll_tokenizer.eos_tokens if token not in own and token in rows)
    )


def _result(
    ll_tokenizer: LLTokenizer, vocabulary: Vocabulary, owner: str, new: NewSampled
) -> NextMasks | PeraxisError | None:
    found, began = _matchers.get(new.matcher), time.process_time()
    try:
        if found is None and not new.num_consumed:
            found = _begun(ll_tokenizer, vocabulary, owner, new)
        if found is None or found.num_consumed < new.num_consumed:
            return None
        # It may have consumed tokens ahead that were forced.
        masks = _advance(found, vocabulary, new.token_ids[found.num_consumed - new.num_consumed :])
        if time.process_time() - began > MAX_STEP_CPU_S:
            raise InvalidRequest(TOO_SLOW, new.grammar.param)
    except PeraxisError as error:
        _matchers.drop(new.matcher)
        return error
    return masks


def _begun(ll_tokenizer: LLTokenizer, vocabulary: Vocabulary, owner: str, new: NewSampled) -> _Matcher | None:
    """Return a new matcher of a grammar that is compiled; None if it is not."""
    compiled = _compiled.get((vocabulary, new.grammar.key))
    if compiled is None:
        return None
    found = _started(compiled.deep_copy(), ll_tokenizer, vocabulary)
    _matchers.put(new.matcher, found, owner)
    return found


def _advance(found: _Matcher, vocabulary: Vocabulary, token_ids: tuple[int, ...]) -> NextMasks:
    matcher, forced, masks = found.matcher, list[int](), list[bytes]()
    num_bytes = 4 * -(-vocabulary.num_embeddings // 32)
    if token_ids and not matcher.consume_tokens(list(token_ids)):
        if MISMATCH not in matcher.get_error():
            raise _too_complex(matcher)
        raise EngineFailed(f"a token does not match the grammar: {_shown(matcher.get_error())}")
    found.num_consumed += len(token_ids)
    while not matcher.is_stopped() and len(masks) < MAX_AHEAD - 1:
        ahead = matcher.compute_ff_tokens()[: MAX_AHEAD - 1 - len(masks)]
        if not ahead or max(ahead) >= vocabulary.num_embeddings or not matcher.consume_tokens(ahead):
            break
        found.num_consumed += len(ahead)
        forced += ahead
        masks += [_only(token, num_bytes) for token in ahead]
    masks.append(_mask(found, vocabulary, num_bytes))
    return NextMasks(tuple(masks), tuple(forced))


def _mask(found: _Matcher, vocabulary: Vocabulary, num_bytes: int) -> bytes:
    matcher = found.matcher
    if matcher.is_stopped() and not matcher.is_error():
        return bytes(num_bytes)
    bits = bytearray(matcher.compute_bitmask()[:num_bytes].ljust(num_bytes, b"\0"))
    if matcher.is_error():
        raise _too_complex(matcher)
    # The tokenizer may have tokens behind the last row.
    if num_past := -vocabulary.num_embeddings % 32:
        last = int.from_bytes(bits[-4:], "little") & ((1 << (32 - num_past)) - 1)
        bits[-4:] = last.to_bytes(4, "little")
    for token in found.excluded:
        bits[token // 8] &= ~(1 << token % 8)
    return bytes(bits)


def _only(token_id: int, num_bytes: int) -> bytes:
    bits = bytearray(num_bytes)
    bits[token_id // 8] = 1 << token_id % 8
    return bytes(bits)


def _too_complex(matcher: LLMatcher) -> InvalidRequest:
    return InvalidRequest(
        f"the schema is too complex for this output: {_shown(matcher.get_error())}: simplify it"
    )


def _refused(grammar: Grammar, reason: str) -> InvalidRequest:
    if "coerce_one_of" in reason:
        reason = "the branches of a oneOf may hold at once: use anyOf"
    return InvalidRequest(f"{grammar.param}: the schema cannot be used: {_shown(reason)}", grammar.param)


def _shown(reason: str) -> str:
    """Return llguidance's reason on one line, without the place in our grammar, which the client does not know."""
    bare = SOURCE_LINES.sub("", PLACE.sub("", reason))
    return " ".join(bare.split())[:MAX_REASON_CHARS]
