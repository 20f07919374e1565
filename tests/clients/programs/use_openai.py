"""A session of OpenAI's client for Python."""

from __future__ import annotations

from typing import Any, Literal

import openai
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
    TOOL,
    TOOL_ANSWER,
    report,
)


class Forecast(BaseModel):
    city: Literal["Sofia", "Varna"]
    rain: bool


class Weather(BaseModel):
    """Tell the weather of a city."""

    city: Literal["Sofia"]


def main() -> None:
    with openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as client:
        report("models", [model.id for model in client.models.list()])
        chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, **SAMPLING)
        report("chat", chat.choices[0].message.content)
        with client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            **SAMPLING,
        ) as stream:
            report(
                "stream", "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
            )
        report("tools", call_tools(client))
        parsed = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Forecast, **SAMPLING
        )
        forecast = parsed.choices[0].message.parsed
        report("schema", None if forecast is None else forecast.model_dump())
        report("beside", call_beside_schema(client))
        try:
            client.chat.completions.create(model=MODEL, messages=TOO_LONG)
        except openai.APIStatusError as error:
            report("too-long", [type(error).__name__, error.code])
        sampling = dict(LONG_ANSWER)
        extra = {"ignore_eos": sampling.pop("ignore_eos")}
        with client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, extra_body=extra, **sampling
        ) as stream:
            report("cancel", bool(next(iter(stream)).choices))


def call_tools(client: openai.OpenAI) -> dict[str, Any]:
    messages = list(MESSAGES)
    calls: list[list[str]] = []
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]
    for choice in choices:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            **SAMPLING,
        )
        messages.append(reply.choices[0].message)
        for call in reply.choices[0].message.tool_calls or ():
            assert call.type == "function"
            calls.append([call.function.name, call.function.arguments])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": TOOL_ANSWER})
    end = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="auto", **SAMPLING
    )
    return {"calls": calls, "text": end.choices[0].message.content}


def call_beside_schema(client: openai.OpenAI) -> dict[str, Any]:
    messages = list(MESSAGES)
    calls: list[list[str]] = []
    answer = None
    for bias in (CALLING, ANSWERING):
        reply = client.chat.completions.parse(
            model=MODEL,
            messages=messages,
            tools=[openai.pydantic_function_tool(Weather, name="weather")],
            response_format=Forecast,
            logit_bias=bias,
            **SAMPLING,
        )
        message = reply.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            calls.append([call.function.name, call.function.arguments])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": TOOL_ANSWER})
        answer = message.parsed
    return {"calls": calls, "answer": None if answer is None else answer.model_dump()}


if __name__ == "__main__":
    main()
