// A session of OpenAI's client for Node. session.py says what a program prints.

const { readFileSync, readSync } = require("node:fs");
const { join } = require("node:path");
const OpenAI = require("openai");

const session = JSON.parse(readFileSync(join(__dirname, "session.json"), "utf8"));
const { model, messages, tool, sampling } = session;
const client = new OpenAI({ baseURL: process.argv[2], apiKey: session.key, maxRetries: 0 });

function report(step, got) {
  console.log(JSON.stringify({ step, got }));
  readSync(0, Buffer.alloc(1));
}

async function callTools() {
  const conversation = [...messages];
  const calls = [];
  const tools = [tool];
  for (let round = 0; round < 2; round++) {
    const reply = await client.chat.completions.create({
      model, messages: conversation, tools, tool_choice: "required", parallel_tool_calls: false, ...sampling,
    });
    const message = reply.choices[0].message;
    conversation.push(message);
    for (const call of message.tool_calls) {
      calls.push([call.function.name, call.function.arguments]);
      conversation.push({ role: "tool", tool_call_id: call.id, content: session.tool_answer });
    }
  }
  const end = await client.chat.completions.create({
    model, messages: conversation, tools, tool_choice: "auto", ...sampling,
  });
  return { calls, text: end.choices[0].message.content };
}

async function main() {
  const models = [];
  for await (const card of client.models.list()) models.push(card.id);
  report("models", models);
  const chat = await client.chat.completions.create({ model, messages, ...sampling });
  report("chat", chat.choices[0].message.content);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ model, messages, stream: true, ...sampling })) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  report("stream", text);
  report("tools", await callTools());
  const parsed = await client.chat.completions.parse({
    model, messages, response_format: session.response_format, ...sampling,
  });
  report("schema", JSON.parse(parsed.choices[0].message.content));
  try {
    await client.chat.completions.create({ model, messages: [{ role: "user", content: "a ".repeat(4096) }] });
  } catch (error) {
    report("too-long", [error.constructor.name, error.code]);
  }
  const stream = await client.chat.completions.create({ model, messages, stream: true, ...session.long_answer });
  for await (const chunk of stream) {
    stream.controller.abort();
    report("cancel", chunk.choices.length > 0);
    break;
  }
}

main();
