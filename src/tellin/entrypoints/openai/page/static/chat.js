// The chat: owns the conversation, sends requests, takes the stream apart. The conversation is kept
// in this tab (sessionStorage), so that a reload does not lose it.

import { ApiError, apiKey, call, events } from "./api.js";
import { byId, copyText, dress, h, recall, remember } from "./dom.js";
import { MessageView } from "./message.js";
import { contentOf, Pictures } from "./pictures.js";
import { curl, python } from "./snippets.js";
import { readToken } from "./tokens.js";

const STORED = "tellin.conversation";
const EXAMPLES = [
  "Explain how a lighthouse works, in three sentences.",
  "Write a haiku about rain on a tin roof.",
  "What is the capital of France?",
];

export class Chat {
  constructor(settings, { onUnauthorized }) {
    this.settings = settings;
    this.onUnauthorized = onUnauthorized;
    this.model = "";
    this.messages = [];
    this.cleared = [];
    this.views = new Map();
    this.showTokens = false;
    this.running = null;
    this.log = byId("log");
    this.scroller = byId("scroller");
    this.atEnd = true;
    this.prompt = byId("prompt");
    this.pictures = new Pictures(announce, () => this.#follow());
    this.#listen();
    for (const message of restored()) this.#add(message);
    this.#refresh();
  }

  setModel(name) {
    this.model = name;
    byId("chat-title").textContent = name || "Chat";
    byId("chat-title").title = name;
  }

  // ------------------------------------------------------------------ controls

  #listen() {
    dress(byId("code-button"), "code", "Code");
    dress(byId("clear-button"), "trash", "Clear");
    dress(byId("code-close"), "close");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.#submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.#submit();
      }
    });
    this.prompt.addEventListener("input", () => this.#fitPrompt());
    this.scroller.addEventListener("scroll", () => this.#onScroll(), { passive: true });
    byId("chat-view").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
    });
    byId("clear-button").addEventListener("click", () => this.clear());
    byId("undo-button").addEventListener("click", () => this.#bringBack());
    byId("view-text").addEventListener("click", () => this.#show(false));
    byId("view-tokens").addEventListener("click", () => this.#show(true));
    byId("code-button").addEventListener("click", () => this.#openCode());
    byId("examples").append(
      ...EXAMPLES.map((text) => h("li", {}, h("button", { type: "button", text, onclick: () => this.send(text) }))),
    );
    this.#listenCode();
  }

  #submit() {
    const text = this.prompt.value.trim();
    const images = this.pictures.take();
    if (!text && !images.length) return;
    this.prompt.value = "";
    this.#fitPrompt();
    this.send(text, images);
  }

  #fitPrompt() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  #show(tokens) {
    this.showTokens = tokens;
    byId("view-text").setAttribute("aria-pressed", String(!tokens));
    byId("view-tokens").setAttribute("aria-pressed", String(tokens));
    for (const view of this.views.values()) {
      view.showTokens = tokens;
      view.update();
    }
    this.#refresh();
  }

  /** What depends on the conversation as a whole. */
  #refresh() {
    const isEmpty = this.messages.length === 0;
    if (!isEmpty) this.cleared = [];
    byId("undo-button").hidden = this.cleared.length === 0;
    byId("empty").hidden = !isEmpty;
    byId("clear-button").disabled = isEmpty;
    const hasTokens = this.messages.some((message) => message.tokens?.length);
    byId("legend-tokens").hidden = !this.showTokens || !hasTokens;
    const button = byId("send");
    dress(button, this.running ? "stop" : "send");
    button.setAttribute("aria-label", this.running ? "Stop" : "Send");
    button.classList.toggle("stop", Boolean(this.running));
    this.#keep();
  }

  /** For a reload; without the pictures, which are said to be lost then, where they are too large. */
  #keep() {
    const kept = this.messages.map(({ role, content, images, numLost }) => ({ role, content, images, numLost }));
    if (remember("sessionStorage", STORED, JSON.stringify(kept))) return;
    const texts = kept.map(({ role, content, images = [], numLost = 0 }) => ({ role, content, numLost: numLost + images.length }));
    remember("sessionStorage", STORED, JSON.stringify(texts));
  }

  // ------------------------------------------------------------------ the conversation

  /** Add the user's message and answer it. */
  send(text, images = []) {
    if (this.running) return;
    this.#add({ role: "user", content: text, images });
    this.#answer();
  }

  /** Abort the request; what came so far stays. */
  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.cleared = [...this.messages];
    this.#truncate(0);
    announce("Conversation cleared");
    this.prompt.focus();
  }

  /** Undo `clear`. */
  #bringBack() {
    for (const message of this.cleared) this.#add(message);
    this.#refresh();
    this.#follow(true);
    this.prompt.focus();
  }

  #add(message) {
    const view = new MessageView(message, {
      again: (it) => this.#again(it),
      goOn: (it) => this.#goOn(it),
      edit: (it, text) => this.#edit(it, text),
      remove: (it) => this.#remove(it),
      branch: (it, index, alternative) => this.#branch(it, index, alternative),
    });
    view.showTokens = this.showTokens;
    this.messages.push(message);
    this.views.set(message, view);
    this.log.append(view.element);
    return view;
  }

  /** Forget all messages from this index on. The keyboard's place is not lost with a button. */
  #truncate(length) {
    const focused = document.activeElement;
    const isLost = this.messages.slice(length).some((it) => this.views.get(it).element.contains(focused));
    if (isLost && focused.matches(":focus-visible")) this.prompt.focus();
    for (const message of this.messages.splice(length)) {
      this.views.get(message).element.remove();
      this.views.delete(message);
    }
    this.#refresh();
  }

  #remove(message) {
    this.stop();
    this.#truncate(this.messages.indexOf(message));
  }

  #again(message) {
    this.stop();
    this.#truncate(this.messages.indexOf(message));
    this.#answer();
  }

  #edit(message, text) {
    this.stop();
    const index = this.messages.indexOf(message);
    if (message.role === "user") {
      this.#truncate(index);
      this.send(text, message.images);
      return;
    }
    Object.assign(message, { content: text, tokens: [], error: null, finish: null, numTokens: 0, speed: 0 });
    this.views.get(message).update();
    this.#refresh();
  }

  #goOn(message) {
    this.stop();
    this.#truncate(this.messages.indexOf(message) + 1);
    // The token that ended the answer is not part of what goes on.
    if (decode(message.tokens ?? []) !== message.content && decode((message.tokens ?? []).slice(0, -1)) === message.content) {
      message.tokens = message.tokens.slice(0, -1);
    }
    this.#answer(message);
  }

  /** Cut the answer before a token, put another one there, and go on. */
  #branch(message, index, alternative) {
    this.stop();
    this.#truncate(this.messages.indexOf(message) + 1);
    const kept = message.tokens.slice(0, index);
    const chosen = { ...message.tokens[index], ...alternative };
    chosen.top = message.tokens[index].top.map((other) => ({ ...other, chosen: other === alternative }));
    message.tokens = [...kept, chosen];
    message.content = decode(message.tokens);
    this.#answer(message);
  }

  // ------------------------------------------------------------------ a request

  #body(continues, urlOf = undefined) {
    const { settings } = this;
    const messages = this.messages
      .filter((it) => it.content || it.images?.length)
      .map((it) => ({ role: it.role, content: contentOf(it, urlOf) }));
    if (settings.system) messages.unshift({ role: "system", content: settings.system });
    const body = { model: this.model, messages, ...settings.params() };
    if (continues) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    return body;
  }

  /** Ask for an answer to what is there, or for the rest of `unfinished`. */
  async #answer(unfinished = null) {
    const body = { ...this.#body(unfinished !== null), stream: true, stream_options: { include_usage: true } };
    const top = this.settings.topLogprobs;
    if (top) Object.assign(body, { logprobs: true, top_logprobs: top });
    const message = unfinished ?? { role: "assistant", content: "", reasoning: "", tokens: [] };
    Object.assign(message, { isStreaming: true, error: null, finish: null, numTokens: 0, speed: 0, firstToken: 0 });
    const view = this.views.get(message) ?? this.#add(message);
    view.update();
    const controller = new AbortController();
    this.running = controller;
    this.#refresh();
    announce("The model is answering");
    this.#follow(true);
    try {
      await this.#stream(body, message, view, controller.signal);
    } catch (error) {
      this.#onFailure(error, message);
    } finally {
      message.isStreaming = false;
      if (this.running === controller) this.running = null;
      view.update();
      this.#refresh();
      this.#follow();
    }
    announce(outcome(message));
  }

  async #stream(body, message, view, signal) {
    const start = performance.now();
    let first = 0;
    let last = 0;
    let numNew = 0;
    const response = await call("/v1/chat/completions", { body, signal });
    const paint = painter(() => {
      view.update();
      this.#follow();
    });
    for await (const chunk of events(response)) {
      const [choice] = chunk.choices;
      const numTokens = choice?.logprobs?.content?.length ?? (choice?.delta.content ? 1 : 0);
      if (numTokens) {
        last = performance.now();
        first ||= last;
        numNew += numTokens;
        message.firstToken = (first - start) / 1000;
        message.numTokens = numNew;
        if (numNew > 1) message.speed = ((numNew - 1) * 1000) / (last - first);
      }
      if (choice) take(choice, message);
      if (chunk.usage) takeUsage(chunk.usage, message, first, last);
      paint();
    }
  }

  #onFailure(error, message) {
    if (error.name === "AbortError") {
      message.finish = "stopped";
      return;
    }
    message.error = error instanceof ApiError ? error : new ApiError(0, String(error.message ?? error));
    if (error.status === 401) this.onUnauthorized();
  }

  /** Keep the end in sight, unless the reader has scrolled up. */
  #follow(force = false) {
    if (force) this.atEnd = true;
    if (this.atEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #onScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    this.atEnd = scrollHeight - scrollTop - clientHeight < 48;
  }

  // ------------------------------------------------------------------ the request as code

  #listenCode() {
    this.language = curl;
    const choose = (language) => {
      this.language = language;
      byId("code-curl").setAttribute("aria-pressed", String(language === curl));
      byId("code-python").setAttribute("aria-pressed", String(language === python));
      this.#writeCode();
    };
    byId("code-curl").addEventListener("click", () => choose(curl));
    byId("code-python").addEventListener("click", () => choose(python));
    byId("code-copy").addEventListener("click", (event) => copyText(byId("code-text").textContent, event.currentTarget));
  }

  #openCode() {
    this.#writeCode();
    byId("code-dialog").showModal();
  }

  #writeCode() {
    const files = new Map(); // what stands for a picture's data in the code, and the file that has it
    const secret = crypto.getRandomValues(new Uint32Array(4)).join("-");
    const body = this.#body(false, ({ name, url }) => {
      const mark = `${secret}-${files.size};`;
      files.set(mark, name);
      return url.slice(0, url.indexOf(",") + 1) + mark;
    });
    if (!body.messages.some((it) => it.role === "user")) {
      body.messages.push({ role: "user", content: this.prompt.value.trim() || "Hello!" });
    }
    // The last answer is what the code is going to ask for.
    if (body.messages.at(-1).role === "assistant") body.messages.pop();
    byId("code-text").textContent = this.language(location.origin, body, Boolean(apiKey.get()), files);
  }
}

