// Amounts over time below the lanes: what a worker keeps, and what is on its way on a link.

import { listOf } from "./engine.js";
import { xOf, yOf } from "./layout.js";
import { firstAbove } from "./search.js";

/**
 * Draws the memory of a worker: its curve, the bound, and a mark where it is highest.
 * @param {Sight} sight
 * @param {Row} row
 * @param {import("./curves.js").Curve} curve
 * @param {number} most the amount at the top of the row
 * @param {number | null} bound
 */
export function drawMemory(sight, row, curve, most, bound) {
  const { context, theme, left } = sight;
  const y = yOf(sight, row);
  /** @param {number} amount */
  const level = (amount) => y + row.height - 1 - (most > 0 ? (amount / most) * (row.height - 4) : 0);
  drawSteps(sight, curve, level, y + row.height - 1, theme.memory, theme.memoryFill);
  if (bound !== null) {
    context.strokeStyle = theme.muted;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(left, level(bound));
    context.lineTo(sight.width, level(bound));
    context.stroke();
    context.setLineDash([]);
  }
  const place = peakPlace(curve);
  const x = xOf(sight, curve.times[place]);
  if (curve.peak > 0 && x >= left - 3 && x <= sight.width) {
    context.fillStyle = theme.memory;
    context.beginPath();
    context.arc(x, level(curve.peak), 3, 0, 2 * Math.PI);
    context.fill();
  }
}

/**
 * The first place of a curve at its peak.
 * @param {import("./curves.js").Curve} curve
 * @returns {number}
 */
function peakPlace({ amounts, peak }) {
  return Math.max(0, amounts.indexOf(peak));
}

/**
 * Draws what is on its way on a link. A message that takes no time is a line.
 * @param {Sight} sight
 * @param {Row} row
 * @param {Played} played
 */
export function drawLink(sight, row, played) {
  const { context, theme, left } = sight;
  const curve = played.links[row.index];
  const y = yOf(sight, row);
  context.fillStyle = theme.stripe;
  context.fillRect(left, y, sight.width - left, row.height);
  const most = Math.max(1, curve.peak);
  /** @param {number} amount */
  const level = (amount) => y + row.height - 1 - (amount / most) * (row.height - 4);
  drawSteps(sight, curve, level, y + row.height - 1, theme.link, theme.linkFill);
  drawAtOnce(sight, row, played, y);
}

/** Pixels from a message that takes no time to the next one that is drawn: a row of them does not look full. */
const APART = 4;

/**
 * Draws messages that take no time as short lines on the ground of the row, some pixels apart.
 * @param {Sight} sight
 * @param {Row} row
 * @param {Played} played
 * @param {number} y
 */
function drawAtOnce(sight, row, { plan, run }, y) {
  const { context, theme, left, width } = sight;
  const { messages } = plan.schedule;
  context.fillStyle = theme.link;
  let last = -APART;
  for (const message of listOf(plan.messages, row.index)) {
    const arrived = run.end[messages.flight[message]];
    if (arrived - run.start[messages.wire[message]] > run.rounding) continue;
    const x = Math.round(xOf(sight, arrived));
    if (Math.abs(x - last) < APART || x < left || x > width) continue;
    context.fillRect(x - 0.75, y + row.height / 2, 1.5, row.height / 2 - 1);
    last = x;
  }
}

/**
 * Fills the area under a step curve and draws its upper edge. Steps within a pixel are one line over all their amounts.
 * @param {Sight} sight
 * @param {import("./curves.js").Curve} curve
 * @param {(amount: number) => number} level
 * @param {number} bottom
 * @param {string} ink
 * @param {string} fill
 */
function drawSteps(sight, curve, level, bottom, ink, fill) {
  const { context, left, from, scale, width } = sight;
  const { times, amounts } = curve;
  const first = Math.max(0, firstAbove(times, from, 0, times.length) - 1);
  const last = firstAbove(times, from + (width - left) / scale, first, times.length);
  const line = new Path2D();
  let x = left;
  let y = level(amountAt(curve, Math.max(from, 0)));
  line.moveTo(x, y);
  for (let at = first + 1; at < last; ) {
    const pixel = xOf(sight, times[at]);
    let [low, high] = [y, y];
    for (; at < last && xOf(sight, times[at]) < pixel + 0.7; at++) {
      const next = level(amounts[at]);
      low = Math.min(low, next);
      if (times[at + 1] !== times[at]) high = Math.max(high, next);
    }
    const next = level(amounts[at - 1]);
    line.lineTo(pixel, y);
    if (low < Math.min(y, next)) line.lineTo(pixel, low);
    if (high > Math.max(y, next)) line.lineTo(pixel, high);
    line.lineTo(pixel, next);
    [x, y] = [pixel, next];
  }
  line.lineTo(width, y);
  const area = new Path2D(line);
  area.lineTo(width, bottom);
  area.lineTo(left, bottom);
  area.closePath();
  context.fillStyle = fill;
  context.fill(area);
  context.strokeStyle = ink;
  context.lineWidth = 1;
  context.stroke(line);
}

/**
 * The amount of a curve at a time.
 * @param {import("./curves.js").Curve} curve
 * @param {number} time
 * @returns {number}
 */
export function amountAt(curve, time) {
  return curve.amounts[Math.max(0, firstAbove(curve.times, time, 0, curve.times.length) - 1)];
}
