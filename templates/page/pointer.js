// Mouse and touch: moving, zooming, pointing and choosing.

import { listOf } from "./engine.js";
import { CAUSES } from "./idle.js";
import { yOf } from "./layout.js";
import { amountText, countedText, spanText, timeText } from "./numbers.js";
import { recordedAt } from "./recorded.js";
import { firstAbove, idleOfWorker, operationAt } from "./search.js";
import { amountAt } from "./steps.js";
import { underWay } from "./curves.js";
import { reason, sentence } from "./words.js";

/** Pixels that a pointer may move in a click. */
const STILL = 5;

/**
 * Connects mouse and touch with the lanes.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLElement} tip
 */
export function connectPointer(chart, tip) {
  const { store, canvas, scroller, camera } = chart;
  /** @type {Map<number, { x: number, y: number }>} */
  const held = new Map();
  let moved = 0;

  /** @param {MouseEvent} event */
  const placeOf = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held.set(event.pointerId, placeOf(event));
    moved = held.size > 1 ? Infinity : 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = placeOf(event);
    const last = held.get(event.pointerId);
    if (last === undefined) {
      point(chart, tip, now, event);
      return;
    }
    moved += Math.abs(now.x - last.x) + Math.abs(now.y - last.y);
    const other = [...held].find(([id]) => id !== event.pointerId)?.[1];
    held.set(event.pointerId, now);
    if (other !== undefined) pinch(chart, last, now, other);
    else if (moved > STILL) {
      camera.pan(last.x - now.x);
      if (event.pointerType === "mouse") scroller.scrollTop += last.y - now.y;
      scroller.classList.add("moving");
    }
    tip.hidden = true;
    chart.later();
  });
  const release = (/** @type {PointerEvent} */ event) => {
    const was = held.delete(event.pointerId);
    if (held.size === 0) scroller.classList.remove("moving");
    if (event.type === "pointerup" && was && held.size === 0 && moved <= STILL) choose(chart, placeOf(event));
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
    chart.pointed = null;
    store.change({ hovered: null });
    chart.later();
  });
  canvas.addEventListener("dblclick", (event) => {
    camera.zoom(event.shiftKey ? 2 : 0.5, chart.at(placeOf(event).x, 0).time);
    chart.later();
  });
  canvas.addEventListener("wheel", (event) => turn(chart, event, placeOf(event)), { passive: false });
}

/**
 * Zooms with a wheel if a key is held or the lanes have the focus; moves with a wheel that turns sideways. Otherwise the
 * page scrolls.
 * @param {import("./chart.js").Chart} chart
 * @param {WheelEvent} event
 * @param {{ x: number }} place
 */
function turn(chart, event, { x }) {
  const { camera, scroller } = chart;
  const across = event.shiftKey ? event.deltaY + event.deltaX : event.deltaX;
  const zooms = event.ctrlKey || event.metaKey || document.activeElement === scroller;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) camera.pan(across);
  else if (zooms) camera.zoom(1.0015 ** event.deltaY, chart.at(x, 0).time);
  else return;
  event.preventDefault();
  chart.later();
}

/**
 * Moves and zooms so that what is under two fingers stays under them.
 * @param {import("./chart.js").Chart} chart
 * @param {{ x: number }} last
 * @param {{ x: number }} now
 * @param {{ x: number }} other
 */
function pinch({ camera, left }, last, now, other) {
  const [before, after] = [Math.abs(last.x - other.x), Math.abs(now.x - other.x)];
  if (before < 8 || after < 8) return;
  const time = camera.from + (other.x - (left ?? 0)) / camera.scale;
  camera.zoom(before / after, time);
}

/**
 * The operation at a point of the canvas, or null. Of a pair it is the part under the point.
 * @param {import("./chart.js").Chart} chart
 * @param {{ x: number, y: number }} point
 * @returns {Place | null}
 */
function operationUnder(chart, { x, y }) {
  const { row, time } = chart.at(x, y);
  if (row !== null && row.kind === "measured") {
    const { operation } = recordedAt(chart.store, row.index, time, 3 / chart.camera.scale, isLower(chart, row, y));
    return operation < 0 ? null : { schedule: 0, operation };
  }
  if (row === null || row.kind !== "lane") return null;
  const operation = operationAt(chart.store.all[row.schedule], row.index, time, 3 / chart.camera.scale, isLower(chart, row, y));
  return operation < 0 ? null : { schedule: row.schedule, operation };
}

