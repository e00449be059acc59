// Lanes: a box for each operation, idle time behind them. From afar, where boxes are narrower than a few pixels, a lane
// is a strip whose pixels have the mean colour of what is there; so a frame never draws more boxes than it has room for.

import { CAUSES } from "./idle.js";
import { xOf, yOf } from "./layout.js";
import { firstAbove, idleOfWorker } from "./search.js";
import { idleLook, lookPattern, paint } from "./theme.js";

/** Pixels of the mean operation below which a lane is a strip. */
const NARROW = 3;

/** Pixels of the smallest labels. */
const SMALLEST_FONT = 8.5;

/**
 * Draws the lane of a worker.
 * @param {Sight} sight
 * @param {Boxes} played
 * @param {Row} row
 * @param {Uint8Array | null} dimmed per operation: 1 where it stands back
 * @returns {boolean} whether it is a strip
 */
export function drawLane(sight, played, row, dimmed) {
  const { context, theme, from, scale, left, width } = sight;
  const to = from + (width - left) / scale;
  const [low, high] = [played.first[row.index], played.first[row.index + 1]];
  const first = firstAbove(played.end, from, low, high);
  const last = Math.max(first, firstAbove(played.start, to, first, high));
  const idle = idleBetween(played, row.index, from, to);
  const y = yOf(sight, row);
  context.fillStyle = theme.stripe;
  context.fillRect(left, y, width - left, row.height);
  if (last - first > 40 && (width - left) / (last - first) < NARROW) {
    drawStrip(sight, played, y, row.height, first, last, idle, dimmed);
    return true;
  }
  drawIdle(sight, played, y, row.height, idle);
  drawBoxes(sight, played, y, row.height, first, last, dimmed);
  return false;
}

/**
 * Rows of idle time of a worker between two times.
 * @param {Boxes} played
 * @param {number} worker
 * @param {number} from
 * @param {number} to
 * @returns {[number, number]} the first of them, and one behind the last
 */
function idleBetween(played, worker, from, to) {
  const { idle } = played;
  const [low, high] = idleOfWorker(idle, worker);
  const first = firstAbove(idle.end, from, low, high);
  return [first, Math.max(first, firstAbove(idle.start, to, first, high))];
}

/**
 * @param {Sight} sight
 * @param {Boxes} played
 * @param {number} y
 * @param {number} height
 * @param {[number, number]} idle
 */
function drawIdle(sight, played, y, height, [first, last]) {
  const { context, theme, left, from, scale } = sight;
  for (let at = first; at < last; at++) {
    const x = Math.max(left, xOf(sight, played.idle.start[at]));
    const end = Math.min(sight.width, xOf(sight, played.idle.end[at]));
    const { pattern, ground } = idleLook((played.idle.names ?? CAUSES)[played.idle.cause[at]], theme.dark);
    context.fillStyle = paint(context, pattern, ground, left - from * scale);
    context.fillRect(x, y, end - x, height);
  }
}

/**
 * @param {Sight} sight
 * @param {Boxes} played
 * @param {number} y
 * @param {number} height
 * @param {number} first
 * @param {number} last
 * @param {Uint8Array | null} dimmed
 */
function drawBoxes(sight, played, y, height, first, last, dimmed) {
  const { context, theme, left, scale } = sight;
  const { operations, looks } = played.schedule;
  const font = Math.min(height < 40 ? 13 : 15, Math.max(9, height - 10));
  context.textAlign = "center";
  context.textBaseline = "middle";
  // Labels have the size of the longest of them where that one fits, and else the smallest size.
  let longest = 0;
  for (let at = first; at < last; at++) longest = Math.max(longest, operations.label[at].length);
  for (let at = first; at < last; at++) {
    const { fill, ink } = looks[operations.look[at]][theme.mode];
    const x = xOf(sight, played.start[at]);
    const wide = Math.max(1, (played.end[at] - played.start[at]) * scale);
    const gap = wide > 6 ? 1 : 0;
    const [top, tall] = heightOf(operations.row[at], y, height);
    context.globalAlpha = dimmed !== null && dimmed[at] === 1 ? 0.22 : 1;
    context.fillStyle = fill;
    box(context, Math.max(left - 4, x + gap / 2), top, Math.min(wide - gap, sight.width + 8), tall);
    const label = operations.label[at];
    const pattern = wide > 6 ? lookPattern(looks[operations.look[at]].pattern, ink) : null;
    if (pattern !== null) {
      context.fillStyle = paint(context, pattern, "", x);
      context.fillRect(x + gap / 2, top, wide - gap, tall);
    }
    const [shared, own] = [longest, label.length].map((length) => Math.min(font, tall - 2, (wide - 3) / length / 0.58));
    const size = Math.max(shared, Math.min(own, SMALLEST_FONT));
    if (size >= SMALLEST_FONT) {
      context.font = `${size}px system-ui, "Segoe UI", Helvetica, Arial, sans-serif`;
      context.fillStyle = ink;
      context.fillText(label, middle(sight, x, wide), top + tall / 2 + 0.5);
    }
  }
  context.globalAlpha = 1;
}

