"""A session of LiteLLM, which is told that the server is OpenAI's."""

from __future__ import annotations

import json
import os
from typing import Any

# LiteLLM would fetch its list of prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

from tests.clients.programs.session import (
    BASE_URL,
    KEY,
    LONG_ANSWER,
    MESSAGES,
    MODEL,
    RESPONSE_FORMAT,
    SAMPLING,
    TOO_LONG,
    TOOL,
    TOOL_ANSWER,
    report,
)


def main() -> None:
    # It would print advice on standard output.
    litellm.suppress_debug_info = True
    address = BASE_URL.removesuffix("/v1")
    report("models", litellm.OpenAIGPTConfig().get_models(api_key=KEY, api_base=address))
    report("chat", ask(**SAMPLING).content)
    stream = complete(stream=True, **SAMPLING)
    report("stream", "".join(chunk.choices[0].delta.content or "" for chunk in stream))
    report("tools", call_tools())
    report("schema", json.loads(ask(response_format=RESPONSE_FORMAT, **SAMPLING).content))
    try:
        complete(messages=TOO_LONG)
    except litellm.ContextWindowExceededError as error:
        report("too-long", [type(error).__name__, error.code])
    stream = complete(stream=True, **LONG_ANSWER)
    started = bool(next(iter(stream)).choices)
    stream.completion_stream.close()
    report("cancel", started)


def complete(**fields: Any) -> Any:
    return litellm.completion(
        **{"model": f"openai/{MODEL}", "messages": MESSAGES, **fields},
        base_url=BASE_URL,
        api_key=KEY,
        max_retries=0,
    )


def ask(**fields: Any) -> Any:
    """Return the message of a reply."""
    return complete(**fields).choices[0].message


def call_tools() -> dict[str, Any]:
    messages = list(MESSAGES)
    calls = []
    for _ in range(2):
        message = ask(
            messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **SAMPLING
        )
        messages.append(message)
        for call in message.tool_calls:
            calls.append([call.function.name, call.function.arguments])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": TOOL_ANSWER})
    end = ask(messages=messages, tools=[TOOL], tool_choice="auto", **SAMPLING)
    return {"calls": calls, "text": end.content}


if __name__ == "__main__":
    main()