/**
 * @param {import("./chart.js").Chart} chart
 * @param {Row} row
 * @param {number} y
 * @returns {boolean} whether a point is in the lower half of a row
 */
function isLower(chart, row, y) {
  return y > yOf(chart.sight(), row) + row.height / 2;
}

/**
 * @param {import("./chart.js").Chart} chart
 * @param {{ x: number, y: number }} place
 */
function choose(chart, place) {
  chart.scroller.focus({ preventScroll: true });
  chart.store.change({ selected: operationUnder(chart, place), line: null });
}

/**
 * Says what is under the pointer.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLElement} tip
 * @param {{ x: number, y: number }} place
 * @param {MouseEvent} event
 */
function point(chart, tip, place, event) {
  const { store } = chart;
  const hovered = operationUnder(chart, place);
  const { row, time } = chart.at(place.x, place.y);
  chart.pointed = row === null && place.y > chart.sight().top ? null : time;
  store.change({ hovered });
  chart.later();
  const recorded = row !== null && row.kind === "measured";
  const words = recorded ? recordedAt(store, row.index, time, 3 / chart.camera.scale, isLower(chart, row, place.y)).words : "";
  const known = hovered === null ? textOf(chart, row, time) : sentence(store.all[hovered.schedule], hovered.operation);
  const text = recorded ? words : known;
  tip.hidden = text === "";
  if (tip.hidden) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  const right = event.clientX + 14 + box.width > innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - 14 - box.width : event.clientX + 14)}px`;
  tip.style.top = `${Math.min(innerHeight - box.height - 4, event.clientY + 16)}px`;
}

/**
 * What is at a time of a row in which there is no operation.
 * @param {import("./chart.js").Chart} chart
 * @param {Row | null} row
 * @param {number} time
 * @returns {string}
 */
function textOf({ store, camera }, row, time) {
  if (row === null || time < 0) return "";
  const played = store.all[row.schedule];
  const { kept, schedule: { unit, messages, sums } } = played;
  if (!played.proven || time > played.run.span) return "";
  if (row.kind === "memory") {
    const name = kept?.unit ?? "";
    const amount = amountText(name, amountAt(played.memory[row.index], time));
    const { peak, at } = played.memory[row.index];
    const operation = kept === null || at < 0 ? -1 : kept.changes.operation[at];
    const first = operation < 0 ? "" : `, first at ${played.schedule.operations.words[operation]}`;
    return `P${row.index} keeps ${amount}\nat most ${amountText(name, peak)}${first}`;
  }
  if (row.kind === "link") {
    const slack = 3 / camera.scale;
    const near = underWay(played.plan, played.run, row.index, time);
    const words = near.length > 0 ? near : atOnce(played, row.index, time, slack);
    const names = words.slice(0, 8).map((message) => messages.words[message]).join("\n");
    return `${messages.links[row.index].name}: ${countedText(near.length, "message")} on the way\n${names}`.trim();
  }
  if (row.kind === "lane") {
    const { idle } = played;
    const [low, high] = idleOfWorker(idle, row.index);
    const at = firstAbove(idle.end, time, low, high);
    if (at === high || idle.start[at] > time) return "";
    const when = `${timeText(unit, idle.start[at])} to ${timeText(unit, idle.end[at])}`;
    return `P${row.index} is idle, ${when}\n${CAUSES[idle.cause[at]]}: ${reason(idle.cause[at])}`;
  }
  if (row.kind === "host") {
    const { events, moves } = played.schedule;
    const names = [...listOf(played.plan.moves, row.index)].filter((move) => played.run.start[move] <= time && time < played.run.end[move]);
    return names.map((move) => `${moves.words[events.subject[move]]}, ${spanText(unit, played.run.start[move], played.run.end[move], "takes")}`).join("\n");
  }
  if (row.kind === "sums") {
    for (const launch of listOf(played.plan.launches, row.index)) {
      const sum = played.schedule.events.subject[launch];
      const launched = played.run.end[launch];
      const over = sums.event[sum] < 0 ? launched : played.run.end[sums.event[sum]];
      if (time < launched - 5 / camera.scale || time > over + 5 / camera.scale) continue;
      return `sum of the gradients of ${sums.words[sum]}, launched at ${timeText(unit, launched)}, over at ${timeText(unit, over)}`;
    }
  }
  return "";
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
