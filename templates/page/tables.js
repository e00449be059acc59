// Tables below the lanes: idle time by cause, memory, messages; two schedules stand beside each other.

import { keptAt } from "./curves.js";
import { jump } from "./details.js";
import { element, scrolled, table } from "./dom.js";
import { CAUSES } from "./idle.js";
import { amountText, countedText, differenceText, inShort, numberText, partOf, percent, signed, timeText } from "./numbers.js";
import { idleLook, swatch } from "./theme.js";
import { halvesText, reason } from "./words.js";

/** Workers up to which each has a column. */
const COLUMNS = 64;

/** Workers from which on the table of idle time takes all of the width. */
const BROAD = 5;

/**
 * Adds the tables, and keeps them up to date.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLElement} below
 */
export function showTables(chart, below) {
  const { store } = chart;
  const { mistake } = store.page;
  const makers = { compared: summary, idle: idleTable, memory: memoryTable, links: linkTable };
  const sections = Object.entries(makers).map(([name, make]) => {
    const section = element("section", { id: name });
    below.append(section);
    return { section, make };
  });
  const update = () => {
    for (const { section, make } of sections) {
      const parts = make(chart);
      section.hidden = parts.length === 0 || mistake !== null;
      section.className = make === idleTable && (store.all.length > 1 || store.all[0]?.schedule.workers >= BROAD) ? "broad" : "";
      section.replaceChildren(...parts);
    }
  };
  store.listen((changed) => {
    if (changed.has("played") || changed.has("dark")) update();
  });
  update();
}

/**
 * Two schedules beside each other.
 * @param {import("./chart.js").Chart} chart
 * @returns {HTMLElement[]}
 */
function summary({ store: { all, differences, page } }) {
  if (all.length < 2) return [];
  const [first, second] = all;
  const { unit } = first.schedule;
  const ratio = second.bubbleRatio - first.bubbleRatio;
  const rows = [
    ["time of an update", timeText(unit, first.update), timeText(unit, second.update), differenceText(unit, second.update - first.update)],
    ["bubble ratio", percent(first.bubbleRatio), percent(second.bubbleRatio), signed(ratio, percent(Math.abs(ratio)))],
    ["operations", String(first.start.length), String(second.start.length), ""],
  ];
  const made = table("Beside each other", ["figure", first.schedule.name, second.schedule.name, "difference"], rows);
  const parts = [scrolled(made, "Beside each other")];
  if (differences === null) return parts;
  const { match, moved, reordered, later, added } = differences;
  const of = (/** @type {ArrayLike<number>} */ column) => Array.from(column).filter((value) => value !== 0).length;
  const missing = Array.from(match).filter((other) => other < 0).length;
  const words = [
    `${of(moved)} on another worker`,
    `${of(reordered)} after another operation`,
    `${of(later)} at another time`,
    `${missing} only in the first, ${added.length} only in the second`,
  ];
  const halves = halvesText(first, second, differences, page.matched_by ?? []);
  if (halves !== "") words.push(halves);
  const notes = element("ul", { class: "notes" }, ...words.map((line) => element("li", {}, line)));
  return [...parts, element("h3", {}, `Of ${countedText(match.length, "operation")}`), notes];
}

/**
 * Idle time by cause.
 * @param {import("./chart.js").Chart} chart
 * @returns {HTMLElement[]}
 */
function idleTable({ store: { all, state } }) {
  const proven = all.filter((played) => played.proven);
  if (proven.length === 0) return [];
  // All times have one unit, in which the largest has a few digits before the point.
  const most = Math.max(...proven.flatMap(({ idle }) => idle.totals.flatMap((totals) => [...totals])));
  const part = partOf(proven[0].schedule.unit, most / 2);
  const columns = proven.length === 1 && proven[0].schedule.workers <= COLUMNS ? proven[0].idle.totals : [];
  const heads = ["cause", ...proven.flatMap(({ schedule: { name } }) => [proven.length > 1 ? name : "total", "share"])];
  const rows = CAUSES.flatMap((cause, number) => {
    const totals = proven.map((played) => idleOf(played, number));
    if (totals.every((total) => total === 0)) return [];
    const { pattern, ground } = idleLook(cause, state.dark);
    const named = element("span", { title: reason(number) }, swatch(ground, pattern), ` ${cause}`);
    const cells = proven.flatMap((played, place) => idleCells(played, totals[place], part.of));
    return [[named, ...cells, ...columns.map((worker) => numberText(worker[number] / part.of))]];
  });
  const sums = proven.flatMap((played) => {
    return idleCells(played, CAUSES.reduce((sum, _, number) => sum + idleOf(played, number), 0), part.of);
  });
  const ofWorkers = columns.map((worker) => numberText(worker.reduce((sum, time) => sum + time, 0) / part.of));
  rows.push(["all idle time", ...sums, ...ofWorkers]);
  const title = `Idle time by cause${part.name === "" ? "" : `, in ${part.name}`}`;
  const made = table(title, [...heads, ...columns.map((_, worker) => `P${worker}`)], rows);
  made.rows[made.rows.length - 1].className = "total";
  const words = proven.filter(({ schedule }) => schedule.turn !== null).map(({ schedule }) => ofStream(schedule, proven.length > 1));
  return [scrolled(made, title), ...words.map((line) => element("p", { class: "muted" }, line))];
}

