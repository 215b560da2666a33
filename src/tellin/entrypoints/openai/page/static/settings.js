// Settings of the chat: what is left on "auto" is not sent, so the model's and the server's own
// defaults count.

import { h, icon, recall, remember } from "./dom.js";

const STORED = "tellin.settings";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, start: 0.7, help: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.05, max: 1, step: 0.01, start: 1, help: "likeliest tokens that make up this share" },
  { name: "top_k", label: "Top k", min: 0, max: 200, step: 1, start: 40, help: "the k likeliest tokens; 0 takes all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, start: 0.05, help: "at least this share of the likeliest one" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.05, start: 1.1, help: "above 1 avoids tokens seen before" },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 4096, step: 1, start: 512, help: "longest answer" },
];
const DEFAULTS = { system: "", seed: "", top_logprobs: 5, temperature: 0.7, max_tokens: 1024 };

export class Settings {
  constructor(panel, onClose) {
    this.values = { ...DEFAULTS, ...stored() };
    this.rows = new Map();
    panel.append(this.#head(onClose), this.#system(), ...FIELDS.map((field) => this.#slider(field)), this.#seed(), this.#logprobs());
  }

  /** Parameters of a request, in the API's words. */
  params() {
    const { values } = this;
    const params = {};
    for (const { name } of FIELDS) if (values[name] !== undefined && values[name] !== null) params[name] = values[name];
    if (values.seed !== "") params.seed = Number(values.seed);
    return params;
  }

  get system() {
    return this.values.system.trim();
  }

  get topLogprobs() {
    return this.values.top_logprobs;
  }

  /** The model's context bounds the longest answer. */
  setContext(numTokens) {
    this.rows.get("max_tokens").setMax(numTokens);
  }

  #set(name, value) {
    this.values[name] = value;
    remember("localStorage", STORED, JSON.stringify(this.values));
  }

  #head(onClose) {
    const reset = h("button", { type: "button", class: "ghost small", text: "Reset all" });
    reset.addEventListener("click", () => this.#reset());
    const close = h("button", { type: "button", class: "icon-button only-drawer", "aria-label": "Close settings", onclick: onClose }, icon("close"));
    return h("div", { class: "row spread" }, h("h2", { text: "Settings" }), h("div", { class: "row" }, reset, close));
  }

  #reset() {
    for (const row of this.rows.values()) row.set(null);
    for (const [name, value] of Object.entries(DEFAULTS)) this.rows.get(name)?.set(value);
  }

  #system() {
    const area = h("textarea", { id: "set-system", rows: "2", placeholder: "You are a helpful assistant.", oninput: () => this.#set("system", area.value) });
    area.value = this.values.system;
    this.rows.set("system", { set: (value) => this.#set("system", (area.value = value ?? "")) });
    return h("div", { class: "field" }, h("label", { for: "set-system", text: "System prompt" }), area);
  }

  #slider({ name, label, min, max, step, start, help }) {
    const id = `set-${name}`;
    const range = h("input", { type: "range", id, min, max, step, "aria-describedby": `${id}-help` });
    const number = h("input", { type: "number", class: "value", min, max, step, placeholder: "auto", "aria-label": `${label}, as a number` });
    const auto = h("button", { type: "button", class: "icon-button tiny", "aria-label": `${label}: back to auto`, title: "Back to auto" }, icon("reset", 14));
    const field = h(
      "div",
      { class: "field" },
      h("div", { class: "row spread" }, h("label", { for: id, text: label }), h("div", { class: "row tight" }, auto, number)),
      range,
      h("p", { class: "hint", id: `${id}-help`, text: help }),
    );
    const set = (value) => {
      const isAuto = value === null || value === undefined;
      this.#set(name, isAuto ? null : value);
      number.value = isAuto ? "" : value;
      range.value = isAuto ? start : value;
      range.setAttribute("aria-valuetext", isAuto ? "auto" : String(value));
      field.classList.toggle("auto", isAuto);
      auto.disabled = isAuto;
    };
    range.addEventListener("input", () => set(Number(range.value)));
    number.addEventListener("change", () => set(number.value === "" ? null : Number(number.value)));
    auto.addEventListener("click", () => set(null));
    const setMax = (limit) => {
      number.max = limit;
      range.max = Math.min(limit, max);
      set(this.values[name] > limit ? limit : this.values[name]);
    };
    this.rows.set(name, { set, setMax });
    set(this.values[name]);
    return field;
  }

  #seed() {
    const input = h("input", { type: "number", id: "set-seed", class: "value wide", step: "1", placeholder: "random" });
    input.value = this.values.seed;
    input.addEventListener("change", () => this.#set("seed", input.value));
    this.rows.set("seed", { set: (value) => this.#set("seed", (input.value = value ?? "")) });
    return h(
      "div",
      { class: "field" },
      h("div", { class: "row spread" }, h("label", { for: "set-seed", text: "Seed" }), input),
      h("p", { class: "hint", text: "the same seed gives the same answer, bit for bit" }),
    );
  }

  #logprobs() {
    const options = [[0, "off"], [3, "3"], [5, "5"], [10, "10"], [20, "20"]];
    const select = h("select", { id: "set-top", onchange: () => this.#set("top_logprobs", Number(select.value)) }, ...options.map(([value, text]) => h("option", { value, text })));
    select.value = String(this.values.top_logprobs);
    this.rows.set("top_logprobs", {
      set: (value) => {
        select.value = String(value ?? 0);
        this.#set("top_logprobs", Number(select.value));
      },
    });
    return h(
      "div",
      { class: "field" },
      h("div", { class: "row spread" }, h("label", { for: "set-top", text: "Alternatives per token" }), select),
      h("p", { class: "hint", text: "what the token view shows of new answers" }),
    );
  }
}

function stored() {
  try {
    return JSON.parse(recall("localStorage", STORED) ?? "{}");
  } catch {
    return {};
  }
}
