// The keyboard: everything that mouse and touch can do.

import { element, table } from "./dom.js";
import { makerOf, takerOf } from "./lines.js";
import { idleAt, operationNear } from "./search.js";
import { idleText, sentence } from "./words.js";

/** @type {[string, string][]} */
const HELP = [
  ["← →", "the operation before and after on the lane"],
  ["↑ ↓", "the operation at the same time on the lane above and below"],
  ["Home End", "first and last operation of the lane"],
  ["[ ]", "what the operation waits for, what waits for it"],
  ["i", "the idle time before the operation"],
  ["+ −", "closer, farther"],
  ["0", "the whole schedule"],
  ["Shift ← →", "earlier, later"],
  ["c m k l d r o", "critical path, messages, memory, links, differences, what was recorded, overview"],
  ["Escape", "nothing selected"],
  ["?", "these keys"],
];

/**
 * Connects the keyboard with the lanes.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLDialogElement} dialog
 */
export function connectKeys(chart, dialog) {
  const { store, scroller, camera } = chart;
  const close = element("button", { type: "button", click: () => dialog.close() }, "Close");
  const rows = HELP.map(([keys, words]) => [element("kbd", {}, keys), words]);
  const title = element("h2", { id: "keys-title" }, "Keys, while the lanes have the focus");
  const wheel = "The wheel zooms while the lanes have the focus, or with Ctrl; with Shift it moves. A double click zooms.";
  dialog.append(title, table("Keys of the lanes", ["key", "does"], rows), element("p", {}, wheel), close);

  /** @type {Record<string, () => void>} */
  const actions = {
    "ArrowLeft": () => step(chart, -1),
    "ArrowRight": () => step(chart, 1),
    "ArrowUp": () => cross(chart, -1),
    "ArrowDown": () => cross(chart, 1),
    "Home": () => edge(chart, false),
    "End": () => edge(chart, true),
    "[": () => follow(chart, false),
    "]": () => follow(chart, true),
    "i": () => selectIdle(store),
    "+": () => camera.zoom(1 / 1.5, focusOf(chart)),
    "=": () => camera.zoom(1 / 1.5, focusOf(chart)),
    "-": () => camera.zoom(1.5, focusOf(chart)),
    "0": () => camera.showAll(),
    "c": () => toggle(store, "critical"),
    "m": () => toggle(store, "messages"),
    "k": () => toggle(store, "memory"),
    "l": () => toggle(store, "links"),
    "d": () => toggle(store, "differences"),
    "r": () => toggle(store, "measured"),
    "o": () => toggle(store, "overview"),
    "Escape": () => store.change({ selected: null, line: null, activity: null }),
    "?": () => dialog.showModal(),
  };
  scroller.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.shiftKey && event.key.startsWith("Arrow")) {
      if (event.key === "ArrowLeft") camera.pan(-100);
      if (event.key === "ArrowRight") camera.pan(100);
    } else if (actions[event.key] === undefined) return;
    else actions[event.key]();
    event.preventDefault();
    chart.later();
  });
}

/**
 * Turns a layer of the lanes on or off, if the page has it.
 * @param {import("./store.js").Store} store
 * @param {keyof State["shows"]} name
 */
export function toggle(store, name) {
  if (store.has[name]) store.change({ shows: { ...store.state.shows, [name]: !store.state.shows[name] } });
}

/**
 * Selects an operation, moves the lanes so that it is seen, and lets the live region say it.
 * @param {import("./chart.js").Chart} chart
 * @param {Place | null} place
 */
export function select(chart, place) {
  if (place === null) return;
  chart.store.change({ selected: place, line: null });
  chart.reveal(place);
}

/**
 * Selects the idle time before the selected operation, if there is any.
 * @param {import("./store.js").Store} store
 */
function selectIdle(store) {
  const { selected } = store.state;
  if (selected === null) return;
  const { schedule, operation } = selected;
  const { idle, start, run, schedule: { operations } } = store.all[schedule];
  const row = idleAt(idle, operations.worker[operation], start[operation] - 2 * run.rounding);
  if (row >= 0) store.change({ selected: null, idle: { schedule, row } });
}

