// Starts the page: which view is shown, theme, key, and one stream of engine events for both views.

import { apiKey, call, events } from "./api.js";
import { Chat } from "./chat.js";
import { byId, dress, remember } from "./dom.js";
import { EngineView } from "./engine.js";
import { Settings } from "./settings.js";

const RETRY_MS = [500, 1000, 2000, 5000];

// ---------------------------------------------------------------------- views

const settingsPanel = byId("settings");
const settings = new Settings(settingsPanel, () => toggleSettings(false));
const chat = new Chat(settings, { onUnauthorized: askForKey });
const engine = new EngineView(byId("engine-view"));

function showView() {
  const name = location.hash === "#engine" ? "engine" : "chat";
  for (const view of ["chat", "engine"]) {
    byId(`${view}-view`).hidden = view !== name;
    const link = byId(`nav-${view}`);
    if (view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = name === "chat" ? "tellin" : "tellin: engine";
  if (name === "engine") engine.draw();
}

addEventListener("hashchange", showView);
showView();

function toggleSettings(open) {
  settingsPanel.classList.toggle("open", open);
  byId("settings-button").setAttribute("aria-expanded", String(open));
  if (open) settingsPanel.querySelector("textarea").focus();
  else byId("settings-button").focus();
}

dress(byId("settings-button"), "sliders", "Settings");
byId("settings-button").addEventListener("click", () => toggleSettings(!settingsPanel.classList.contains("open")));
settingsPanel.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && settingsPanel.classList.contains("open")) toggleSettings(false);
});

// ---------------------------------------------------------------------- theme

const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";

function showTheme() {
  const button = byId("theme-button");
  dress(button, isDark() ? "sun" : "moon");
  button.setAttribute("aria-pressed", String(isDark()));
  engine.draw();
}

byId("theme-button").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  // What equals the system's choice is not remembered: it follows the system again.
  remember("localStorage", "tellin.theme", isDark() === system.matches ? null : theme);
  showTheme();
});
system.addEventListener("change", showTheme);
showTheme();

// ---------------------------------------------------------------------- key

function askForKey() {
  byId("key-button").hidden = false;
  byId("key-fault").textContent = apiKey.get() ? "The server did not take this key." : "";
  byId("key-input").value = apiKey.get();
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

dress(byId("key-button"), "key");
byId("key-button").hidden = !apiKey.get();
byId("key-button").addEventListener("click", askForKey);
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", () => {
  apiKey.set(byId("key-input").value.trim());
  loadModel();
});
byId("code-close").addEventListener("click", (event) => {
  event.preventDefault();
  byId("code-dialog").close();
});

async function loadModel() {
  try {
    const models = await (await call("/v1/models")).json();
    chat.setModel(models.data[0].id);
    settings.setContext(models.data[0].max_model_len);
  } catch (error) {
    chat.setModel("");
    if (error.status === 401) return askForKey();
    showPill("lost", "server not reached");
    setTimeout(loadModel, 3000);
    return;
  }
  watch();
}

// ---------------------------------------------------------------------- engine events

let watching = null;
let attempt = 0;

/** Follow the engine while the page can be seen. */
async function watch() {
  watching?.abort();
  const controller = (watching = new AbortController());
  try {
    const response = await call("/engine/events?interval=0.5", { signal: controller.signal });
    for await (const event of events(response)) {
      attempt = 0;
      engine.take(event);
      chat.pictures.enable(event.about.takes_images);
      showEngine(event);
    }
  } catch (error) {
    if (error.name === "AbortError" || error.status === 401) return;
  }
  if (controller.signal.aborted) return;
  showPill("lost", "server not reached");
  engine.lose();
  setTimeout(() => !document.hidden && watching === controller && watch(), RETRY_MS[Math.min(attempt++, 3)]);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) watching?.abort();
  else if (chat.model) watch();
});

function showEngine({ core }) {
  if (core === null) return showPill("busy", "in a long step");
  const { num_running: running, num_waiting: waiting, num_blocked: blocked, is_paused: paused } = core;
  if (paused) return showPill("off", "paused");
  if (!running && !waiting && !blocked) return showPill("idle", "idle");
  showPill("busy", `${running} running`, waiting + blocked ? `, ${waiting + blocked} waiting` : "");
}

function showPill(state, text, more = "") {
  byId("pill").dataset.state = state;
  byId("pill-text").textContent = text;
  byId("pill-more").textContent = more;
}

loadModel();
