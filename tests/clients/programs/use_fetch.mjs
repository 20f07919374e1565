// A session of Node's own fetch. session.py says what a program prints.

import { readFileSync, readSync } from "node:fs";

const baseUrl = process.argv[2];
const session = JSON.parse(readFileSync(new URL("session.json", import.meta.url), "utf8"));
const { messages, tool, sampling } = session;

function report(step, got) {
  console.log(JSON.stringify({ step, got }));
  readSync(0, Buffer.alloc(1));
}

function post(fields, options = {}) {
  return fetch(`${baseUrl}/chat/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${session.key}` },
    body: JSON.stringify({ model: session.model, messages, ...fields }),
    ...options,
  });
}

async function ask(fields) {
  const reply = await post(fields);
  return (await reply.json()).choices[0].message;
}

async function callTools() {
  const conversation = [...messages];
  const calls = [];
  const tools = [tool];
  for (let round = 0; round < 2; round++) {
    const message = await ask({
      messages: conversation, tools, tool_choice: "required", parallel_tool_calls: false, ...sampling,
    });
    conversation.push(message);
    for (const call of message.tool_calls) {
      calls.push([call.function.name, call.function.arguments]);
      conversation.push({ role: "tool", tool_call_id: call.id, content: session.tool_answer });
    }
  }
  const end = await ask({ messages: conversation, tools, tool_choice: "auto", ...sampling });
  return { calls, text: end.content };
}

const models = await fetch(`${baseUrl}/models`, { headers: { Authorization: `Bearer ${session.key}` } });
report("models", (await models.json()).data.map((card) => card.id));
report("chat", (await ask(sampling)).content);
const events = (await (await post({ stream: true, ...sampling })).text()).split("\n");
report("stream", events.filter((line) => line.startsWith("data: {"))
  .flatMap((line) => JSON.parse(line.slice(6)).choices.map((choice) => choice.delta.content ?? "")).join(""));
report("tools", await callTools());
report("schema", JSON.parse((await ask({ response_format: session.response_format, ...sampling })).content));
const refused = await post({ messages: [{ role: "user", content: "a ".repeat(4096) }] });
report("too-long", [String(refused.status), (await refused.json()).error.code]);
const controller = new AbortController();
const stream = await post({ stream: true, ...session.long_answer }, { signal: controller.signal });
const first = await stream.body.getReader().read();
controller.abort();
report("cancel", new TextDecoder().decode(first.value).startsWith("data: "));
