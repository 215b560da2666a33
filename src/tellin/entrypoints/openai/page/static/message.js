// One message on the page: its text or its tokens, what it took, and what can be done with it.

import { copyText, h, icon } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { thumbnail } from "./pictures.js";
import { TokenView } from "./tokens.js";

const NAMES = { user: "You", assistant: "Assistant", system: "System" };

/** Shows `message`, a plain object that `chat.js` owns; `actions` are called with it. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.showTokens = false;
    const isAnswer = message.role === "assistant";
    this.text = h("div", { class: "text" });
    this.markdown = isAnswer ? new MarkdownView(this.text) : null;
    this.tokenBox = h("div", {
      class: "tokens",
      role: "listbox",
      "aria-label": "Tokens of the answer with their probabilities",
      "aria-orientation": "horizontal",
      "aria-live": "off",
      hidden: true,
    });
    this.tokens = new TokenView(this.tokenBox, (index, alternative) => actions.branch(message, index, alternative));
    this.thoughtText = h("div", { class: "thought-text" });
    this.thoughts = h("details", { class: "thoughts", hidden: true }, h("summary", { text: "Thoughts" }), this.thoughtText);
    this.notice = h("div", { class: "notice", hidden: true });
    this.usage = h("p", { class: "usage" });
    this.buttons = h("div", { class: "actions" }, ...this.#buttons(isAnswer));
    this.element = h(
      "article",
      { class: `message ${message.role}`, "aria-label": `${NAMES[message.role]} wrote` },
      h("h2", { class: "who", text: NAMES[message.role] }),
      this.thoughts,
      ...pictures(message),
      this.text,
      this.tokenBox,
      this.notice,
      h("footer", {}, this.usage, this.buttons),
    );
    this.update();
  }

  #buttons(isAnswer) {
    const { actions, message } = this;
    const make = (name, label, action) => {
      const button = h("button", { type: "button", class: "icon-button small", "aria-label": label, title: label }, icon(name, 16));
      button.addEventListener("click", () => action(button));
      return button;
    };
    const copy = make("copy", "Copy", (button) => copyText(message.content, button));
    const edit = make("edit", "Edit", () => this.#edit());
    const remove = make("trash", "Delete from here on", () => actions.remove(message));
    if (!isAnswer) return [copy, edit, remove];
    this.goOn = make("more", "Continue this answer", () => actions.goOn(message));
    return [copy, make("retry", "Answer again", () => actions.again(message)), this.goOn, edit, remove];
  }

  /** Bring the page in line with the message. */
  update() {
    const { message } = this;
    this.element.setAttribute("aria-busy", String(Boolean(message.isStreaming)));
    this.element.classList.toggle("streaming", Boolean(message.isStreaming));
    const showTokens = this.showTokens && message.tokens?.length > 0;
    this.text.hidden = showTokens;
    this.tokenBox.hidden = !showTokens;
    if (showTokens) this.tokens.update(message.tokens);
    else if (this.markdown) this.markdown.update(message.content);
    else this.text.textContent = message.content;
    if (!message.content && message.images?.length) this.text.hidden = true;
    this.thoughts.hidden = !message.reasoning;
    if (message.reasoning) this.thoughtText.textContent = message.reasoning;
    this.usage.textContent = message.role === "assistant" ? usageLine(message) : "";
    if (this.goOn) this.goOn.hidden = !message.content || Boolean(message.isStreaming);
    this.#updateNotice();
  }

  #updateNotice() {
    const { error, finish } = this.message;
    this.notice.hidden = !error && finish !== "length" && finish !== "stopped";
    this.notice.className = error ? "notice fault" : "notice";
    if (error) {
      const retry = h("button", { type: "button", class: "ghost small", text: "Try again" });
      retry.addEventListener("click", () => this.actions.again(this.message));
      this.notice.replaceChildren(h("span", { text: describe(error) }), retry);
    } else if (finish === "length") {
      this.notice.textContent = "Cut off: the limit of tokens was reached.";
    } else if (finish === "stopped") {
      this.notice.textContent = "Stopped.";
    }
  }

  #edit() {
    const { message } = this;
    const isAnswer = message.role === "assistant";
    const area = h("textarea", { class: "edit", "aria-label": "Edit the message", rows: Math.min(14, message.content.split("\n").length + 1) });
    area.value = message.content;
    const close = () => {
      form.remove();
      this.element.classList.remove("editing");
      this.buttons.querySelector("[aria-label=Edit]").focus();
    };
    const save = h("button", { class: "primary small", text: isAnswer ? "Save" : "Save and answer" });
    const cancel = h("button", { type: "button", class: "ghost small", text: "Cancel", onclick: close });
    const form = h("form", { class: "edit-form" }, area, h("div", { class: "row" }, cancel, save));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = area.value;
      close();
      if (text.trim() && text !== message.content) this.actions.edit(message, text);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.element.classList.add("editing");
    this.text.before(form);
    area.focus();
  }
}

function pictures({ images = [], numLost = 0 }) {
  const shown = [];
  if (images.length) shown.push(h("div", { class: "pictures" }, ...images.map(thumbnail)));
  if (numLost) shown.push(h("p", { class: "muted lost", text: `${numLost} ${numLost === 1 ? "picture" : "pictures"} not kept: too large` }));
  return shown;
}

function describe(error) {
  if (error.status === 401) return "The server wants a valid API key.";
  if (error.status === 429) return `The server is busy. ${error.retryAfter ? `It asks to wait ${error.retryAfter} s.` : ""}`;
  const text = error.message || "The request failed.";
  return text[0].toUpperCase() + text.slice(1);
}

function usageLine(message) {
  const parts = [];
  const { numTokens, promptTokens, cachedTokens, firstToken, speed } = message;
  if (numTokens) parts.push(`${numTokens} ${numTokens === 1 ? "token" : "tokens"}`);
  if (speed) parts.push(`${speed >= 100 ? speed.toFixed(0) : speed.toFixed(1)} tokens/s`);
  if (firstToken) parts.push(`first after ${firstToken < 1 ? `${(firstToken * 1000).toFixed(0)} ms` : `${firstToken.toFixed(2)} s`}`);
  if (promptTokens) parts.push(`prompt ${promptTokens}${cachedTokens ? `, ${cachedTokens} from cache` : ""}`);
  return parts.join(" · ");
}
