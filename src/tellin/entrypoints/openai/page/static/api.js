// Talks to the server: the key, errors, server-sent events over fetch (which, unlike EventSource,
// can carry a key and be aborted).

import { recall, remember } from "./dom.js";

const KEY = "tellin.api_key";

export const apiKey = {
  get: () => recall("sessionStorage", KEY) ?? "",
  set: (value) => remember("sessionStorage", KEY, value || null),
};

/** What the server, or the way to it, refused. `status` 0 = it was not reached. */
export class ApiError extends Error {
  constructor(status, message, code = null, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** `fetch` with the key. Raises ApiError for every answer that is not 2xx. */
export async function call(path, { body = null, signal = null } = {}) {
  const headers = {};
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === null ? "GET" : "POST",
      headers,
      body: body === null ? null : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // Not from our server: a proxy, perhaps.
  }
  const message = detail.message ?? `The server answered ${response.status} ${response.statusText}`;
  return new ApiError(response.status, message, detail.code, response.headers.get("Retry-After"));
}

/** The data of each server-sent event of an answer, parsed. Ends with the stream. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.startsWith("data: ") ? part.slice(6) : "";
        if (data === "[DONE]") return;
        if (data) yield checked(JSON.parse(data));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection was lost before the answer was complete.");
  }
}

/** A failure after the first token comes as an event. */
function checked(data) {
  if (data.error) throw new ApiError(500, data.error.message, data.error.code);
  return data;
}
