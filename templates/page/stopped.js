// A run that ended early: where every rank stopped, on the lanes that were promised.

import { jump } from "./details.js";
import { element, scrolled, table } from "./dom.js";
import { rowOf, xOf, yOf } from "./layout.js";
import { operationOf } from "./lines.js";
import { timeText } from "./numbers.js";
import { idleOfWorker } from "./search.js";

/**
 * Says above the lanes where every rank stopped.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLElement} box
 */
export function showStopped(chart, box) {
  const { trace } = chart.store.page;
  if (trace === null || trace.hang === null) return;
  box.hidden = false;
  box.append(element("h2", {}, "The run ended early"), element("p", {}, headline(trace.hang)));
  const stops = trace.hang;
  const rows = stops.map((stop) => {
    const { rank, worker, line, update, awaited, seconds, message } = stop;
    const operation = operationOfStop(chart, stop);
    const words = line === "" ? "unknown" : placeOf(stop);
    const alike = stops.filter((other) => other.message === message && message !== "");
    const same = alike.find((other) => message.includes(`rank ${other.rank} (`)) ?? alike[0] ?? stop;
    const place = operation < 0 ? words : jump(chart, { schedule: 0, operation }, words);
    const number = line === "" || update < 0 ? "" : String(update + 1);
    const ended = same === stop ? message : `as rank ${same.rank}`;
    return [`rank ${rank}`, `P${worker}`, place, number, awaited < 0 ? "" : `P${awaited}`, timeOf(seconds), ended];
  });
  const heads = ["rank", "worker", "stopped", "update", "waited for", "was there for", "ended with"];
  const title = "Where every rank stopped";
  box.append(scrolled(table(title, heads, rows), title));
}

/**
 * A sentence on the rank that the others waited for: one that left no record, that was in no wait, or that was the
 * longest where it stopped.
 * @param {StoppedRank[]} stops
 * @returns {string}
 */
function headline(stops) {
  const silent = stops.find(({ line }) => line === "");
  if (silent !== undefined) return `Rank ${silent.rank} ${silent.message}.`;
  const longest = stops.reduce((one, other) => (other.seconds > one.seconds ? other : one));
  const first = stops.find((stop) => stop.seconds === 0 && !stop.line.startsWith("wait ")) ?? longest;
  const { rank, update, seconds } = first;
  const alone = stops.every((stop) => stop.rank === rank || stop.seconds < seconds);
  const time = seconds > 0 ? `, where it had been for ${timeOf(seconds)}${alone ? ", longer than any other" : ""}` : "";
  return `Rank ${rank} stopped ${placeOf(first)}${update < 0 ? "" : ` of update ${update + 1}`}${time}.`;
}

/**
 * Where a rank was: in an operation or, of an update that it had not begun, before the first.
 * @param {StoppedRank} stop
 * @returns {string}
 */
function placeOf({ begun, line, update }) {
  if (update < 0) return line;
  return `${begun ? "in" : "before"} ${line}`;
}

/**
 * How long a rank was where it stopped, if that is known, to three digits.
 * @param {number} seconds
 * @returns {string}
 */
function timeOf(seconds) {
  return seconds > 0 ? timeText("s", Number(seconds.toPrecision(3))) : "";
}

/**
 * The operation that a rank was in or that waits for what it waited for, or -1.
 * @param {import("./chart.js").Chart} chart
 * @param {StoppedRank} stop
 * @returns {number}
 */
function operationOfStop(chart, { event, worker }) {
  const [played] = chart.store.all;
  if (event < 0) return -1;
  const { laneFrom, first } = played.plan;
  for (let at = event; at < laneFrom[worker + 1]; at++) if (operationOf(played, at) >= 0) return operationOf(played, at);
  return first[worker + 1] - 1;
}

/**
 * Marks where every rank stopped: a flag, and what it did not do any more stands back. Arrows lead from waits to the
 * lanes of the workers that were waited for.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played} played
 * @param {StoppedRank[]} stops
 */
export function drawStops(sight, rows, { run, schedule }, stops) {
  const { context, theme } = sight;
  const { lane_from } = schedule.events;
  for (const { worker, event, line, begun, awaited } of stops) {
    const row = rowOf(rows, "lane", 0, worker);
    if (row === null) continue;
    const y = yOf(sight, row);
    if (line === "") {
      unknown(sight, y, row.height);
      continue;
    }
    const last = lane_from[worker + 1] - 1;
    if (last < lane_from[worker]) continue;
    const reached = event < 0 ? run.end[last] : run.end[event] - run.length[event];
    const x = xOf(sight, begun || schedule.turn !== null ? reached : 0);
    context.fillStyle = theme.paper;
    context.globalAlpha = 0.72;
    context.fillRect(x, y, Math.max(0, xOf(sight, run.span) - x), row.height);
    context.globalAlpha = 1;
    context.strokeStyle = context.fillStyle = theme.critical;
    context.lineWidth = 3;
    context.stroke(new Path2D(`M${x} ${y - 3}V${y + row.height + 3}`));
    context.fill(new Path2D(`M${x} ${y - 4}h10l-3 5l3 5h-10z`));
    const other = awaited < 0 ? null : rowOf(rows, "lane", 0, awaited);
    if (other === null) continue;
    const down = other.top > row.top;
    const end = yOf(sight, other) + (down ? 0 : other.height);
    context.lineWidth = 1.5;
    context.stroke(new Path2D(`M${x} ${down ? y + row.height : y}V${end}`));
    context.fill(new Path2D(`M${x} ${end}l-4 ${down ? -8 : 8}h8z`));
  }
}

/**
 * Says behind the end of each recorded lane how long its rank was there; of several copies, those of the first.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {import("./measured.js").Measured} measured
 * @param {StoppedRank[]} stops
 */
export function drawStays(sight, rows, { boxes }, stops) {
  const { context, theme, width } = sight;
  const { first, end, idle } = boxes;
  const said = new Set();
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillStyle = context.strokeStyle = theme.critical;
  context.lineWidth = 1.5;
  for (const { worker, seconds } of stops) {
    const row = rowOf(rows, "measured", 0, worker);
    if (row === null || seconds <= 0 || said.has(worker)) continue;
    said.add(worker);
    const [low, high] = idleOfWorker(idle, worker);
    const lastBox = first[worker + 1] > first[worker] ? end[first[worker + 1] - 1] : 0;
    const x = xOf(sight, Math.max(lastBox, high > low ? idle.end[high - 1] : 0));
    const y = yOf(sight, row) + row.height / 2;
    const words = `${timeOf(seconds)} ..`;
    context.fillText(words, x + 6, y);
    context.setLineDash([2, 4]);
    context.stroke(new Path2D(`M${x + 12 + context.measureText(words).width} ${y}H${width}`));
    context.setLineDash([]);
  }
}

/**
 * Marks a lane whose rank left no record.
 * @param {Sight} sight
 * @param {number} y
 * @param {number} height
 */
function unknown({ context, theme, left, width }, y, height) {
  context.fillStyle = theme.paper;
  context.globalAlpha = 0.72;
  context.fillRect(left, y, width - left, height);
  context.globalAlpha = 1;
  context.strokeStyle = theme.critical;
  context.lineWidth = 1.5;
  context.setLineDash([5, 4]);
  context.strokeRect(left + 1, y + 1, width - left - 2, height - 2);
  context.setLineDash([]);
}
