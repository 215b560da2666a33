// The token view: each token shaded by how surprising it was, its alternatives in a card that opens
// on hover and on focus. One tab stop per answer; arrow keys move from token to token.

import { h } from "./dom.js";

/** One token of an answer, out of an entry of the API's `logprobs.content`. */
export function readToken(entry) {
  return {
    text: entry.token,
    bytes: entry.bytes,
    p: Math.exp(entry.logprob),
    top: entry.top_logprobs.map((other) => ({
      text: other.token,
      bytes: other.bytes,
      p: Math.exp(other.logprob),
      chosen: sameToken(other, entry),
    })),
  };
}

const sameToken = (a, b) => a.token === b.token && String(a.bytes) === String(b.bytes);

/** Control tokens, such as the end of an answer: they are not part of its text. */
const SPECIAL = /^<(\|[^|]*\||\/?[a-z_]+)>$/;
const NAMES = { "\n": "↵", "\t": "⇥", " ": "␣" };

/** A token's text made visible: spaces, line ends, and the bytes of half characters. */
export function nameOf(token) {
  if (token.text === "" && !token.bytes?.length) return "(end)";
  if (token.text.includes("\uFFFD") || (token.text === "" && token.bytes)) {
    return token.bytes.map((byte) => `⟨${byte.toString(16).toUpperCase().padStart(2, "0")}⟩`).join("");
  }
  return token.text.replace(/[\n\t]/g, (c) => NAMES[c]).replace(/^ | $/g, NAMES[" "]);
}

/** The same for ears. */
function spokenNameOf(token) {
  if (token.text.trim() && !token.text.includes("\uFFFD")) return token.text.trim();
  if (token.text.includes("\n")) return "line break";
  return /^\s+$/.test(token.text) ? "space" : nameOf(token);
}

export function percent(p) {
  if (p >= 0.9995) return "100 %";
  if (p >= 0.1) return `${(p * 100).toFixed(0)} %`;
  if (p >= 0.001) return `${(p * 100).toFixed(1)} %`;
  return "< 0.1 %";
}

/** How strong the shade is: 0 for a sure token, 1 for one in a thousand or rarer. */
export const surprise = (p) => Math.min(1, Math.max(0, -Math.log10(Math.max(p, 1e-9)) / 3));

/** Tokens of one answer. `onBranch(index, alternative)` is called when an alternative is chosen. */
export class TokenView {
  constructor(element, onBranch) {
    this.element = element;
    this.onBranch = onBranch;
    this.tokens = [];
    this.current = 0;
    Object.entries({
      keydown: (event) => this.#onKey(event),
      focusin: (event) => this.#show(event.target),
      focusout: (event) => card.hideUnless(event.relatedTarget),
      pointerover: (event) => event.pointerType !== "touch" && this.#show(event.target),
      pointerout: (event) => event.pointerType !== "touch" && card.hideSoon(),
      click: (event) => this.#choose(event.target),
    }).forEach(([name, listener]) => element.addEventListener(name, listener));
  }

  /** Add what is new, after taking away what is not there any more. */
  update(tokens) {
    let same = 0;
    while (same < tokens.length && tokens[same] === this.tokens[same]) same += 1;
    this.tokens.length = same;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    if (this.current >= same) {
      this.current = 0;
      this.element.firstChild?.setAttribute("tabindex", "0");
    }
    for (const token of tokens.slice(same)) {
      this.element.append(this.#element(token, this.tokens.length));
      this.tokens.push(token);
    }
  }

  #element(token, index) {
    const name = nameOf(token);
    const visible = /^\s*$/.test(token.text) || token.text.includes("\uFFFD");
    const special = SPECIAL.test(token.text);
    const element = h("span", {
      class: special ? "token odd special" : visible ? "token odd" : "token",
      role: "option",
      tabindex: index === 0 ? "0" : "-1",
      "aria-selected": "false",
      "aria-label": `${spokenNameOf(token)}, ${percent(token.p)}`,
      dataset: { index },
      text: visible ? name : token.text,
    });
    if (token.text.includes("\n") && visible) element.append("\n");
    element.style.setProperty("--surprise", surprise(token.p).toFixed(3));
    return element;
  }

