"""Rules of generation configs as requests carry them: token ids in tables that are made before the engine has them.

A table is made once, in the process that reads a variant's files or a call's words. The engine reads it where it lies
in the request. Token ids are int32 in this machine's byte order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from msgspec import Struct
from msgspec.structs import astuple


@dataclass(slots=True)
class _Node:
    """Some tokens of a `BiasTable` before the last one: those before them, and what is due behind them."""

    before: dict[int, _Node] = field(default_factory=dict)
    entries: dict[int, float] = field(default_factory=dict)


class BiasTable(Struct, frozen=True, array_like=True):
    """Numbers that are added to the logits of tokens behind some others.

    The others are a tree that is walked from the newest token to older ones, so that the walk ends at the first that no
    sequence has. Node 0 stands for none of them. A node's children have one token more each, and stand together in the
    order of these tokens; a node's entries stand together in the order of their ids.

    Attributes:
        tokens: ``[nodes]`` int32: the oldest token of each node; of node 0, which has none, -1.
        children: ``[nodes + 1]`` int32: the first child of each node, behind the last one of the node before it.
        entries: ``[nodes + 1]`` int32: likewise the first entry.
        ids: ``[entries]`` int32: the token whose logit changes.
        values: ``[entries]`` float32: the number that is added.
        lengths: ``[lengths]`` int32: how many tokens stand before those of the entries, in the order in which numbers
            for the same token are added up, as transformers does it: 0 first, then as the lengths were given.
    """

    tokens: bytes = b""
    children: bytes = b""
    entries: bytes = b""
    ids: bytes = b""
    values: bytes = b""
    lengths: bytes = b""

    @classmethod
    def of(cls, biases: Iterable[tuple[Sequence[int], float]]) -> Self:
        """Make the table of token sequences, each with what is added to its last token behind the others.

        Of equal sequences the last one holds. Takes a few microseconds for each token.
        """
        by_ids = {tuple(ids): bias for ids, bias in biases}
        if not by_ids:
            return cls()
        root = _Node()
        for ids, bias in by_ids.items():
            node = root
            for token in reversed(ids[:-1]):
                node = node.before.setdefault(token, _Node())
            node.entries[ids[-1]] = bias
        nodes, tokens, children, entries = [root], array("i", [-1]), array("i"), array("i")
        last, values = array("i"), array("f")
        # It grows while it is walked.
        for node in nodes:
            children.append(len(nodes))
            entries.append(len(last))
            for token in sorted(node.before):
                tokens.append(token)
                nodes.append(node.before[token])
            last.extend(sorted(node.entries))
            values.extend(node.entries[token] for token in sorted(node.entries))
        children.append(len(nodes))
        entries.append(len(last))
        lengths = array("i", dict.fromkeys([0, *(len(ids) - 1 for ids in by_ids)]))
        return cls(*(each.tobytes() for each in (tokens, children, entries, last, values, lengths)))

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return sum(map(len, astuple(self)))


NO_BIASES = BiasTable()


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """Fields of transformers' `GenerationConfig`, checked and bounded by `server/text/generation_config.py`.

    Lists of token ids are int32, each id once, in their order and none below 0. Some may be beyond a vocabulary.
    """

    sequence_bias: BiasTable = NO_BIASES
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: BiasTable = NO_BIASES
    bad_words: BiasTable = NO_BIASES  # of the call, beside those of the config
    min_length: int = 0  # prompt included
    min_new_tokens: int | None = None  # `min_length` is ignored if it is given
    forced_bos_token_id: int | None = None
    forced_eos_token_id: bytes = b""
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: bytes = b""
    begin_suppress_tokens: bytes = b""
    # Applies to sampling only.
    top_h: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0

    @property
    def is_neutral(self) -> bool:
        """True if no rule changes any logit."""
        return self == NEUTRAL

    @property
    def num_bytes(self) -> int:
        """Size of the lists and tables in bytes."""
        lists = (self.forced_eos_token_id, self.suppress_tokens, self.begin_suppress_tokens)
        tables = (self.sequence_bias, self.bad_words_ids, self.bad_words)
        return sum(map(len, lists)) + sum(table.num_bytes for table in tables)


NEUTRAL = GenerationRules()


def id_list(ids: Iterable[int]) -> bytes:
    """Return token ids as a list of `GenerationRules`; those below 0 name no token."""
    return array("i", sorted({each for each in ids if each >= 0})).tobytes()


def ban_table(sequences: Iterable[Sequence[int]]) -> BiasTable:
    """Return the table that bans the last token of each sequence behind the others."""
    return BiasTable.of((ids, float("-inf")) for ids in sequences)
