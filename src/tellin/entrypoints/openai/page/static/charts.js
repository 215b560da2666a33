// Small charts on canvases: where the engine's time went, the last steps, and sparklines.

import { color } from "./dom.js";

export const SPAN_S = 30;
const COLUMN = 4;

/** A canvas at the screen's resolution, cleared; null while it is not shown. */
function open(canvas) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return null;
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width, height };
}

/** Share of a step that its prompt tokens made up. */
const prefillShare = (step) => step.prefill / Math.max(1, step.prefill + step.decode);

/** Seconds of prefill and of decode in each of `numColumns` parts of the last `span` seconds. */
export function timeShares(steps, now, numColumns, span = SPAN_S) {
  const size = span / numColumns;
  const begin = now - span;
  const columns = Array.from({ length: numColumns }, () => [0, 0]);
  for (const step of steps) {
    const share = prefillShare(step);
    const from = Math.max(step.endedAt - step.duration, begin);
    const first = Math.max(0, Math.floor((from - begin) / size));
    const last = Math.min(numColumns - 1, Math.floor((step.endedAt - begin) / size));
    for (let i = first; i <= last; i += 1) {
      const seconds = Math.min(step.endedAt, begin + (i + 1) * size) - Math.max(from, begin + i * size);
      if (seconds <= 0) continue;
      columns[i][0] += seconds * share;
      columns[i][1] += seconds * (1 - share);
    }
  }
  return columns.map(([prefill, decode]) => [Math.min(1, prefill / size), Math.min(1, decode / size)]);
}

/** Columns over time, as high as the engine was busy. */
export function drawTimeline(canvas, steps, now) {
  const opened = open(canvas);
  if (!opened) return;
  const { context, width, height } = opened;
  const numColumns = Math.max(1, Math.floor(width / COLUMN));
  const [prefillColor, decodeColor, lineColor] = ["--prefill", "--decode", "--line"].map(color);
  context.fillStyle = lineColor;
  for (const part of [0, 0.5]) context.fillRect(0, Math.round(part * (height - 1)), width, 1);
  context.fillRect(0, height - 1, width, 1);
  timeShares(steps, now, numColumns).forEach(([prefill, decode], i) => {
    const x = i * COLUMN;
    const decodeHeight = decode * (height - 1);
    const prefillHeight = Math.min(prefill * (height - 1), height - 1 - decodeHeight);
    context.fillStyle = decodeColor;
    context.fillRect(x, height - 1 - decodeHeight, COLUMN - 1, decodeHeight);
    context.fillStyle = prefillColor;
    context.fillRect(x, height - 1 - decodeHeight - prefillHeight, COLUMN - 1, prefillHeight);
  });
}

/** One bar per step, as high as it took; the parts are its prompt tokens and its decoded ones. */
export function drawSteps(canvas, steps) {
  const opened = open(canvas);
  if (!opened) return { shown: 0, longest: 0 };
  const { context, width, height } = opened;
  const size = 7;
  const shown = steps.slice(-Math.floor(width / size));
  const longest = Math.max(0, ...shown.map((step) => step.duration));
  const [prefillColor, decodeColor, lineColor] = ["--prefill", "--decode", "--line"].map(color);
  context.fillStyle = lineColor;
  context.fillRect(0, height - 1, width, 1);
  context.fillRect(0, 0, width, 1);
  shown.forEach((step, i) => {
    const x = width - (shown.length - i) * size;
    const full = Math.max(2, (step.duration / longest) * (height - 2));
    const prefill = full * prefillShare(step);
    context.fillStyle = decodeColor;
    context.fillRect(x, height - 1 - (full - prefill), size - 2, full - prefill);
    context.fillStyle = prefillColor;
    context.fillRect(x, height - 1 - full, size - 2, prefill);
  });
  return { shown: shown.length, longest };
}

/** A line without axes; the highest value touches the top. */
export function drawSpark(canvas, values) {
  const opened = open(canvas);
  if (!opened || values.length < 2) return;
  const { context, width, height } = opened;
  const highest = Math.max(...values, 1e-9);
  const step = width / Math.max(1, values.length - 1);
  const point = (value, i) => [i * step, height - 1.5 - (value / highest) * (height - 3)];
  context.beginPath();
  values.forEach((value, i) => context.lineTo(...point(value, i)));
  context.strokeStyle = color("--spark");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(0, height);
  context.globalAlpha = 0.12;
  context.fillStyle = color("--spark");
  context.fill();
}
