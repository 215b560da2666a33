// A request as code for the reader's own program. The key is never written out.

const OPENAI_NAMES = new Set([
  "model", "messages", "temperature", "top_p", "max_tokens", "seed", "stream", "logprobs", "top_logprobs", "stream_options",
]);

/** A command for a POSIX shell. */
export function curl(origin, body, needsKey) {
  const lines = [`curl ${origin}/v1/chat/completions \\`, "  -H 'Content-Type: application/json' \\"];
  if (needsKey) lines.push('  -H "Authorization: Bearer $TELLIN_API_KEY" \\');
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [...lines, `  -d '${json}'`].join("\n");
}

/** A program that uses the `openai` package; what OpenAI does not have goes into `extra_body`. */
export function python(origin, body, needsKey) {
  const own = Object.entries(body).filter(([name]) => OPENAI_NAMES.has(name) && name !== "stream");
  const extra = Object.entries(body).filter(([name]) => !OPENAI_NAMES.has(name));
  const args = own.map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  if (extra.length) args.push(`    extra_body=${literal(Object.fromEntries(extra), 4)},`);
  const key = needsKey ? 'os.environ["TELLIN_API_KEY"]' : '"none"';
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key=${key})`,
    "stream = client.chat.completions.create(",
    ...args,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    "print()",
  ].join("\n");
}

/** A value as a Python literal. JSON's strings are Python's too, but for characters beyond 16 bits. */
function literal(value, indent) {
  const pad = " ".repeat(indent + 4);
  const end = " ".repeat(indent);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[\n${value.map((item) => `${pad}${literal(item, indent + 4)},`).join("\n")}\n${end}]`;
  if (typeof value === "object") {
    const items = Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, indent + 4)}`);
    return `{${items.join(", ")}}`;
  }
  return JSON.stringify(value);
}
