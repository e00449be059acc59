// A run that ended early: where every rank stopped, on the lanes that were promised.

import { element, table } from "./dom.js";
import { select } from "./keys.js";
import { laneOf } from "./layout.js";
import { timeText } from "./numbers.js";

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
  const rows = trace.hang.map((stop) => {
    const { rank, worker, line, update, seconds, message } = stop;
    const operation = operationOfStop(chart, stop);
    const words = line === "" ? "unknown" : line;
    const place = operation < 0 ? words : element("button", { type: "button", class: "plain", click: () => select(chart, { schedule: 0, operation }) }, words);
    return [`rank ${rank}`, `P${worker}`, place, line === "" || update < 0 ? "" : String(update), seconds > 0 ? timeText("s", seconds) : "", message];
  });
  const heads = ["rank", "worker", "stopped in", "update", "was there for", "ended with"];
  const made = table("Where every rank stopped", heads, rows);
  box.append(element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Where every rank stopped" }, made));
}

/**
 * A sentence on the rank that the others waited for: one that left no record, that was in no wait, or that was the
 * longest where it stopped.
 * @param {StoppedRank[]} stops
 * @returns {string}
 */
function headline(stops) {
  const silent = stops.find(({ line }) => line === "");
  if (silent !== undefined) return `Rank ${silent.rank}: ${silent.message}`;
  const longest = stops.reduce((one, other) => (other.seconds > one.seconds ? other : one));
  const { rank, line, update, seconds } = stops.find((stop) => stop.seconds === 0 && !stop.line.startsWith("wait ")) ?? longest;
  const alone = stops.every((stop) => stop.rank === rank || stop.seconds < seconds);
  const time = seconds > 0 ? `, where it had been for ${timeText("s", seconds)}${alone ? ", longer than any other" : ""}` : "";
  return `Rank ${rank} stopped ${update < 0 ? line : `in ${line} of update ${update}`}${time}.`;
}

/**
 * The operation that a rank was in or that waits for what it waited for, or -1.
 * @param {import("./chart.js").Chart} chart
 * @param {StoppedRank} stop
 * @returns {number}
 */
function operationOfStop(chart, { event, worker }) {
  const { plan, schedule, first } = chart.store.all[0];
  if (event < 0) return -1;
  const { from, rows } = plan.operations;
  const end = schedule.events.lane_from[worker + 1];
  for (let at = event; at < end; at++) if (from[at] < from[at + 1]) return rows[from[at]];
  return first[worker + 1] - 1;
}

/**
 * Marks where every rank stopped: a line, and what it did not do any more stands back.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played} played
 * @param {StoppedRank[]} stops
 */
export function drawStops(sight, rows, { run }, stops) {
  const { context, theme, left, from, scale } = sight;
  for (const { worker, event, line } of stops) {
    const row = laneOf(rows, 0, worker);
    if (row === null) continue;
    const y = sight.top + row.top - sight.scrolled;
    if (event < 0) {
      if (line === "") unknown(sight, y, row.height);
      continue;
    }
    const x = left + (run.end[event] - run.length[event] - from) * scale;
    context.fillStyle = theme.paper;
    context.globalAlpha = 0.72;
    context.fillRect(x, y, Math.max(0, left + (run.span - from) * scale - x), row.height);
    context.globalAlpha = 1;
    context.strokeStyle = context.fillStyle = theme.critical;
    context.lineWidth = 3;
    context.stroke(new Path2D(`M${x} ${y - 3}V${y + row.height + 3}`));
    context.fill(new Path2D(`M${x} ${y - 4}h10l-3 5l3 5h-10z`));
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
