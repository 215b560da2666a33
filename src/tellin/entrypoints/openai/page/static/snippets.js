// A request as code for the reader's own program. The key is never written out, nor are pictures: the
// code reads their files. `files` says by marks, which nobody could write into a message, which.

const OPENAI_NAMES = new Set([
  "model", "messages", "temperature", "top_p", "max_tokens", "seed", "stream", "logprobs", "top_logprobs", "stream_options",
]);

/** A command for a POSIX shell. */
export function curl(origin, body, needsKey, files) {
  const lines = [`curl ${origin}/v1/chat/completions \\`, "  -H 'Content-Type: application/json' \\"];
  if (needsKey) lines.push('  -H "Authorization: Bearer $TELLIN_API_KEY" \\');
  const json = JSON.stringify(body, null, 2);
  if (!files.size) return [...lines, `  -d '${json.replaceAll("'", "'\\''")}'`].join("\n");
  let text = json.replace(/[\\$`]/g, "\\$&"); // what a shell would read as its own
  for (const [mark, name] of files) text = text.replaceAll(mark, () => `$(base64 < '${name.replaceAll("'", "'\\''")}' | tr -d '\\n')`);
  return [...lines, "  -d @- <<END", text, "END"].join("\n");
}

/** A program that uses the `openai` package; what OpenAI does not have goes into `extra_body`. */
export function python(origin, body, needsKey, files) {
  const own = Object.entries(body).filter(([name]) => OPENAI_NAMES.has(name) && name !== "stream");
  const extra = Object.entries(body).filter(([name]) => !OPENAI_NAMES.has(name));
  const args = own.map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  if (extra.length) args.push(`    extra_body=${literal(Object.fromEntries(extra), 4)},`);
  const key = needsKey ? 'os.environ["TELLIN_API_KEY"]' : '"none"';
  let text = args.join("\n");
  for (const [mark, name] of files) text = text.replaceAll(`${mark}"`, () => `" + read(${JSON.stringify(name)})`);
  return [
    ...(files.size ? ["import base64"] : []),
    ...(needsKey ? ["import os"] : []),
    ...(files.size ? ["from pathlib import Path"] : []),
    ...(needsKey || files.size ? [""] : []),
    "from openai import OpenAI",
    "",
    ...(files.size ? ["def read(name):", "    return base64.b64encode(Path(name).read_bytes()).decode()", ""] : []),
    `client = OpenAI(base_url="${origin}/v1", api_key=${key})`,
    "stream = client.chat.completions.create(",
    text,
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