  #onKey(event) {
    const last = this.tokens.length - 1;
    const to = {
      ArrowRight: Math.min(last, this.current + 1),
      ArrowLeft: Math.max(0, this.current - 1),
      ArrowDown: this.#nextLine(1),
      ArrowUp: this.#nextLine(-1),
      Home: 0,
      End: last,
    }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.element.children[to].focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      card.enter();
    } else if (event.key === "Escape" && card.isOpen()) {
      event.stopPropagation();
      card.hide();
    }
  }

  /** The nearest token of the line above or below. */
  #nextLine(direction) {
    const here = this.element.children[this.current]?.getBoundingClientRect();
    let index = this.current + direction;
    let line = null;
    let best = this.current;
    for (; here && index >= 0 && index < this.tokens.length; index += direction) {
      const box = this.element.children[index].getBoundingClientRect();
      if (Math.abs(box.top - here.top) < here.height / 2) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) > here.height / 2) break;
      const distance = (i) => Math.abs(this.element.children[i].getBoundingClientRect().left - here.left);
      if (best === this.current || distance(index) < distance(best)) best = index;
    }
    return best;
  }

  #show(target) {
    const element = target.closest?.(".token");
    if (!element) return;
    const index = Number(element.dataset.index);
    if (document.activeElement === element && index !== this.current) {
      this.element.children[this.current]?.setAttribute("tabindex", "-1");
      element.setAttribute("tabindex", "0");
      this.current = index;
    }
    card.show(element, this.tokens[index], (alternative, byKeyboard) => {
      this.onBranch(index, alternative);
      if (byKeyboard) this.element.children[index]?.focus({ preventScroll: true });
    });
  }

  #choose(target) {
    const element = target.closest(".token");
    if (element) element.focus({ preventScroll: true });
  }
}

/** The one card of the page: probability and alternatives of a token. */
class Card {
  #element = null;
  #anchor = null;
  #timer = 0;

  isOpen() {
    return this.#element !== null && !this.#element.hidden;
  }

  show(anchor, token, onBranch) {
    clearTimeout(this.#timer);
    if (this.isOpen() && this.#anchor === anchor) return;
    const element = (this.#element ??= this.#make());
    this.#anchor?.removeAttribute("aria-describedby");
    this.#anchor = anchor;
    anchor.setAttribute("aria-describedby", element.id);
    element.replaceChildren(
      h("p", { class: "card-title" }, h("b", { text: nameOf(token) }), h("span", { text: percent(token.p) })),
      ...rows(token).map((row) => cardRow(row, onBranch, () => this.hide())),
      h("p", { class: "hint", text: "choose one to go on from there" }),
    );
    element.hidden = false;
    this.#place(anchor);
  }

  #make() {
    const element = h("div", {
      id: "token-card",
      class: "card",
      role: "group",
      "aria-label": "Alternatives of the token",
      onpointerenter: () => clearTimeout(this.#timer),
      onpointerleave: () => this.hideSoon(),
      onfocusout: (event) => this.hideUnless(event.relatedTarget),
      onkeydown: (event) => this.#onKey(event),
    });
    document.getElementById("main").append(element);
    addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
    return element;
  }

  #place(anchor) {
    // A token that breaks over two lines is pointed at where it begins.
    const box = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
    const size = this.#element.getBoundingClientRect();
    const left = Math.max(8, Math.min(box.left, innerWidth - size.width - 8));
    const below = box.bottom + 6;
    const top = below + size.height < innerHeight - 8 ? below : Math.max(8, box.top - size.height - 6);
    this.#element.style.left = `${left}px`;
    this.#element.style.top = `${top}px`;
  }

  #onKey(event) {
    const buttons = [...this.#element.querySelectorAll("button")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") {
      event.stopPropagation();
      const anchor = this.#anchor;
      this.hide();
      anchor?.focus();
      this.hide();
    } else if (step) {
      event.preventDefault();
      const next = (buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length;
      buttons[next]?.focus();
    }
  }

  /** Move the focus to the alternatives. */
  enter() {
    this.#element?.querySelector("button")?.focus();
  }

  hideUnless(focused) {
    if (focused && (this.#element?.contains(focused) || focused === this.#anchor)) return;
    this.hideSoon(60);
  }

  hideSoon(delay = 140) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      const focused = document.activeElement;
      if (focused !== this.#anchor && !this.#element?.contains(focused)) this.hide();
    }, delay);
  }

  hide() {
    clearTimeout(this.#timer);
    this.#anchor?.removeAttribute("aria-describedby");
    this.#anchor = null;
    if (this.#element) this.#element.hidden = true;
  }
}

/** The alternatives, best first; the chosen token comes last if it is not among them. */
function rows(token) {
  if (token.top.some((other) => other.chosen)) return token.top;
  return [...token.top, { text: token.text, bytes: token.bytes, p: token.p, chosen: true }];
}

function cardRow(row, onBranch, close) {
  const bar = h("span", { class: "bar-fill" });
  bar.style.setProperty("--p", row.p.toFixed(4));
  const content = [
    h("span", { class: "card-text", text: nameOf(row) }),
    h("span", { class: "bar-track", "aria-hidden": "true" }, bar),
    h("span", { class: "card-p", text: percent(row.p) }),
  ];
  if (row.chosen) return h("div", { class: "card-row chosen" }, ...content);
  const pick = (event) => {
    const byKeyboard = event.detail === 0;
    close();
    onBranch(row, byKeyboard);
  };
  return h("button", { type: "button", class: "card-row", onclick: pick }, ...content);
}

const card = new Card();
