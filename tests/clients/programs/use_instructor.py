"""A session of instructor: objects by forced calls and by schemas, and plain answers where no model is given."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel, ConfigDict

from tests.clients.programs.session import (
    BASE_URL,
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
    model_config = ConfigDict(extra="forbid")

    city: Literal["Sofia", "Varna"]
    rain: bool


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Sofia"]


def main() -> None:
    with openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as plain:
        by_call = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
        by_schema = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
        report("models", [model.id for model in plain.models.list()])
        chat = ask(by_call, None, **SAMPLING)
        report("chat", chat.choices[0].message.content)
        stream = ask(by_call, None, stream=True, **SAMPLING)
        report("stream", "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices))
        report("tools", call_tools(by_call))
        report("schema", ask(by_schema, Forecast, **SAMPLING).model_dump())
        try:
            ask(by_call, Weather, messages=TOO_LONG, max_retries=1)
        except InstructorRetryException as error:
            report("too-long", [type(error).__name__, getattr(error.__cause__, "code", None)])
        sampling = dict(LONG_ANSWER)
        extra = {"ignore_eos": sampling.pop("ignore_eos")}
        with ask(by_call, None, stream=True, extra_body=extra, **sampling) as stream:
            report("cancel", bool(next(iter(stream)).choices))


def ask(client: instructor.Instructor, response_model: Any, **fields: Any) -> Any:
    return client.chat.completions.create(
        response_model=response_model, **{"model": MODEL, "messages": MESSAGES, **fields}
    )


def call_tools(client: instructor.Instructor) -> dict[str, Any]:
    messages = list(MESSAGES)
    calls = []
    for _ in range(2):
        _, completion = client.chat.completions.create_with_completion(
            response_model=Weather, model=MODEL, messages=messages, **SAMPLING
        )
        messages.append(completion.choices[0].message.model_dump())
        for call in completion.choices[0].message.tool_calls:
            # A call has the name of its class.
            calls.append([call.function.name.lower(), call.function.arguments])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": TOOL_ANSWER})
    end = ask(client, None, messages=messages, **SAMPLING)
    return {"calls": calls, "text": end.choices[0].message.content}


if __name__ == "__main__":
    main()
