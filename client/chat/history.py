"""A conversation with one variant: its messages, and what every request of it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The parameters of every request; None leaves one to the variant."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None

    def fields(self) -> dict[str, Any]:
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(slots=True)
class ChatHistory:
    """The messages that were exchanged with one variant."""

    model: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def asking(self, prompt: str, options: ChatOptions) -> dict[str, Any]:
        """Return the body of the request for an answer to `prompt`."""
        messages = [*self.messages, {"role": "user", "content": prompt}]
        return {"model": self.model, "messages": messages, **options.fields()}

    def keep(self, prompt: str, answer: str) -> None:
        """Add a prompt and its answer."""
        self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
