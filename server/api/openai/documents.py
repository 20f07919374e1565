"""Parts that documents of OpenAI's API share: identity, usage, stream chunks and log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from server.api.json_replies import unnamed_event
from server.api.outputs.text_outputs import ScoredText, TextToken
from server.api.submission import Submission
from server.text.decoding.incremental import INCOMPLETE

# OpenAI's API names the version that answered by a fingerprint; ours is this much of the digest.
FINGERPRINT_CHARS = 12
DONE = b"data: [DONE]\n\n"


class Documents:
    """Makes the documents of one reply.

    Args:
        prefix: begins the reply's id, as in OpenAI's API.
        model: as the client named it.
        includes_usage: a stream ends with the number of tokens.
    """

    def __init__(self, submission: Submission, prefix: str, model: str, includes_usage: bool) -> None:
        record = submission.record
        self._submission = submission
        self._includes_usage = includes_usage
        self._id = f"{prefix}-{submission.requests[0].id}"
        self._created = int(time.time())
        self._model = model
        self._fingerprint = None if record is None else record.digest[:FINGERPRINT_CHARS]

    def document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a document without `usage`."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "system_fingerprint": self._fingerprint,
        }

    def chunk(self, kind: str, choice: dict[str, Any]) -> bytes:
        """Return the event of one choice of a stream."""
        usage = {"usage": None} if self._includes_usage else {}
        return unnamed_event({**self.document(kind, [choice]), **usage})

    def last_chunks(self, kind: str, num_new_tokens: int) -> bytes:
        """Return the last events of a stream; the number of tokens is among them if the client asked for it."""
        if not self._includes_usage:
            return DONE
        return unnamed_event({**self.document(kind, []), "usage": self.usage(num_new_tokens)}) + DONE

    def usage(self, num_new_tokens: int) -> dict[str, int]:
        """Return the number of tokens; each prompt counts once, whatever `n` is."""
        num_prompt = self._submission.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new_tokens,
            "total_tokens": num_prompt + num_new_tokens,
        }


def failed_chunks(error: dict[str, Any]) -> bytes:
    """Return the last events of a stream that failed."""
    return unnamed_event(error) + DONE


def completion_logprobs(tokens: Iterable[TextToken], num_chars: int = 0) -> dict[str, list[Any]]:
    """Return log-probabilities as `/v1/completions` has them; those of a prompt's first token are null.

    Args:
        num_chars: characters of the choice's text before that which the tokens' offsets count from.
    """
    shown = list(tokens)
    return {
        "tokens": [token.text if token.scored is None else token.scored.text for token in shown],
        "token_logprobs": [None if token.scored is None else token.scored.logprob for token in shown],
        "top_logprobs": [_top(token) for token in shown],
        "text_offset": [num_chars + token.offset for token in shown],
    }


def chat_logprobs(tokens: Iterable[TextToken]) -> dict[str, Any]:
    """Return log-probabilities as `/v1/chat/completions` has them."""
    content = [
        {**_scored(token.scored), "top_logprobs": list(map(_scored, token.top))}
        for token in tokens
        if token.scored is not None
    ]
    return {"content": content, "refusal": None}


def _top(token: TextToken) -> dict[str, float] | None:
    """Return the likeliest tokens and the token itself; of tokens with the same text, the likeliest."""
    if token.scored is None:
        return None
    found: dict[str, float] = {}
    for scored in (*token.top, token.scored):
        found.setdefault(scored.text, scored.logprob)
    return found


def _scored(scored: ScoredText) -> dict[str, Any]:
    # Bytes of an incomplete character are not known.
    encoded = None if INCOMPLETE in scored.text else list(scored.text.encode())
    return {"token": scored.text, "logprob": scored.logprob, "bytes": encoded}
