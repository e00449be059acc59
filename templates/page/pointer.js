// Mouse and touch: moving, zooming, pointing and choosing.

import { yOf } from "./layout.js";
import { markAt } from "./tips.js";

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
  /** @type {{ event: MouseEvent, seen: string } | null} */
  let pointed = null; // what the tip speaks of, and which part of the lanes was seen then

  const seen = () => `${camera.from} ${camera.scale} ${scroller.scrollTop} ${canvas.getBoundingClientRect().top}`;
  /** @param {MouseEvent} event */
  const say = (event) => {
    point(chart, tip, placeOf(event), event);
    pointed = { event, seen: seen() };
  };
  const fallSilent = () => {
    if (pointed === null) return;
    pointed = chart.pointed = null;
    tip.hidden = true;
    store.change({ hovered: null });
    chart.later();
  };
  // Wheels and keys move the lanes below a pointer that stays.
  chart.whenDrawn(() => pointed !== null && !chart.printing && pointed.seen !== seen() && say(pointed.event));
  addEventListener("scroll", (event) => event.target === document && fallSilent(), true);
  addEventListener("pointerdown", fallSilent, true);

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
      say(event);
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
    fallSilent();
    chart.later();
  });
  const release = (/** @type {PointerEvent} */ event) => {
    const was = held.delete(event.pointerId);
    if (held.size === 0) scroller.classList.remove("moving");
    if (event.type === "pointerup" && was && held.size === 0 && moved <= STILL) {
      choose(chart, placeOf(event));
      say(event);
    }
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  // A finger leaves when it is lifted; what its tap says stays until the next touch.
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && fallSilent());
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
 * What is at a point of the canvas.
 * @param {import("./chart.js").Chart} chart
 * @param {{ x: number, y: number }} point
 * @returns {import("./tips.js").Mark}
 */
function markUnder(chart, { x, y }) {
  const { row, time } = chart.at(x, y);
  if (row === null) return { operation: null, idle: null, text: "" };
  return markAt(chart.store, row, time, 3 / chart.camera.scale, isLower(chart, row, y));
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
  const { operation, idle } = markUnder(chart, place);
  chart.store.change({ selected: operation, idle, line: null });
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
  const { operation, text } = markUnder(chart, place);
  const { row, time } = chart.at(place.x, place.y);
  chart.pointed = row === null && place.y > chart.sight().top ? null : time;
  store.change({ hovered: operation });
  chart.later();
  tip.hidden = text === "";
  if (tip.hidden) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  const right = event.clientX + 14 + box.width > innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - 14 - box.width : event.clientX + 14)}px`;
  const above = event instanceof PointerEvent && event.pointerType === "touch"; // the finger hides what is below
  tip.style.top = `${above ? Math.max(4, event.clientY - 24 - box.height) : Math.min(innerHeight - box.height - 4, event.clientY + 16)}px`;
}
