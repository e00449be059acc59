// What stays while lanes move: the axis above them, the names of the rows before them.

import { rowsBetween, xOf, yOf } from "./layout.js";
import { amountText, partOf, roundStep, stepText, timeText } from "./numbers.js";

/**
 * Draws the axis with round times, and lines through the lanes at the ends of the schedules.
 * @param {Sight} sight
 * @param {Played[]} all
 * @param {number | null} pointed time under the pointer
 */
export function drawAxis(sight, all, pointed) {
  const { context, theme, left, from, scale, width, top } = sight;
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, width, top);
  context.strokeStyle = theme.line;
  context.lineWidth = 1;
  line(context, left, top - 0.5, width, top - 0.5);
  if (all.length === 0) return;
  const { proven, schedule: { unit, clocks } } = all[0];
  if (!proven && clocks === null) {
    drawText(sight, "operations in the order of their lanes; without a proof they have no times", left, 16, theme.muted);
    return;
  }
  if (!proven) drawText(sight, "clock", left - 8, top - 15, theme.muted, "12px", left - 8, "right");
  const part = partOf(unit, Math.max(...all.map(({ run }) => run.span)));
  const step = roundStep(70 / scale / part.of) * part.of;
  const last = from + (width - left) / scale;
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let tick = Math.ceil(from / step - 1e-9); tick * step <= last; tick++) {
    const x = xOf(sight, tick * step);
    context.strokeStyle = theme.muted;
    line(context, x, top - 6, x, top);
    const unitName = tick === 0 || tick === Math.ceil(from / step) ? part.name : "";
    const text = `${stepText((tick * step) / part.of, step / part.of)} ${unitName}`.trim();
    const half = context.measureText(text).width / 2;
    context.fillStyle = theme.muted;
    context.fillText(text, Math.min(Math.max(x, left + half), width - half - 2), top - 15);
  }
  if (pointed !== null && pointed >= 0) {
    const x = xOf(sight, pointed);
    context.strokeStyle = theme.muted;
    context.setLineDash([2, 3]);
    line(context, x, top, x, sight.height);
    context.setLineDash([]);
    const grain = roundStep(1 / scale / part.of);
    const text = `${stepText(Math.round(pointed / part.of / grain) * grain, grain)} ${part.name}`.trim();
    const half = context.measureText(text).width / 2 + 4;
    const at = Math.min(Math.max(x, left + half), width - half);
    context.fillStyle = theme.ink;
    context.fillRect(at - half, top - 23, 2 * half, 16);
    context.fillStyle = theme.paper;
    context.fillText(text, at, top - 15);
  }
}

/**
 * Draws the ends of schedules as lines through their lanes.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played[]} all
 */
export function drawEnds(sight, rows, all) {
  const { context, theme, left } = sight;
  all.forEach((played, number) => {
    const own = rows.filter((row) => row.schedule === number && row.kind !== "heading" && row.kind !== "link");
    if (own.length === 0 || !played.proven) return;
    const x = Math.round(xOf(sight, played.run.span)) + 0.5;
    const bottom = own[own.length - 1];
    if (x < left || x > sight.width) return;
    context.strokeStyle = theme.ink;
    context.lineWidth = 1;
    line(context, x, yOf(sight, own[0]) - 2, x, yOf(sight, bottom) + bottom.height + 2);
  });
}

/** Pixels that a name takes. */
const NAME = 14;

/**
 * Draws the names of the rows on a ground that hides what is left of the plot.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played[]} all
 */
export function drawNames(sight, rows, all) {
  const { context, theme, left, top, width } = sight;
  context.fillStyle = theme.paper;
  context.fillRect(0, top, left, sight.height - top);
  context.strokeStyle = theme.line;
  line(context, left - 0.5, top, left - 0.5, sight.height);
  for (const row of rowsBetween(rows, sight.scrolled, sight.scrolled + sight.height - top)) {
    const y = yOf(sight, row) + row.height / 2;
    // Names of low lanes would lie over each other.
    if (row.kind !== "heading" && row.index % Math.ceil(NAME / (row.height + 2)) !== 0) continue;
    const played = all[row.schedule];
    context.textBaseline = "middle";
    if (row.kind === "heading") {
      context.fillStyle = theme.stripe;
      context.fillRect(0, y - row.height / 2, width, row.height - 4);
      drawText(sight, headingOf(played, row.name), 6, y - 2, theme.ink, "600 13px", width - 10);
      continue;
    }
    context.textAlign = "right";
    if (row.kind === "lane") drawText(sight, row.name, left - 8, y, theme.ink, "600 12px", left - 8, "right");
    if (row.kind === "measured") drawText(sight, row.name, left - 8, y, theme.muted, "11px", left - 8, "right");
    if (row.kind === "link") drawText(sight, row.name, left - 8, y, theme.link, "11px", left - 8, "right");
    if (row.kind === "memory" && row.height >= 16) {
      const text = amountText(played.kept?.unit ?? "", played.memory[row.index].peak);
      drawText(sight, text, left - 8, y, theme.memory, "11px", left - 10, "right");
    }
  }
}

/**
 * @param {Played} played
 * @param {string} name
 * @returns {string}
 */
function headingOf({ proven, update, schedule }, name) {
  return proven ? `${name}: ${timeText(schedule.unit, update)}` : name;
}

/**
 * @param {Sight} sight
 * @param {string} text
 * @param {number} x
 * @param {number} y
 * @param {string} ink
 * @param {string} font
 * @param {number} room
 * @param {CanvasTextAlign} align
 */
function drawText(sight, text, x, y, ink, font = "12px", room = Infinity, align = "left") {
  const { context } = sight;
  context.font = `${font} system-ui, "Segoe UI", Helvetica, Arial, sans-serif`;
  context.textAlign = align;
  context.textBaseline = "middle";
  context.fillStyle = ink;
  if (Number.isFinite(room)) context.fillText(text, x, y, room);
  else context.fillText(text, x, y);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} y
 * @param {number} toX
 * @param {number} toY
 */
function line(context, x, y, toX, toY) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  context.stroke();
}

/**
 * Pixels that the names before the lanes take.
 * @param {Row[]} rows
 * @param {number} width of the canvas
 * @returns {number}
 */
export function leftOf(rows, width) {
  const longest = rows.reduce((most, row) => (row.kind === "heading" ? most : Math.max(most, row.name.length)), 2);
  return Math.min(Math.max(width < 600 ? 44 : 64, 16 + 7 * longest), 140);
}

