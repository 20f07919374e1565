"""Measure streams whose output is constrained to JSON beside the same streams without a constraint.

Free streams, constrained streams, and half of each, of one base, go through `POST /v1/completions` in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.http.clients import StreamedRequest
from bench.http.subjects import (
    BESIDE,
    CONSTRAINED,
    FREE,
    PROMPT_TOKENS,
    Sample,
    Subject,
    measure,
    server_for,
    through_http,
)
from bench.serving import prompts, write_base
from bench.synthetic import LlamaShapes
from deltastore.registry import Registry

# A list that is never complete, so that each stream has all its tokens.
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}
PRINTABLE = [chr(code) for code in range(0x21, 0x7F)]


def measure_constrained(
    directory: Path, shapes: LlamaShapes, num_streams: int, num_new: int, repeats: int
) -> list[Subject]:
    """Measure the three subjects in turns, on one server."""
    base, registry = write_json_base(directory / "base", shapes), Registry(directory / "registry")
    texts = ["".join(_printable(prompt)) for prompt in prompts(num_streams, PROMPT_TOKENS, len(PRINTABLE))]
    half = num_streams // 2
    free = _requests(texts, num_new, {})
    constrained = _requests(texts, num_new, SCHEMA)
    with server_for(base, registry, num_streams, 0) as server:
        answers: dict[str, Callable[[], Sample]] = {
            FREE: partial(through_http, server, free),
            CONSTRAINED: partial(through_http, server, constrained),
            BESIDE: partial(through_http, server, [*free[:half], *constrained[half:]], half),
        }
        subjects = [Subject(name, num_streams, 0, answer) for name, answer in answers.items()]
        measure(subjects, repeats)
    return subjects


def write_json_base(directory: Path, shapes: LlamaShapes) -> Path:
    """Write a base with random weights whose tokens are printable ASCII: single characters, then longer words."""
    write_base(directory, shapes)
    # The byte-level alphabet writes a space as U+0120.
    words = [*PRINTABLE, "\u0120"]
    words += [f"{first}{second}" for first in PRINTABLE[32:58] for second in words][
        : shapes.vocabulary - len(words)
    ]
    words += [f"w{number}x" for number in range(shapes.vocabulary - len(words))]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    return directory


def _printable(token_ids: Sequence[int]) -> list[str]:
    return [PRINTABLE[token_id] for token_id in token_ids]


def _requests(texts: Sequence[str], num_new: int, schema: dict[str, Any]) -> list[StreamedRequest]:
    return [StreamedRequest(text, num_new, schema=schema) for text in texts]
