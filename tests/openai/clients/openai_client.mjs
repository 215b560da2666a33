// The npm package `openai` against a server: node openai_client.mjs URL

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "tiny";
const messages = [{ role: "user", content: "Hello!" }];
const call = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>';
const tools = [
  { type: "function", function: { name: "now", parameters: { type: "object", properties: {} } } },
];
const say = (text) => ({ structured_outputs: { choice: [text] }, max_tokens: 400 });

const names = [];
for await (const card of client.models.list()) names.push(card.id);
assert.ok(names.includes(model));

// Whole, streamed, and the streaming helper agree.
const options = { model, messages, max_tokens: 12, temperature: 0 };
const whole = await client.chat.completions.create(options);
assert.equal(whole.usage.completion_tokens, 12);
assert.equal(whole.choices[0].finish_reason, "length");
let text = "";
let usage = null;
const streamed = await client.chat.completions.create({
  ...options, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of streamed) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.total_tokens, whole.usage.total_tokens);
const helper = client.chat.completions.stream(options);
assert.equal(await helper.finalContent(), text);
assert.equal((await helper.finalChatCompletion()).choices[0].finish_reason, "length");

// Tool calls: streamed deltas joined by the helper, and its loop that calls functions.
const runner = client.chat.completions.stream({ model, messages, tools, ...say(call) });
const message = await runner.finalMessage();
assert.equal(message.tool_calls.length, 1);
assert.equal(message.tool_calls[0].function.name, "now");
assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { zone: "UTC" });
const asked = [];
const loop = client.chat.completions.runTools({
  model, messages, tool_choice: { type: "function", function: { name: "now" } }, max_tokens: 100,
  tools: [{ type: "function", function: {
    name: "now", description: "Time.", parse: JSON.parse,
    parameters: { type: "object", properties: { zone: { enum: ["UTC"] } }, required: ["zone"],
      additionalProperties: false },
    function: (given) => { asked.push(given); return "noon"; },
  } }],
}, { maxChatCompletions: 1 });
await loop.done();
assert.deepEqual(asked, [{ zone: "UTC" }]);

// Structured output.
const parsed = await client.chat.completions.parse({
  model, messages, max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema: {
    type: "object", properties: { dark: { type: "boolean" } }, required: ["dark"],
    additionalProperties: false } } },
});
assert.equal(typeof JSON.parse(parsed.choices[0].message.content).dark, "boolean");

// Text completions and responses.
const completion = await client.completions.create({ model, prompt: "a", max_tokens: 3, n: 2 });
assert.equal(completion.choices.length, 2);
const events = await client.responses.create({
  model, input: "Hello!", max_output_tokens: 12, temperature: 0, stream: true });
let spoken = "";
for await (const event of events) {
  if (event.type === "response.output_text.delta") spoken += event.delta;
}
assert.equal(spoken, text);

// Errors become the package's classes; a stopped stream is no error.
await assert.rejects(
  client.chat.completions.create({ model: "other-model", messages }), OpenAI.NotFoundError);
await assert.rejects(
  client.chat.completions.create({ model, messages, temperature: 9 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
const stopped = await client.chat.completions.create({
  model, messages, stream: true, max_tokens: 1500 });
for await (const _ of stopped) break;
console.log("all good");