function take(choice, message) {
  const { delta, logprobs } = choice;
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const entry of logprobs?.content ?? []) message.tokens.push(readToken(entry));
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

function takeUsage(usage, message, first, last) {
  message.numTokens = usage.completion_tokens;
  message.promptTokens = usage.prompt_tokens;
  message.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
  if (last > first) message.speed = ((usage.completion_tokens - 1) * 1000) / (last - first);
}

/** Text of tokens: bytes first joined, since a character may be spread over several tokens. */
function decode(tokens) {
  const bytes = tokens.flatMap((token) => token.bytes ?? [...new TextEncoder().encode(token.text)]);
  return new TextDecoder().decode(new Uint8Array(bytes));
}

function outcome({ error, finish, numTokens }) {
  if (error) return `The request failed: ${error.message}`;
  if (finish === "stopped") return "Stopped";
  return `The answer is complete: ${numTokens} tokens`;
}

/** At most one call per frame. */
function painter(paint) {
  let isPlanned = false;
  return () => {
    if (isPlanned) return;
    isPlanned = true;
    requestAnimationFrame(() => {
      isPlanned = false;
      paint();
    });
  };
}

function announce(text) {
  byId("announcer").textContent = text;
}

function restored() {
  try {
    return JSON.parse(recall("sessionStorage", STORED) ?? "[]");
  } catch {
    return [];
  }
}