/**
 * What the table counts of a stream, whose bubble ratio is that of its steady state.
 * @param {Schedule} schedule
 * @param {boolean} named
 * @returns {string}
 */
function ofStream({ name, updates }, named) {
  const shown = countedText(updates, "update");
  return `${named ? `${name}: of` : "Of"} the ${shown} above, with warm-up and drain; the bubble ratio is that of the steady state, without them.`;
}

/**
 * @param {Played} played
 * @param {number} cause
 * @returns {number}
 */
function idleOf({ idle }, cause) {
  return idle.totals.reduce((sum, totals) => sum + totals[cause], 0);
}

/**
 * @param {Played} played
 * @param {number} time
 * @param {number} part of the unit in which it is written
 * @returns {string[]}
 */
function idleCells({ schedule: { workers }, run }, time, part) {
  return [numberText(time / part), percent(run.span > 0 ? time / run.span / workers : 0)];
}

/**
 * Peaks of memory, with the operation at each.
 * @param {import("./chart.js").Chart} chart
 * @returns {HTMLElement[]}
 */
function memoryTable(chart) {
  const { all } = chart.store;
  return all.flatMap((played, schedule) => {
    if (played.kept === null || played.memory.length === 0) return [];
    const { unit, name, bound, changes } = played.kept;
    const rows = played.memory.map(({ peak, at }, worker) => {
      const operation = at < 0 ? -1 : changes.operation[at];
      const words = operation < 0 ? "from the start" : played.schedule.operations.words[operation];
      const cell = operation < 0 ? words : jump(chart, { schedule, operation }, words);
      const names = at < 0 || played.kept === null ? [] : keptAt(played.plan, played.run, played.kept, worker, timeOfChange(played, played.kept, at));
      return [`P${worker}`, amountText(unit, peak), cell, inShort(names), ...(bound === null ? [] : [amountText(unit, bound[worker])])];
    });
    const title = `Memory${name === "memory" ? "" : `: ${name}`}${all.length > 1 ? `, ${played.schedule.name}` : ""}`;
    const heads = ["worker", "most", "first at", "then kept", ...(bound === null ? [] : ["bound"])];
    return [scrolled(table(title, heads, rows), title)];
  });
}

/**
 * The time of a change of memory.
 * @param {Played} played
 * @param {Memory} memory
 * @param {number} change
 * @returns {number}
 */
function timeOfChange({ run, schedule: { operations } }, { changes }, change) {
  const event = operations.event[changes.operation[change]];
  return changes.at_end[change] ? run.end[event] : run.start[event];
}

/**
 * Messages of each link.
 * @param {import("./chart.js").Chart} chart
 * @returns {HTMLElement[]}
 */
function linkTable({ store: { all } }) {
  return all.flatMap((played) => {
    const { messages, name } = played.schedule;
    if (played.links.length === 0) return [];
    const counts = new Float64Array(messages.links.length);
    const bytes = new Float64Array(messages.links.length);
    for (let row = 0; row < messages.link.length; row++) {
      counts[messages.link[row]]++;
      bytes[messages.link[row]] += messages.bytes[row];
    }
    const sized = bytes.some((size) => size > 0);
    const rows = messages.links.map((link, number) => {
      const size = sized ? [amountText("bytes", bytes[number])] : [];
      return [link.name, String(counts[number]), ...size, String(played.links[number].peak)];
    });
    const title = `Messages${all.length > 1 ? `, ${name}` : ""}`;
    const heads = ["link", "messages", ...(sized ? ["bytes"] : []), "most on the way"];
    return [scrolled(table(title, heads, rows), title)];
  });
}
