// The engine view: numbers, the map of KV blocks, steps, requests. It keeps the last minute of events
// and draws only while it is shown.

import { BlockMap, decodeRuns, STATES, usedExtent } from "./blocks.js";
import { drawSpark, drawSteps, drawTimeline, SPAN_S, timeShares } from "./charts.js";
import { byId, h } from "./dom.js";

const KEPT_S = 60;
const RATE_S = 2;
const NUM_SAMPLES = 120;
const NUM_FIRST_TOKENS = 50;
const NOTE_EVERY_MS = 10000;

const TILES = [
  { id: "running", label: "Running", help: "requests in the running batch" },
  { id: "waiting", label: "Waiting", help: "requests in line or blocked" },
  { id: "output", label: "Output", unit: "tokens/s", spark: true },
  { id: "prompt", label: "Prompt", unit: "tokens/s", spark: true },
  { id: "first", label: "First token", help: "median of the last 50 requests" },
  { id: "step", label: "Step", unit: "ms", help: "median of the last seconds" },
  { id: "cache", label: "Prefix-cache hits", unit: "%", help: "of the prompt tokens since the start" },
  { id: "kv", label: "KV cache in use", unit: "%", spark: true },
];
const COLUMNS = ["State", "Request", "Prompt", "Output", "Progress", "Blocks", "Age"];

export class EngineView {
  constructor(section) {
    this.section = section;
    this.steps = [];
    this.firstTokens = [];
    this.samples = { output: [], prompt: [], kv: [] };
    this.event = null;
    this.since = 0;
    this.states = new Uint8Array(0);
    this.extent = 0;
    this.showAll = false;
    this.rows = new Map();
    this.notedAt = 0;
    this.#build();
    this.map = new BlockMap(byId("block-map"));
    new ResizeObserver(() => this.draw()).observe(section);
  }

  // ------------------------------------------------------------------ the page's parts

