// Markdown to elements. Model text is hostile by default: every character ends in a text node, links
// keep harmless schemes only, and images, HTML and the like stay the text they are.

import { copyText, h, icon } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.+?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 12;
const SAFE_LINK = /^(https?:|mailto:)/i;

/** Keeps an element up to date with a text that grows: only blocks that changed are built again. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  update(text) {
    const blocks = splitBlocks(text);
    let same = 0;
    while (same < blocks.length && blocks[same] === this.sources[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const source of blocks.slice(same)) this.element.append(renderBlock(source));
    this.sources = blocks;
  }
}

/** Cut into blocks at blank lines, but never inside a fence or between items of a list. */
export function splitBlocks(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const flush = () => {
    if (lines.some((line) => line.trim())) blocks.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.replaceAll("\r\n", "\n").split("\n")) {
    const mark = FENCE.exec(line);
    if (fence) {
      lines.push(line);
      if (mark && mark[1][0] === fence[0] && mark[1].length >= fence.length && !mark[2]) {
        fence = null;
        flush();
      }
    } else if (mark) {
      flush();
      fence = mark[1];
      lines.push(line);
    } else if (HEADING.test(line)) {
      flush();
      lines.push(line);
      flush();
    } else if (!line.trim()) {
      if (lines.length && ITEM.test(lines[0])) lines.push(line);
      else flush();
    } else {
      const inList = lines.length > 0 && ITEM.test(lines[0]);
      const afterBlank = lines.length > 0 && !lines.at(-1).trim();
      if (inList && afterBlank && !ITEM.test(line) && !/^\s/.test(line)) flush();
      else if (!inList && lines.length && ITEM.test(line) && !QUOTE.test(lines[0])) flush();
      lines.push(line);
    }
  }
  flush();
  return blocks;
}

function renderBlock(source, depth = 0) {
  const lines = source.split("\n");
  if (depth >= MAX_DEPTH) return h("p", {}, ...inlineLines(lines));
  const fence = FENCE.exec(lines[0]);
  if (fence) return codeBlock(fence, lines.slice(1));
  const heading = HEADING.exec(lines[0]);
  // An answer's headings lie below those of the page.
  if (heading) return h(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2]));
  if (lines.length === 1 && RULE.test(lines[0])) return h("hr");
  if (ITEM.test(lines[0])) return list(lines, depth);
  if (QUOTE.test(lines[0])) return quote(lines, depth);
  if (lines.length > 1 && lines[0].includes("|") && TABLE_LINE.test(lines[1])) return table(lines);
  return h("p", {}, ...inlineLines(lines));
}

function codeBlock(fence, lines) {
  const last = FENCE.exec(lines.at(-1) ?? "");
  const code = (last && !last[2] ? lines.slice(0, -1) : lines).join("\n");
  const copy = h("button", { type: "button", class: "ghost small", "aria-label": "Copy code" }, icon("copy", 15));
  copy.addEventListener("click", () => copyText(code, copy));
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", { text: fence[2] || "text" }), copy),
    h("pre", { tabindex: "0", role: "group", "aria-label": `Code, ${fence[2] || "text"}` }, h("code", { text: code })),
  );
}

function quote(lines, depth) {
  const inner = lines.map((line) => QUOTE.exec(line)?.[1] ?? line).join("\n");
  return h("blockquote", {}, ...splitBlocks(inner).map((block) => renderBlock(block, depth + 1)));
}

/** Items by indentation; what is indented below an item belongs to it. */
function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const ordered = /\d/.test(first[2]);
  const indent = first[1].length;
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent) items.push([item[3]]);
    else items.at(-1).push(line.slice(Math.min(line.length - line.trimStart().length, indent + 2)));
  }
  const start = ordered ? Number.parseInt(first[2], 10) : 1;
  return h(ordered ? "ol" : "ul", start > 1 ? { start } : {}, ...items.map((item) => listItem(item, depth)));
}

function listItem(lines, depth) {
  const nested = lines.findIndex((line, i) => i > 0 && (ITEM.test(line) || FENCE.test(line) || !line.trim()));
  const own = nested < 0 ? lines : lines.slice(0, nested);
  const rest = nested < 0 ? [] : splitBlocks(lines.slice(nested).join("\n"));
  return h("li", {}, ...inlineLines(own), ...rest.map((block) => renderBlock(block, depth + 1)));
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => h("tr", {}, ...cells(line).map((cell) => h(tag, {}, ...inline(cell))));
  const body = lines.slice(2).filter((line) => line.trim());
  return h(
    "div",
    { class: "table", tabindex: "0", role: "group", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row(lines[0], "th")), h("tbody", {}, ...body.map((line) => row(line, "td")))),
  );
}

function inlineLines(lines) {
  const nodes = [];
  lines.forEach((line, i) => {
    if (i > 0) nodes.push(/ {2,}$/.test(lines[i - 1]) ? h("br") : "\n");
    nodes.push(...inline(line.trim()));
  });
  return nodes;
}

// What a mark may span is bounded: text of nothing but opening marks must not take forever.
// Code, links, bold, italics, struck out, bare addresses; in this order where they could overlap.
const INLINE = new RegExp(
  [
    "(?<tick>`+)(?<code>.{1,1000}?)\\k<tick>(?!`)",
    "(?<!!)\\[(?<label>[^\\]\\n]{1,1000})\\]\\((?<href>[^)\\s]+)\\)",
    "(?<bold>\\*\\*|__)(?=\\S)(?<strong>.{1,1000}?)(?<=\\S)\\k<bold>",
    "(?<![\\w*])(?<mark>[*_])(?=[^\\s*_])(?<em>.{1,1000}?)(?<=\\S)\\k<mark>(?![\\w*])",
    "~~(?=\\S)(?<del>.{1,1000}?)(?<=\\S)~~",
    "(?<url>https?://[^\\s<>()\\[\\]]+[^\\s<>()\\[\\].,;:!?'\"])",
  ].join("|"),
  "g",
);

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    nodes.push(inlineNode(match));
    end = match.index + match[0].length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

function inlineNode(match) {
  const part = match.groups;
  if (part.code !== undefined) return h("code", { text: part.code.trim() || part.code });
  if (part.strong !== undefined) return h("strong", {}, ...inline(part.strong));
  if (part.em !== undefined) return h("em", {}, ...inline(part.em));
  if (part.del !== undefined) return h("del", {}, ...inline(part.del));
  const href = part.href ?? part.url;
  if (!SAFE_LINK.test(href)) return match[0];
  const label = part.label === undefined ? [href] : inline(part.label);
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...label);
}
