"""A conversation as chat templates take it. A value that worker processes receive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a chat template.

    Args:
        messages: each has at least ``role`` and ``content``.
        add_generation_prompt: the template opens the assistant's turn behind them.
        add_special_tokens: the tokenizer adds its own, too; most templates write them.
        tools: functions that the template tells the model of, as a JSON array in OpenAI's form; empty for none.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    tools: bytes = b""