  #build() {
    this.section.append(
      h("div", { class: "row spread wrap" },
        h("h1", { id: "engine-title", text: "Engine" }),
        h("p", { class: "muted", id: "engine-about" }),
      ),
      h("p", { class: "sr", role: "status", id: "engine-note" }),
      h("p", { class: "notice fault", id: "engine-lost", hidden: true, text: "The server is not reached; what you see is old." }),
      h("dl", { class: "tiles" }, ...TILES.map(tile)),
      this.#blocksPanel(),
      panel("steps-title", "Steps", "steps-summary",
        h("div", { class: "charts" },
          figure("timeline", `Share of the last ${SPAN_S} s`, "timeline-note"),
          figure("step-bars", "The last steps, by duration", "step-note"),
        ),
        h("ul", { class: "legend" }, legendItem("prefill", "prefill"), legendItem("decode", "decode")),
      ),
      panel("requests-title", "Requests", "requests-summary",
        h("div", { class: "table", tabindex: "0", role: "group", "aria-labelledby": "requests-title" },
          h("table", { id: "requests" },
            h("thead", {}, h("tr", {}, ...COLUMNS.map((name) => h("th", { scope: "col", class: `col-${name.toLowerCase()}`, text: name })))),
            h("tbody", { id: "request-rows" }),
          ),
        ),
        h("p", { class: "muted", id: "no-requests", text: "Nothing to do. Requests appear here while they are served." }),
      ),
    );
  }

  #blocksPanel() {
    const toggle = h("button", { type: "button", class: "ghost small", id: "map-toggle", "aria-pressed": "false", text: "Whole pool" });
    toggle.addEventListener("click", () => {
      this.showAll = !this.showAll;
      toggle.setAttribute("aria-pressed", String(this.showAll));
      this.draw();
    });
    const canvas = h("canvas", { id: "block-map", role: "img", "aria-label": "Map of the KV blocks" });
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => (byId("map-note").textContent = this.mapNote ?? ""));
    return panel("blocks-title", "KV blocks", "blocks-summary",
      canvas,
      h("div", { class: "row spread wrap" },
        h("ul", { class: "legend", id: "block-legend" }, ...["used", "shared", "cached", "free"].map((state) => legendItem(`block-${state}`, state))),
        h("div", { class: "row" }, h("span", { class: "muted", id: "map-note" }), toggle),
      ),
    );
  }

  // ------------------------------------------------------------------ events

  /** One event of the stream. */
  take(event) {
    const isNew = this.event === null;
    if (isNew) this.since = event.time;
    byId("engine-about").textContent = describe(event.about);
    this.event = event;
    byId("engine-lost").hidden = true;
    for (const [number, endedAt, duration, model, prefill, decode, running, generated] of event.steps) {
      this.steps.push({ number, endedAt, duration, model, prefill, decode, running, generated });
    }
    while (this.steps.length && this.steps[0].endedAt < event.time - KEPT_S) this.steps.shift();
    this.firstTokens = [...this.firstTokens, ...event.first_token_s].slice(-NUM_FIRST_TOKENS);
    if (event.core) this.states = decodeRuns(event.core.blocks.states);
    this.extent = usedExtent(this.states, this.extent);
    this.#sample(event);
    if (isNew || !this.section.hidden) this.draw();
  }

  /** The stream ended. */
  lose() {
    byId("engine-lost").hidden = false;
  }

  #sample({ time, core }) {
    const recent = this.steps.filter((step) => step.endedAt > time - RATE_S);
    const rate = (key) => recent.reduce((sum, step) => sum + step[key], 0) / RATE_S;
    const values = { output: rate("generated"), prompt: rate("prefill"), kv: core ? usage(core.blocks) * 100 : 0 };
    for (const [name, value] of Object.entries(values)) {
      this.samples[name].push(value);
      if (this.samples[name].length > NUM_SAMPLES) this.samples[name].shift();
    }
  }

  // ------------------------------------------------------------------ drawing

  draw() {
    if (this.section.hidden || !this.event) return;
    this.#drawTiles();
    this.#drawSteps();
    if (this.event.core) {
      this.#drawBlocks(this.event.core.blocks);
      this.#drawRequests(this.event.core);
      this.#note(this.event.core);
    }
  }

  #drawTiles() {
    const { core, totals, time } = this.event;
    const { samples } = this;
    const recent = this.steps.filter((step) => step.endedAt > time - 5).map((step) => step.duration * 1000);
    const show = (id, text) => (byId(`tile-${id}`).textContent = text);
    if (core) {
      show("running", core.num_running);
      show("waiting", core.num_waiting + core.num_blocked);
    }
    show("output", number(samples.output.at(-1)));
    show("prompt", number(samples.prompt.at(-1)));
    show("kv", number(samples.kv.at(-1), 1));
    show("first", seconds(median(this.firstTokens)));
    show("step", recent.length ? number(median(recent), 1) : "–");
    const asked = totals.prefix_cache_queries;
    show("cache", asked ? number((100 * totals.prefix_cache_hits) / asked, 1) : "–");
    for (const name of ["output", "prompt", "kv"]) drawSpark(byId(`spark-${name}`), samples[name]);
  }

  #drawBlocks(blocks) {
    const total = this.states.length;
    // The part that has been in use, rounded up generously so that the map seldom changes its scale.
    const part = Math.min(total, 2 ** Math.ceil(Math.log2(Math.max(this.extent * 1.1, 512))));
    const shown = this.showAll ? total : part;
    byId("map-toggle").hidden = part === total;
    this.map.draw(this.states, shown);
    const counts = [blocks.num_free, blocks.num_cached, blocks.num_used, blocks.num_shared];
    STATES.forEach((state, i) => (byId(`count-block-${state}`).textContent = counts[i].toLocaleString("en")));
    byId("blocks-summary").textContent = `${total.toLocaleString("en")} blocks of ${blocks.block_size} tokens`;
    const perCell = this.map.layout?.perCell ?? 1;
    const cells = perCell > 1 ? `one cell is ${perCell} blocks` : "one cell is a block";
    this.mapNote = shown < total ? `the first ${shown.toLocaleString("en")}; ${cells}` : cells;
    if (!byId("block-map").matches(":hover")) byId("map-note").textContent = this.mapNote;
    const label = STATES.map((state, i) => `${counts[i]} ${state}`).join(", ");
    byId("block-map").setAttribute("aria-label", `Map of the KV blocks: ${label}`);
  }

  #point(event) {
    const cell = this.map.at(event.offsetX, event.offsetY);
    if (!cell) return;
    const range = cell.first === cell.last ? `block ${cell.first}` : `blocks ${cell.first} to ${cell.last}`;
    const parts = STATES.map((state, i) => (cell.counts[i] ? (cell.first === cell.last ? state : `${cell.counts[i]} ${state}`) : ""));
    byId("map-note").textContent = `${range}: ${parts.filter(Boolean).join(", ")}`;
  }

  #drawSteps() {
    const { time, has_statistics: hasStatistics, core } = this.event;
    drawTimeline(byId("timeline"), this.steps, time);
    const { shown, longest } = drawSteps(byId("step-bars"), this.steps);
    const span = Math.min(SPAN_S, Math.max(1, time - this.since));
    const [prefill, decode] = timeShares(this.steps, time, 1, span)[0].map((share) => Math.round(share * 100));
    byId("timeline-note").textContent = `prefill ${prefill} %, decode ${decode} %, idle ${Math.max(0, 100 - prefill - decode)} %`;
    byId("step-note").textContent = shown ? `${shown} steps, up to ${(longest * 1000).toFixed(1)} ms` : "no step yet";
    byId("steps-summary").textContent = hasStatistics ? (core ? `step ${core.step.toLocaleString("en")}` : "in a long step") : "statistics are off (disable_log_stats)";
  }

  #drawRequests(core) {
    const listed = core.requests.length;
    const all = core.num_running + core.num_waiting + core.num_blocked;
    byId("no-requests").hidden = listed > 0;
    byId("requests").hidden = listed === 0;
    byId("requests-summary").textContent = listed < all ? `the first ${listed} of ${all}` : all ? `${all}` : "";
    const seen = new Set();
    let previous = null;
    for (const request of core.requests) {
      seen.add(request.id);
      const row = this.rows.get(request.id) ?? this.#newRow(request.id);
      row.show(request);
      const place = previous ? previous.nextSibling : byId("request-rows").firstChild;
      if (place !== row.element) byId("request-rows").insertBefore(row.element, place);
      previous = row.element;
    }
    for (const [id, row] of this.rows) {
      if (seen.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
  }

  #newRow(id) {
    const row = new RequestRow(id);
    this.rows.set(id, row);
    return row;
  }

  /** A sentence for screen readers, now and then. */
  #note(core) {
    const now = performance.now();
    if (now - this.notedAt < NOTE_EVERY_MS) return;
    this.notedAt = now;
    const rate = number(this.samples.output.at(-1));
    byId("engine-note").textContent = `${core.num_running} running, ${core.num_waiting + core.num_blocked} waiting, ${rate} tokens per second`;
  }
}