/**
 * The middle of the part of a box that is shown.
 * @param {Sight} sight
 * @param {number} x
 * @param {number} wide
 * @returns {number}
 */
function middle(sight, x, wide) {
  const start = Math.max(x, sight.left);
  const end = Math.min(x + wide, sight.width);
  const room = Math.min(30, wide / 2);
  return Math.min(Math.max((start + end) / 2, x + room), x + wide - room);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 */
function box(context, x, y, width, height) {
  if (width < 8) {
    context.fillRect(x, y, width, height);
    return;
  }
  context.beginPath();
  context.roundRect(x, y, width, height, 2.5);
  context.fill();
}

/**
 * The part of a lane's height that an operation takes: all, or a half of a pair.
 * @param {number} part
 * @param {number} y
 * @param {number} height
 * @returns {[number, number]}
 */
export function heightOf(part, y, height) {
  const half = Math.floor(height / 2);
  if (part === 0) return [y, height];
  return part === 1 ? [y, half] : [y + half, height - half];
}

/** @type {HTMLCanvasElement | null} */
let stripCanvas = null;

/**
 * @param {Sight} sight
 * @param {Boxes} played
 * @param {number} y
 * @param {number} height
 * @param {number} first
 * @param {number} last
 * @param {[number, number]} idle
 * @param {Uint8Array | null} dimmed
 */
function drawStrip(sight, played, y, height, first, last, idle, dimmed) {
  const { context, theme, left, from, scale, ratio } = sight;
  const { operations, looks } = played.schedule;
  const columns = Math.max(1, Math.round((sight.width - left) * ratio));
  const halves = operations.row[first] > 0 || operations.row[last - 1] > 0 ? 2 : 1;
  const sums = new Float32Array(columns * halves * 4);
  const grain = scale * ratio;
  const idleColours = (played.idle.names ?? CAUSES).map((cause) => idleMean(cause, theme.dark));
  for (let at = idle[0]; at < idle[1]; at++) {
    const colour = idleColours[played.idle.cause[at]];
    const [start, end] = [(played.idle.start[at] - from) * grain, (played.idle.end[at] - from) * grain];
    for (let half = 0; half < halves; half++) spread(sums, half * columns, columns, start, end, colour);
  }
  const colours = looks.map((look) => rgb(look[theme.mode].fill));
  const back = rgb(theme.stripe);
  for (let at = first; at < last; at++) {
    const full = colours[operations.look[at]];
    const colour = dimmed !== null && dimmed[at] === 1 ? mean(mean(full, back), back) : full;
    const [start, end] = [(played.start[at] - from) * grain, (played.end[at] - from) * grain];
    const part = operations.row[at];
    if (part !== 2 || halves === 1) spread(sums, 0, columns, start, end, colour);
    if (part !== 1 && halves === 2) spread(sums, columns, columns, start, end, colour);
  }
  stripCanvas ??= document.createElement("canvas");
  if (stripCanvas.width < columns) stripCanvas.width = columns;
  stripCanvas.height = 2;
  const strip = stripCanvas.getContext("2d");
  if (strip === null) return;
  strip.putImageData(pixels(sums, columns, halves, back), 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(stripCanvas, 0, 0, columns, halves, left, y, sight.width - left, height);
}

/**
 * The colour of idle time in a strip.
 * @param {string} cause
 * @param {boolean} dark
 * @returns {number[]}
 */
export function idleMean(cause, dark) {
  const { ground, pattern } = idleLook(cause, dark);
  return mean(rgb(ground), mean(rgb(ground), rgb(pattern.mark)));
}

/**
 * Adds a colour to each pixel between two places, by the share of the pixel that it covers.
 * @param {Float32Array} sums red, green, blue and covered share of each pixel
 * @param {number} base of the row of pixels
 * @param {number} columns
 * @param {number} start
 * @param {number} end
 * @param {number[]} colour
 */
function spread(sums, base, columns, start, end, [red, green, blue]) {
  const stop = Math.min(end, columns);
  for (let column = Math.max(0, Math.floor(start)); column < stop; column++) {
    const share = Math.min(end, column + 1) - Math.max(start, column);
    const at = (base + column) * 4;
    sums[at] += red * share;
    sums[at + 1] += green * share;
    sums[at + 2] += blue * share;
    sums[at + 3] += share;
  }
}

/**
 * @param {Float32Array} sums
 * @param {number} columns
 * @param {number} rows
 * @param {number[]} back
 * @returns {ImageData}
 */
function pixels(sums, columns, rows, back) {
  const image = new ImageData(columns, rows);
  for (let at = 0; at < sums.length; at += 4) {
    const covered = sums[at + 3];
    const [free, part] = covered > 1 ? [0, 1 / covered] : [1 - covered, 1];
    for (let channel = 0; channel < 3; channel++) {
      image.data[at + channel] = sums[at + channel] * part + back[channel] * free;
    }
    image.data[at + 3] = 255;
  }
  return image;
}

/**
 * @param {string} colour "#rrggbb"
 * @returns {number[]}
 */
function rgb(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

/**
 * @param {number[]} one
 * @param {number[]} other
 * @returns {number[]}
 */
function mean(one, other) {
  return one.map((value, channel) => (value + other[channel]) / 2);
}
