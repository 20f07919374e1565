"""Renders chat templates with transformers' Jinja sandbox. Runs in worker processes only.

The sandbox keeps a template from reading the host; it bounds neither its time nor its memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers.utils import chat_template_utils

from server.errors import InvalidRequest
from server.text.conversation import Conversation
from server.text.failures import failures_as

MAX_CHARACTERS = 8 << 20
NO_TEMPLATE = (
    "there is no chat template here: publish the variant with a tokenizer that has one, "
    "or send a prompt to /v1/completions"
)
NO_BASE_TEMPLATE = (
    "the base has no chat template: ask a variant that has one, or send a prompt to /v1/completions; the operator can "
    "add a template to the base's tokenizer"
)


def render(template: str, conversation: Conversation, variables: Mapping[str, Any]) -> str:
    """Render a conversation with `template`.

    Args:
        variables: further variables of the template, such as special tokens.

    Raises:
        InvalidRequest: the template refuses the messages, fails, or makes no Unicode or too much text.
    """
    with failures_as(
        lambda reason: InvalidRequest(f"the chat template refuses these messages: {reason}", "messages")
    ):
        # Its annotation says that it returns a string.
        render_all: Any = chat_template_utils.render_jinja_template
        rendered, _ = render_all(
            [conversation.messages],
            tools=json.loads(conversation.tools) if conversation.tools else None,
            chat_template=template,
            add_generation_prompt=conversation.add_generation_prompt,
            **variables,
        )
    text = str(rendered[0])
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"the chat template makes {len(text)} characters, more than {MAX_CHARACTERS}", "messages"
        )
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequest("the chat template makes text that is no Unicode", "messages")
    return text
