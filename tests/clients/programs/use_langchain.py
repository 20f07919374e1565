"""A session of LangChain's ChatOpenAI."""

from __future__ import annotations

import json
from typing import Any, Literal

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.clients.programs.session import (
    ANSWERING,
    BASE_URL,
    CALLING,
    KEY,
    LONG_ANSWER,
    MESSAGES,
    MODEL,
    SAMPLING,
    TOO_LONG,
    TOOL_ANSWER,
    report,
)


class Forecast(BaseModel):
    city: Literal["Sofia", "Varna"]
    rain: bool


@tool
def weather(city: Literal["Sofia"]) -> str:
    """Tell the weather of a city."""
    return TOOL_ANSWER


def main() -> None:
    chat = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, max_retries=0, **SAMPLING)
    report("models", [model.id for model in chat.root_client.models.list()])
    report("chat", chat.invoke(MESSAGES).content)
    report("stream", "".join(chunk.content for chunk in chat.stream(MESSAGES)))
    report("tools", call_tools(chat))
    report("schema", chat.with_structured_output(Forecast).invoke(MESSAGES).model_dump())
    report("beside", call_beside_schema(chat))
    try:
        chat.invoke(TOO_LONG)
    except ContextOverflowError as error:
        report("too-long", ["ContextOverflowError", error.code])
    sampling = dict(LONG_ANSWER)
    extra = {"ignore_eos": sampling.pop("ignore_eos")}
    stream = chat.stream(MESSAGES, extra_body=extra, **sampling)
    next(stream)
    stream.close()
    report("cancel", True)


def call_tools(chat: ChatOpenAI) -> dict[str, Any]:
    messages: list[BaseMessage] = [HumanMessage(MESSAGES[0]["content"])]
    calls = []
    caller = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    for _ in range(2):
        message = caller.invoke(messages)
        messages.append(message)
        for call in message.tool_calls:
            calls.append([call["name"], json.dumps(call["args"])])
            messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
    end = chat.bind_tools([weather], tool_choice="auto").invoke(messages)
    return {"calls": calls, "text": end.content}


def call_beside_schema(chat: ChatOpenAI) -> dict[str, Any]:
    messages: list[BaseMessage] = [HumanMessage(MESSAGES[0]["content"])]
    calls = []
    for bias in (CALLING, ANSWERING):
        both = chat.bind_tools([weather], strict=True, response_format=Forecast, logit_bias=bias)
        message = both.invoke(messages)
        messages.append(message)
        for call in message.tool_calls:
            calls.append([call["name"], json.dumps(call["args"])])
            messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
    return {"calls": calls, "answer": Forecast.model_validate_json(message.text).model_dump()}


if __name__ == "__main__":
    main()
