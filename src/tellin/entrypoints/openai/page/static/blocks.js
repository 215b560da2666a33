// The map of KV blocks: one cell per block while there is room, else one cell for several blocks.

import { color } from "./dom.js";

export const STATES = ["free", "cached", "used", "shared"];
const LETTERS = { f: 0, c: 1, u: 2, s: 3 };
const MIN_CELLS = 512;
const GAP = 1;

/** Runs such as `12u3c` as one number per block. */
export function decodeRuns(runs) {
  let length = 0;
  const parts = [];
  for (const [, count, letter] of runs.matchAll(/(\d+)([fcus])/g)) {
    parts.push([Number(count), LETTERS[letter]]);
    length += Number(count);
  }
  const states = new Uint8Array(length);
  let start = 0;
  for (const [count, state] of parts) {
    states.fill(state, start, (start += count));
  }
  return states;
}

/** How many blocks from the first one on have ever been in use: the rest is left out, if wanted. */
export function usedExtent(states, before = 0) {
  let last = states.length;
  while (last > 0 && states[last - 1] === 0) last -= 1;
  return Math.min(states.length, Math.max(last, before));
}

export class BlockMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.states = new Uint8Array(0);
    this.shown = 0;
    this.layout = null;
  }

  /** Draw the first `shown` blocks. */
  draw(states, shown) {
    this.states = states;
    this.shown = shown;
    const { canvas } = this;
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width || !shown) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const layout = (this.layout = fit(shown, width, height));
    const colors = STATES.map((state) => color(`--block-${state}`));
    const { columns, cell, perCell, numCells } = layout;
    for (let i = 0; i < numCells; i += 1) {
      const counts = count(states, i * perCell, Math.min(shown, (i + 1) * perCell));
      const x = (i % columns) * (cell + GAP);
      const y = Math.floor(i / columns) * (cell + GAP);
      context.globalAlpha = 1;
      context.fillStyle = colors[0];
      context.fillRect(x, y, cell, cell);
      paintShares(context, counts, colors, x, y, cell);
    }
  }

  /** What lies at a point of the canvas: first and last block, and how many are in which state. */
  at(x, y) {
    if (!this.layout) return null;
    const { columns, cell, perCell, numCells } = this.layout;
    const column = Math.floor(x / (cell + GAP));
    const index = Math.floor(y / (cell + GAP)) * columns + column;
    if (column >= columns || index < 0 || index >= numCells) return null;
    const first = index * perCell;
    const end = Math.min(this.shown, first + perCell);
    return { first: first + 1, last: end, counts: count(this.states, first, end) };
  }
}

/** A cell of several blocks is filled from below, by the share of each state. */
function paintShares(context, counts, colors, x, y, cell) {
  const total = counts[0] + counts[1] + counts[2] + counts[3];
  let bottom = y + cell;
  for (const state of [3, 2, 1]) {
    if (!counts[state]) continue;
    const part = counts[state] === total ? cell : Math.max(1, (cell * counts[state]) / total);
    const top = Math.max(y, bottom - part);
    context.fillStyle = colors[state];
    context.fillRect(x, top, cell, bottom - top);
    bottom = top;
  }
}

function count(states, start, end) {
  const counts = [0, 0, 0, 0];
  for (let i = start; i < end; i += 1) counts[states[i]] += 1;
  return counts;
}

/** The largest square cells that fit; below 5 pixels a cell stands for several blocks. */
export function fit(numBlocks, width, height) {
  const smallest = 5;
  const most = Math.floor(width / (smallest + GAP)) * Math.floor(height / (smallest + GAP));
  const perCell = Math.max(1, Math.ceil(numBlocks / most));
  const numCells = Math.ceil(numBlocks / perCell);
  let cell = smallest;
  const wanted = Math.max(numCells, Math.min(MIN_CELLS, most));
  while (Math.floor(width / (cell + 1 + GAP)) * Math.floor(height / (cell + 1 + GAP)) >= wanted && cell < 22) cell += 1;
  return { columns: Math.floor(width / (cell + GAP)), cell, perCell, numCells };
}
