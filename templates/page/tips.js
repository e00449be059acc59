// What the tip says at a point of the lanes.

import { keptAt, underWay } from "./curves.js";
import { listOf } from "./engine.js";
import { amountText, countedText, inShort, spanText, timeText } from "./numbers.js";
import { recordedAt } from "./recorded.js";
import { idleAt, operationAt } from "./search.js";
import { amountAt } from "./steps.js";
import { idleText, sentence } from "./words.js";

/**
 * Something on the lanes: its operation or its stretch of idle time, and what the tip says; empty where there is nothing.
 * @typedef {{ operation: Place | null, idle: Stretch | null, text: string }} Mark
 */

/**
 * What is at a time of a row. Of a pair it is the part in this half of the row.
 * @param {import("./store.js").Store} store
 * @param {Row} row
 * @param {number} time
 * @param {number} slack of time around what is too narrow to be hit
 * @param {boolean} lower whether the lower half of the row is meant
 * @returns {Mark}
 */
export function markAt(store, row, time, slack, lower) {
  const { schedule } = row;
  if (row.kind === "measured") {
    const { operation, words } = recordedAt(store, row.index, time, slack, lower);
    return { operation: operation < 0 ? null : { schedule, operation }, idle: null, text: words };
  }
  const played = store.all[schedule];
  const operation = row.kind === "lane" ? operationAt(played, row.index, time, slack, lower) : -1;
  if (operation >= 0) return { operation: { schedule, operation }, idle: null, text: sentence(played, operation) };
  const at = row.kind === "lane" && played.proven ? idleAt(played.idle, row.index, time) : -1;
  const text = at < 0 ? textOf(store, row, time, slack) : idleText(played, at);
  return { operation: null, idle: at < 0 ? null : { schedule, row: at }, text };
}

/**
 * What is at a time of a row in which there is no operation.
 * @param {import("./store.js").Store} store
 * @param {Row} row
 * @param {number} time
 * @param {number} slack
 * @returns {string}
 */
function textOf(store, row, time, slack) {
  if (time < 0) return "";
  const played = store.all[row.schedule];
  const { kept, schedule: { unit, messages } } = played;
  if (!played.proven || time > played.run.span) return "";
  if (row.kind === "memory") {
    const name = kept?.unit ?? "";
    const amount = amountText(name, amountAt(played.memory[row.index], time));
    const { peak, at } = played.memory[row.index];
    const operation = kept === null || at < 0 ? -1 : kept.changes.operation[at];
    const first = operation < 0 ? "" : `, first at ${played.schedule.operations.words[operation]}`;
    const names = kept === null ? [] : keptAt(played.plan, played.run, kept, row.index, time);
    const of = names.length === 0 ? "" : `\nof ${inShort(names)}`;
    return `P${row.index} keeps ${amount}${of}\nat most ${amountText(name, peak)}${first}`;
  }
  if (row.kind === "link") {
    const near = underWay(played.plan, played.run, row.index, time);
    const words = near.length > 0 ? near : atOnce(played, row.index, time, slack);
    const names = words.slice(0, 8).map((message) => messages.words[message]).join("\n");
    return `${messages.links[row.index].name}: ${countedText(near.length, "message")} on the way\n${names}`.trim();
  }
  if (row.kind === "host") {
    const { events, moves } = played.schedule;
    const names = [...listOf(played.plan.moves, row.index)].filter((move) => played.run.start[move] <= time && time < played.run.end[move]);
    return names.map((move) => `${moves.words[events.subject[move]]}, ${spanText(unit, played.run.start[move], played.run.end[move], "takes")}`).join("\n");
  }
  return row.kind === "sums" ? sumsText(played, row.index, time, slack) : "";
}

/**
 * Messages that take no time, near a time.
 * @param {Played} played
 * @param {number} link
 * @param {number} time
 * @param {number} slack
 * @returns {number[]}
 */
function atOnce({ plan, run, schedule: { messages } }, link, time, slack) {
  return [...listOf(plan.messages, link)].filter((row) => Math.abs(run.end[messages.flight[row]] - time) <= slack);
}

/**
 * The sums of a worker at a time: from their launch until they are over.
 * @param {Played} played
 * @param {number} worker
 * @param {number} time
 * @param {number} slack
 * @returns {string} a line for each
 */
function sumsText({ plan, run, schedule: { unit, sums } }, worker, time, slack) {
  const lines = Array.from(listOf(plan.launches, worker), (place) => {
    const sum = plan.sumOf[place];
    const [launched, over] = [run.end[sums.launches[place]], run.end[sums.event[sum]]];
    if (time < launched - slack || time > over + slack) return "";
    return `sum of the gradients of ${sums.words[sum]}, launched at ${timeText(unit, launched)}, over at ${timeText(unit, over)}`;
  });
  return lines.filter((line) => line !== "").join("\n");
}
