// The selected operation: its time, what it waits for, what waits for it, and its lines in the texts.

import { element } from "./dom.js";
import { listOf } from "./engine.js";
import { CAUSES } from "./idle.js";
import { select } from "./keys.js";
import { makerOf, takerOf } from "./lines.js";
import { recordedTime } from "./measured.js";
import { spanText } from "./numbers.js";
import { awaited, differenceWords, needText, reason, shortName, slackText, whenText } from "./words.js";

/**
 * Keeps a section up to date with what is selected.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLElement} section
 * @param {(text: number) => void} openText
 */
export function showDetails(chart, section, openText) {
  const { store } = chart;
  const update = () => {
    const { selected, line, idle } = store.state;
    if (idle !== null) section.replaceChildren(...ofIdle(chart, idle));
    else if (selected !== null) section.replaceChildren(...detailsOf(chart, selected, openText));
    else if (line !== null) section.replaceChildren(...ofLine(store, line));
    else section.replaceChildren(element("h2", {}, "No operation selected"), hint());
  };
  store.listen((changed) => {
    if (changed.has("selected") || changed.has("idle") || changed.has("played") || changed.has("line") || changed.has("update")) update();
  });
  update();
}

/** @returns {HTMLElement} */
function hint() {
  const words = "Click an operation, idle time, or a line of a text, to see what it waits for and where it comes from.";
  return element("p", { class: "muted" }, words);
}

/**
 * @param {import("./store.js").Store} store
 * @param {{ text: number, line: number }} line
 * @returns {HTMLElement[]}
 */
function ofLine(store, { text, line }) {
  const { name, line: lines } = store.page.texts[text];
  const count = Array.from(lines).filter((number) => number === line).length;
  const title = element("h2", {}, `Line ${line} of ${name}`);
  return [title, element("p", { class: "muted" }, `${count} operations stand out. Click the line again for the first.`)];
}

/**
 * @param {import("./chart.js").Chart} chart
 * @param {Stretch} stretch
 * @returns {HTMLElement[]}
 */
function ofIdle(chart, { schedule, row }) {
  const played = chart.store.all[schedule];
  const { idle, schedule: { unit } } = played;
  const { operation, words } = awaited(played, row);
  const cause = idle.cause[row];
  const facts = [
    element("dt", {}, "time"),
    element("dd", {}, spanText(unit, idle.start[row], idle.end[row], "for")),
    element("dt", {}, CAUSES[cause]),
    element("dd", {}, reason(cause)),
  ];
  const parts = [element("h2", {}, `P${idle.worker[row]} is idle`), element("dl", {}, ...facts)];
  if (words === "") return parts;
  const maker = operation < 0 ? [] : [jump(chart, { schedule, operation }, shortName(played, operation)), ": "];
  return [...parts, element("h3", {}, "It waits for"), element("ul", { class: "waits" }, element("li", { class: "decides" }, ...maker, words))];
}

/**
 * @param {import("./chart.js").Chart} chart
 * @param {Place} place
 * @param {(text: number) => void} openText
 * @returns {HTMLElement[]}
 */
function detailsOf(chart, place, openText) {
  const { store } = chart;
  const played = store.all[place.schedule];
  const { operations, looks, unit } = played.schedule;
  const { operation } = place;
  const event = operations.event[operation];
  /** @type {[string, Node | string][]} */
  const facts = [["is", looks[operations.look[operation]].name]];
  for (const other of event < 0 ? [] : listOf(played.plan.operations, event)) {
    if (other !== operation) facts.push(["pair with", jump(chart, { schedule: place.schedule, operation: other }, shortName(played, other))]);
  }
  if (played.proven) {
    facts.push(["time", whenText(played, operation)]);
    facts.push(["slack", slackText(played, operation)]);
    if (played.isCritical[event] === 1) facts.push(["", "on the critical path"]);
  }
  const recorded = store.measured === null || place.schedule !== 0 ? null : recordedTime(store.measured, operation);
  if (recorded !== null) facts.push(["recorded", spanText(unit, recorded.start, recorded.end, "took")]);
  if (store.differences !== null) facts.push(comparison(chart, place, store.differences));
  const lines = place.schedule === 0 ? linesOf(store, operation, openText) : [];
  if (lines.length > 0) facts.push(["lines", element("span", {}, ...lines)]);
  const list = element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  const parts = [element("h2", {}, shortName(played, operation)), list];
  if (!played.proven) return parts;
  const before = played.needs.filter((need) => need.to === event);
  const after = played.needs.filter((need) => need.from === event);
  return [...parts, ...needsList(chart, place, before, false), ...needsList(chart, place, after, true)];
}

/**
 * @param {import("./chart.js").Chart} chart
 * @param {Place} place
 * @param {import("./paths.js").Need[]} needs
 * @param {boolean} after whether they wait for the operation
 * @returns {HTMLElement[]}
 */
function needsList(chart, place, needs, after) {
  const title = element("h3", {}, after ? "Waits for it" : "It waits for");
  if (needs.length === 0) return [title, element("p", { class: "muted" }, "nothing")];
  const played = chart.store.all[place.schedule];
  const lines = needs.map((need) => {
    const other = after ? takerOf(played, need) : makerOf(played, need);
    const line = element("li", { class: need.decides && !after ? "decides" : "" });
    if (other >= 0) line.append(jump(chart, { schedule: place.schedule, operation: other }, shortName(played, other)), ", ");
    line.append(needText(played, need, after));
    return line;
  });
  return [title, element("ul", { class: after ? "awaited" : "waits" }, ...lines)];
}

/**
 * A button that selects an operation.
 * @param {import("./chart.js").Chart} chart
 * @param {Place} place
 * @param {string} words
 * @returns {HTMLButtonElement}
 */
export function jump(chart, place, words) {
  return element("button", { type: "button", class: "plain", click: () => select(chart, place) }, words);
}

/**
 * @param {import("./chart.js").Chart} chart
 * @param {Place} place
 * @param {import("./differences.js").Differences} differences
 * @returns {[string, Node | string]}
 */
function comparison(chart, place, differences) {
  const { store } = chart;
  const other = store.all[1 - place.schedule].schedule.name;
  const match = store.matchOf(place);
  if (match === null) return ["beside it", `${other} has no such operation`];
  const first = place.schedule === 0 ? place.operation : match.operation;
  const words = differenceWords(store.all[1], differences, first);
  const link = jump(chart, match, `in ${other}`);
  return ["beside it", element("span", {}, link, place.schedule === 0 ? `: ${words}` : "")];
}

/**
 * Buttons for the lines of an operation, one for each text that has one.
 * @param {import("./store.js").Store} store
 * @param {number} operation
 * @param {(text: number) => void} openText
 * @returns {(Node | string)[]}
 */
function linesOf({ page }, operation, openText) {
  return page.texts.flatMap(({ name, line }, text) => {
    if (!(line[operation] > 0)) return [];
    const button = element("button", { type: "button", class: "plain", click: () => openText(text) }, `${name}:${line[operation]}`);
    return [button, " "];
  });
}
