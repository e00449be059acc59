// A mistake on the lanes: the operations that take part, and arrows between them, numbered as their words above are.

import { boxOf, drawOutline, joined, strokeArrow, triangleAt } from "./lines.js";

/** Pixels between an arc and the edge of its lane. */
const DEPTH = 17;

/** Radius of the circle around the number of an arrow. */
const CIRCLE = 9;

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
  /** @type {Area[]} */
  const circles = [];
  /** @type {string[]} */
  const words = [];
  for (const arrow of mistake.arrows) {
    const source = boxOf(sight, rows, all, { schedule: 0, operation: arrow.from });
    const target = boxOf(sight, rows, all, { schedule: 0, operation: arrow.to });
    const place = source === null || target === null ? null : connected(sight, source, target);
    circles.push(place === null ? { x: -100, y: -100, width: 0, height: 0 } : apart(place, circles));
    words.push(arrow.words);
  }
  const taken = [...circles];
  circles.forEach((circle, at) => drawCircle(sight, circle, String(at + 1)));
  circles.forEach((circle, at) => drawWords(sight, circle, words[at], taken));
}

/**
 * Draws an arrow, on one lane as an arc: above it to the right, below it to the left. Arrows down and arrows up, and
 * those that come to a box and that leave it, have places of their own.
 * @param {Sight} sight
 * @param {Area} source
 * @param {Area} target
 * @returns {[number, number]} the middle of the arrow
 */
function connected(sight, source, target) {
  const ink = sight.theme.critical;
  if (source.y !== target.y) {
    const down = target.y > source.y;
    const side = (/** @type {Area} */ { width }) => (down ? 1 : -1) * Math.min(width / 2 - 2, Math.max(width / 8, CIRCLE + 2));
    const [start, end] = [at(source, side(source)), at(target, side(target))];
    joined(sight, start, end, ink, 2.5, []);
    const [from, to] = down ? [source.y + source.height, target.y] : [source.y, target.y + target.height];
    return [(start.x + end.x) / 2, (from + to) / 2];
  }
  const right = target.x >= source.x;
  const turn = right ? -1 : 1;
  const edge = right ? source.y : source.y + source.height;
  const [start, end] = [at(source, (-turn * source.width) / 3).x, at(target, (turn * target.width) / 3).x];
  const [path, head] = [new Path2D(), new Path2D()];
  path.moveTo(start, edge);
  path.bezierCurveTo(start, edge + turn * DEPTH * 1.33, end, edge + turn * DEPTH * 1.33, end, edge + turn * 6);
  triangleAt(head, end, edge, 0, -turn);
  strokeArrow(sight, path, head, ink, 2.5, []);
  return [(start + end) / 2, edge + turn * DEPTH];
}

/**
 * A point of a box, some pixels beside its middle, as a box of no width.
 * @param {Area} box
 * @param {number} aside
 * @returns {Area}
 */
function at({ x, y, width, height }, aside) {
  return { x: x + width / 2 + aside, y, width: 0, height };
}

/**
 * The square of a circle at a point, moved to the side until it lies over no other.
 * @param {[number, number]} point
 * @param {Area[]} others
 * @returns {Area}
 */
function apart([x, y], others) {
  const circle = { x: x - CIRCLE, y: y - CIRCLE, width: 2 * CIRCLE, height: 2 * CIRCLE };
  while (others.some((other) => overlap(circle, other))) circle.x += CIRCLE;
  return circle;
}

/**
 * @param {Area} one
 * @param {Area} other
 * @returns {boolean}
 */
function overlap(one, other) {
  const aside = one.x >= other.x + other.width || other.x >= one.x + one.width;
  return !aside && one.y < other.y + other.height && other.y < one.y + one.height;
}

/**
 * @param {Sight} sight
 * @param {Area} circle
 * @param {string} number
 */
function drawCircle({ context, theme }, { x, y }, number) {
  const disc = new Path2D();
  disc.arc(x + CIRCLE, y + CIRCLE, CIRCLE, 0, 2 * Math.PI);
  context.fillStyle = theme.critical;
  context.fill(disc);
  context.fillStyle = theme.paper;
  context.font = "600 12px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(number, x + CIRCLE, y + CIRCLE + 0.5);
}

/**
 * Writes the words of an arrow beside its number, right or left of it, where they lie over nothing else.
 * @param {Sight} sight
 * @param {Area} circle
 * @param {string} text
 * @param {Area[]} taken
 */
function drawWords({ context, theme, left, width }, circle, text, taken) {
  context.font = "600 12px system-ui, sans-serif";
  context.textAlign = "left";
  context.textBaseline = "middle";
  const wide = context.measureText(text).width + 8;
  const height = 16;
  const y = circle.y + CIRCLE - height / 2;
  const free = [circle.x + circle.width, circle.x - wide].find((x) => {
    const area = { x, y, width: wide, height };
    return x >= left && x + wide <= width && !taken.some((other) => overlap(area, other));
  });
  if (free === undefined) return;
  taken.push({ x: free, y, width: wide, height });
  context.fillStyle = theme.paper;
  context.globalAlpha = 0.9;
  context.fillRect(free, y, wide, height);
  context.globalAlpha = 1;
  context.fillStyle = theme.critical;
  context.fillText(text, free + 4, circle.y + CIRCLE + 0.5);
}
