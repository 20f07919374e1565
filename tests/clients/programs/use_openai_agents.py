"""A session of openai-agents, whose agents ask the server's chat completions."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    ToolCallItem,
    function_tool,
    set_tracing_disabled,
)
from openai.types.responses import ResponseTextDeltaEvent
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


@function_tool
def weather(city: Literal["Sofia"]) -> str:
    """Tell the weather of a city."""
    return TOOL_ANSWER


async def main() -> None:
    set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as client:
        model = OpenAIChatCompletionsModel(MODEL, client)
        plain = Agent(name="plain", model=model, model_settings=ModelSettings(**SAMPLING))
        report("models", [card.id async for card in client.models.list()])
        report("chat", (await Runner.run(plain, MESSAGES)).final_output)
        report("stream", await streamed(plain))
        report("tools", await call_tools(model))
        forecaster = Agent(
            name="forecaster", model=model, output_type=Forecast, model_settings=ModelSettings(**SAMPLING)
        )
        report("schema", (await Runner.run(forecaster, MESSAGES)).final_output.model_dump())
        report("beside", await call_beside_schema(model))
        try:
            await Runner.run(plain, TOO_LONG)
        except openai.APIStatusError as error:
            report("too-long", [type(error).__name__, error.code])
        report("cancel", await leave(model))


async def streamed(agent: Agent[Any]) -> str:
    result = Runner.run_streamed(agent, MESSAGES)
    return "".join(
        [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
        ]
    )


async def call_tools(model: OpenAIChatCompletionsModel) -> dict[str, Any]:
    """Run an agent twice, whose first answer must be a call and whose second one is free."""
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, **SAMPLING)
    caller = Agent(
        name="caller",
        model=model,
        tools=[weather],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    messages: list[Any] = MESSAGES
    calls = []
    for _ in range(2):
        result = await Runner.run(caller, messages)
        calls += [item.raw_item for item in result.new_items if isinstance(item, ToolCallItem)]
        messages = result.to_input_list()
    free = Agent(name="free", model=model, tools=[weather], model_settings=ModelSettings(**SAMPLING))
    end = await Runner.run(free, messages)
    return {"calls": [[call.name, call.arguments] for call in calls], "text": end.final_output}


async def call_beside_schema(model: OpenAIChatCompletionsModel) -> dict[str, Any]:
    """Run an agent with a tool and an output type up to its call, and once more up to its answer."""
    messages: list[Any] = MESSAGES
    calls: list[Any] = []
    answer: Any = None
    for bias in (CALLING, ANSWERING):
        agent = Agent(
            name="both",
            model=model,
            tools=[weather],
            output_type=Forecast,
            model_settings=ModelSettings(extra_args={"logit_bias": bias}, **SAMPLING),
            tool_use_behavior="stop_on_first_tool",
        )
        result = await Runner.run(agent, messages)
        calls += [item.raw_item for item in result.new_items if isinstance(item, ToolCallItem)]
        messages, answer = result.to_input_list(), result.final_output
    return {"calls": [[call.name, call.arguments] for call in calls], "answer": answer.model_dump()}


async def leave(model: OpenAIChatCompletionsModel) -> bool:
    """Cancel a run after its first text."""
    sampling = dict(LONG_ANSWER)
    settings = ModelSettings(
        max_tokens=sampling["max_tokens"],
        top_logprobs=sampling["top_logprobs"],
        extra_body={"ignore_eos": sampling["ignore_eos"]},
    )
    result = Runner.run_streamed(Agent(name="long", model=model, model_settings=settings), MESSAGES)
    async for event in result.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            result.cancel()
            break
    return bool(result.is_complete)


if __name__ == "__main__":
    asyncio.run(main())
