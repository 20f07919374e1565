"""The tokens of a call, as the limits of its tenant count them. Knows no route, no text and no ledger."""

from __future__ import annotations

from collections.abc import Sequence

from server.protocol.limits import Tokens
from server.protocol.request import Request


def fewest_tokens(num_prompt: int, num_sequences: int, max_new_tokens: int | None) -> Tokens:
    """Return the fewest tokens that a call can need, before its prompts are tokenized.

    Args:
        num_prompt: of prompts that are token ids, and one of each other prompt.
        num_sequences: of all prompts together.
        max_new_tokens: of each sequence, as the client set it; None if it did not.
    """
    if max_new_tokens is None:
        return Tokens(num_prompt, num_sequences, may_overdraw=True)
    return Tokens(num_prompt, num_sequences * max_new_tokens)


def all_tokens(requests: Sequence[Request], *, has_length: bool) -> Tokens:
    """Return the tokens of all requests of a call.

    Args:
        has_length: the client set the most new tokens of a sequence.
    """
    num_prompt = sum(len(request.prompt_ids) for request in requests)
    num_new = sum(each.sampling_params.n * each.sampling_params.max_new_tokens for each in requests)
    return Tokens(num_prompt, num_new, may_overdraw=not has_length)
