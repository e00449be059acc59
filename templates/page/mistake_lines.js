// A mistake on the lanes: the operations that take part, and arrows between them with their words.

import { boxOf, drawOutline, joined, strokeArrow, triangleAt } from "./lines.js";

/** Pixels between an arc and the edge of its lane. */
const DEPTH = 17;

/** @typedef {{ x: number, y: number, width: number, height: number }} Area */

/**
 * Draws outlines of the operations that take part in a mistake, and arrows between them.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played[]} all
 * @param {Mistake} mistake
 */
export function drawMistake(sight, rows, all, mistake) {
  const { theme } = sight;
  for (let at = 0; at < mistake.operations.length; at++) {
    drawOutline(sight, rows, all, { schedule: 0, operation: mistake.operations[at] }, theme.critical, 2.5);
  }
  /** @type {[string, number, number, boolean][]} */
  const words = [];
  for (const arrow of mistake.arrows) {
    const source = boxOf(sight, rows, all, { schedule: 0, operation: arrow.from });
    const target = boxOf(sight, rows, all, { schedule: 0, operation: arrow.to });
    if (source === null || target === null) continue;
    words.push([arrow.words, ...connected(sight, middleOf(source), middleOf(target))]);
  }
  for (const [text, x, y, upright] of words) drawWords(sight, text, x, y, upright);
}

/**
 * Draws an arrow, on one lane as an arc: above it to the right, below it to the left.
 * @param {Sight} sight
 * @param {Area} source
 * @param {Area} target
 * @returns {[number, number, boolean]} where its words belong; true if the arrow is upright there
 */
function connected(sight, source, target) {
  const ink = sight.theme.critical;
  if (source.y !== target.y) {
    joined(sight, source, target, ink, 2.5, []);
    const y = (source.y + source.height / 2 + target.y + target.height / 2) / 2;
    return [(source.x + target.x) / 2, y, Math.abs(source.x - target.x) < 60];
  }
  const up = target.x >= source.x;
  const turn = up ? -1 : 1;
  const edge = up ? source.y : source.y + source.height;
  const [path, head] = [new Path2D(), new Path2D()];
  path.moveTo(source.x, edge);
  path.bezierCurveTo(source.x, edge + turn * DEPTH * 1.33, target.x, edge + turn * DEPTH * 1.33, target.x, edge + turn * 6);
  triangleAt(head, target.x, edge, 0, -turn);
  strokeArrow(sight, path, head, ink, 2.5, []);
  return [(source.x + target.x) / 2, edge + turn * (DEPTH + 8), false];
}

/**
 * The middle of a box, as a box of no width.
 * @param {Area} box
 * @returns {Area}
 */
function middleOf({ x, y, width, height }) {
  return { x: x + width / 2, y, width: 0, height };
}

/**
 * Writes the words of an arrow; beside it where it is upright, because they would hide it.
 * @param {Sight} sight
 * @param {string} text
 * @param {number} x
 * @param {number} y
 * @param {boolean} upright
 */
function drawWords({ context, theme, left, width }, text, x, y, upright) {
  context.font = "600 12px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  const half = context.measureText(text).width / 2 + 4;
  const at = Math.min(Math.max(upright ? x + half + 8 : x, left + half), width - half);
  context.fillStyle = theme.paper;
  context.globalAlpha = 0.9;
  context.fillRect(at - half, y - 8, 2 * half, 16);
  context.globalAlpha = 1;
  context.fillStyle = theme.critical;
  context.fillText(text, at, y);
}