/**
 * The time that stays where it is when keys zoom: that of the selected operation, if it is seen.
 * @param {import("./chart.js").Chart} chart
 * @returns {number}
 */
function focusOf({ store, camera }) {
  const { selected } = store.state;
  const middle = camera.from + camera.span / 2;
  if (selected === null) return middle;
  const played = store.all[selected.schedule];
  const time = (played.start[selected.operation] + played.end[selected.operation]) / 2;
  return time >= camera.from && time <= camera.from + camera.span ? time : middle;
}

/**
 * The first operation that is seen, where none is selected.
 * @param {import("./chart.js").Chart} chart
 * @returns {Place | null}
 */
function firstSeen({ store, camera }) {
  for (const [schedule, played] of store.all.entries()) {
    for (let worker = 0; worker < played.schedule.workers; worker++) {
      const operation = operationNear(played, worker, camera.from);
      if (operation >= 0) return { schedule, operation };
    }
  }
  return null;
}

/**
 * @param {import("./chart.js").Chart} chart
 * @param {number} by
 */
function step(chart, by) {
  const { selected } = chart.store.state;
  if (selected === null) return select(chart, firstSeen(chart));
  const { first, schedule } = chart.store.all[selected.schedule];
  const worker = schedule.operations.worker[selected.operation];
  const operation = Math.min(Math.max(selected.operation + by, first[worker]), first[worker + 1] - 1);
  select(chart, { schedule: selected.schedule, operation });
}

/**
 * @param {import("./chart.js").Chart} chart
 * @param {number} by lanes
 */
function cross(chart, by) {
  const { all, state } = chart.store;
  const { selected } = state;
  if (selected === null) return select(chart, firstSeen(chart));
  const played = all[selected.schedule];
  const time = (played.start[selected.operation] + played.end[selected.operation]) / 2;
  let { schedule } = selected;
  let worker = played.schedule.operations.worker[selected.operation];
  for (;;) {
    worker += by;
    if (worker < 0 && schedule > 0) worker = all[--schedule].schedule.workers - 1;
    if (worker >= all[schedule].schedule.workers && schedule < all.length - 1) [schedule, worker] = [schedule + 1, 0];
    if (worker < 0 || worker >= all[schedule].schedule.workers) return;
    const operation = operationNear(all[schedule], worker, time);
    if (operation >= 0) return select(chart, { schedule, operation });
  }
}

/**
 * @param {import("./chart.js").Chart} chart
 * @param {boolean} last
 */
function edge(chart, last) {
  const selected = chart.store.state.selected ?? firstSeen(chart);
  if (selected === null) return;
  const { first, schedule } = chart.store.all[selected.schedule];
  const worker = schedule.operations.worker[selected.operation];
  select(chart, { schedule: selected.schedule, operation: last ? first[worker + 1] - 1 : first[worker] });
}

/**
 * Selects what the selected operation waits for, that which decides its start if there is one, or what waits for it.
 * @param {import("./chart.js").Chart} chart
 * @param {boolean} forward
 */
function follow(chart, forward) {
  const { selected } = chart.store.state;
  if (selected === null) return;
  const played = chart.store.all[selected.schedule];
  const event = played.schedule.operations.event[selected.operation];
  const needs = played.needs.filter((need) => (forward ? need.from : need.to) === event);
  const crossing = needs.filter((need) => need.by === "message");
  const need = needs.find(({ decides, by }) => decides && by === "message") ?? crossing[0] ?? needs[0];
  if (need === undefined) return;
  const operation = forward ? takerOf(played, need) : makerOf(played, need);
  if (operation >= 0) select(chart, { schedule: selected.schedule, operation });
}

/**
 * Says each selection in the live region.
 * @param {import("./store.js").Store} store
 * @param {HTMLElement} region
 */
export function speak(store, region) {
  store.listen((changed) => {
    if (!changed.has("selected") && !changed.has("idle")) return;
    const { selected, idle } = store.state;
    if (idle !== null) region.textContent = idleText(store.all[idle.schedule], idle.row);
    else region.textContent = selected === null ? "nothing selected" : sentence(store.all[selected.schedule], selected.operation);
  });
}
