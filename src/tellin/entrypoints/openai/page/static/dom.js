// Builds elements. Text only ever becomes text nodes: there is no way from a string to markup here.

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  picture: "M4 5h16v14H4zM4 16l5-5 4 4 2.5-2.5L20 17M15.5 9.5h.01",
  send: "M12 19V5M5 12l7-7 7 7",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5l5 5L20 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  more: "M5 12h14M13 6l6 6-6 6",
  code: "M9 7l-5 5 5 5M15 7l5 5-5 5",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M13 4.5v5M7 14.5v5",
  close: "M6 6l12 12M18 6L6 18",
  key: "M14.5 9.5a4.5 4.5 0 1 0-3.3 4.3L13 15.5h2.5V18H18v2.5h3V17l-6.8-6.8z",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2.5M12 19.5V22M2 12h2.5M19.5 12H22M5 5l1.7 1.7M17.3 17.3 19 19M5 19l1.7-1.7M17.3 6.7 19 5",
  reset: "M4 12a8 8 0 1 0 2.6-5.9M4 4v4.5h4.5",
};

/** An element. Attributes with a function are listeners (`onclick`); `null` and `false` are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A line drawing out of `ICONS`, invisible to screen readers. */
export function icon(name, size = 18) {
  const svg = document.createElementNS(SVG, "svg");
  const attributes = { viewBox: "0 0 24 24", width: size, height: size, class: "icon", "aria-hidden": "true" };
  for (const [key, value] of Object.entries(attributes)) svg.setAttribute(key, value);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Put an icon, and perhaps a label, into a button that the document has. */
export function dress(button, name, label = "") {
  button.replaceChildren(icon(name));
  if (label) button.append(h("span", { class: "label", text: label }));
}

export const byId = (id) => document.getElementById(id);

/** Copy text and say so on the button for a moment. */
export async function copyText(text, button) {
  const before = [...button.childNodes];
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text);
  }
  button.replaceChildren(icon("check", 16), h("span", { class: "label", text: "Copied" }));
  setTimeout(() => button.replaceChildren(...before), 1200);
}

/** Where the clipboard is closed to scripts (plain HTTP on another host). */
function copyBySelection(text) {
  const area = h("textarea", { class: "sr", "aria-hidden": "true" });
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** The value that a colour of the style sheet has in the present theme, for canvases. */
export function color(name) {
  const probe = h("span", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

/** `localStorage` and `sessionStorage` that may be off, or full: then false, and nothing is changed. */
export function remember(storage, key, value) {
  try {
    if (value === null) window[storage].removeItem(key);
    else window[storage].setItem(key, value);
    return true;
  } catch {
    return false;
  }
}

export function recall(storage, key) {
  try {
    return window[storage].getItem(key);
  } catch {
    return null;
  }
}