class RequestRow {
  constructor(id) {
    this.state = h("span", { class: "state" });
    this.prompt = h("td", { class: "col-prompt" });
    this.output = h("td", { class: "col-output" });
    this.progress = h("progress", { max: "1", value: "0", "aria-label": "Progress" });
    this.blocks = h("td", { class: "col-blocks" });
    this.age = h("td", { class: "col-age" });
    this.element = h("tr", {},
      h("td", { class: "col-state" }, this.state),
      h("td", { class: "col-request", title: id }, h("code", { text: shortId(id) })),
      this.prompt,
      this.output,
      h("td", { class: "col-progress" }, this.progress),
      this.blocks,
      this.age,
    );
  }

  show(request) {
    const { state } = request;
    this.state.textContent = request.num_preemptions && state !== "preempted" ? `${state} ↻` : state;
    this.state.dataset.state = state;
    this.prompt.textContent = request.num_prompt_tokens;
    this.output.textContent = `${request.num_output_tokens} / ${request.max_tokens}`;
    const share = state === "prefill" ? request.num_computed_tokens / request.num_prompt_tokens : request.num_output_tokens / request.max_tokens;
    this.progress.value = Math.min(1, share);
    this.progress.className = state;
    this.blocks.textContent = request.num_blocks;
    this.age.textContent = seconds(request.age_s);
  }
}

// ---------------------------------------------------------------------- parts and words

function tile({ id, label, unit, help, spark }) {
  return h("div", { class: "tile" },
    h("dt", { text: label }),
    h("dd", {},
      h("span", { class: "number", id: `tile-${id}`, text: "–" }),
      unit ? h("span", { class: "unit", text: unit }) : null,
      spark ? h("canvas", { class: "spark", id: `spark-${id}`, "aria-hidden": "true" }) : null,
      help ? h("span", { class: "hint", text: help }) : null,
    ),
  );
}

function panel(id, title, summaryId, ...children) {
  return h("section", { class: "panel", "aria-labelledby": id },
    h("header", { class: "row spread" }, h("h2", { id, text: title }), h("span", { class: "muted", id: summaryId })),
    ...children,
  );
}

function figure(id, caption, noteId) {
  return h("figure", {},
    h("figcaption", { class: "row spread" }, h("span", { text: caption }), h("span", { class: "muted", id: noteId })),
    h("canvas", { id, role: "img", "aria-label": caption, "aria-describedby": noteId }),
  );
}

function legendItem(name, label) {
  return h("li", {}, h("span", { class: `swatch ${name}`, "aria-hidden": "true" }), label, h("b", { id: `count-${name}` }));
}

const describe = (about) => [
  about.model,
  about.architecture,
  `context ${about.max_model_len.toLocaleString("en")}`,
  `${about.num_threads} ${about.num_threads === 1 ? "thread" : "threads"}`,
  about.isa,
  `tellin ${about.version}`,
].filter(Boolean).join(" · ");

const usage = (blocks) => {
  const used = blocks.num_used + blocks.num_shared;
  return used / Math.max(1, used + blocks.num_cached + blocks.num_free);
};

function shortId(id) {
  return id.length > 14 ? `${id.slice(0, 8)}…` : id;
}

function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

function number(value, digits = 0) {
  return (value ?? 0).toLocaleString("en", { maximumFractionDigits: value >= 100 ? 0 : digits });
}

function seconds(value) {
  if (value === null) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
}
