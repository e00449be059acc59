// What colours, patterns and signs mean.

import { element } from "./dom.js";
import { CAUSES } from "./idle.js";
import { idleMean } from "./lanes.js";
import { idleLook, lookPattern, moveBox, swatch, themeOf } from "./theme.js";
import { reason } from "./words.js";

/** Looks that the legend shows at most. */
const MOST_LOOKS = 24;

/**
 * Patterns that only recorded lanes have, beside those of idle time.
 * @type {[string, string][]}
 */
const RECORDED = [
  ["message", "waits for a message"],
  ["sum", "waits for a sum"],
  ["send", "waits for a send"],
  ["post", "posts or loads"],
  ["bubble", "between operations, or done"],
];

/**
 * Keeps the legend up to date with the mode, and with the causes of idle time that there are.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLElement} legend
 */
export function showLegend(chart, legend) {
  const { store } = chart;
  let { strips } = chart;
  const update = () => legend.replaceChildren(...entries(store, strips));
  chart.whenDrawn(() => {
    if (strips === chart.strips) return;
    strips = chart.strips;
    update();
  });
  store.listen((changed) => {
    if (changed.has("dark") || changed.has("played") || changed.has("shows")) update();
  });
  update();
}

/**
 * @param {import("./store.js").Store} store
 * @param {boolean} strips whether some lane is drawn in mean colours
 * @returns {HTMLElement[]}
 */
function entries(store, strips) {
  const { all, state } = store;
  const { mode, dark } = themeOf(state.dark);
  /** @type {Map<string, { sample: HTMLCanvasElement, names: Set<string> }>} */
  const made = new Map();
  for (const { schedule } of all) {
    for (const { name, pattern, ...colours } of schedule.looks) {
      const { fill, ink } = colours[mode];
      const key = `${fill} ${pattern}`;
      const known = made.get(key);
      if (known !== undefined) known.names.add(name);
      else if (made.size < MOST_LOOKS) made.set(key, { sample: swatch(fill, lookPattern(pattern, ink)), names: new Set([name]) });
    }
  }
  const causes = CAUSES.flatMap((cause, number) => {
    if (!all.some(({ idle }) => idle.totals.some((totals) => totals[number] > 0))) return [];
    const { pattern, ground } = idleLook(cause, dark);
    return [entry(swatch(ground, pattern), cause, reason(number))];
  });
  // From afar a pattern is its mean colour, which most causes have in common.
  if (strips && causes.length > 0) causes.push(entry(swatch(hex(idleMean("fill", dark)), null), "idle time, from afar"));
  const waits = RECORDED.flatMap(([wait, name]) => {
    if (!state.shows.measured || !store.page.trace?.activities.some((activity) => activity.wait === wait)) return [];
    const { pattern, ground } = idleLook(wait, dark);
    return [entry(swatch(ground, pattern), name)];
  });
  const looks = [...made.values()].map(({ sample, names }) => entry(sample, [...names].join(" or ")));
  return [...looks, ...causes, ...waits, ...signs(store)];
}

/**
 * Entries of the signs that are drawn now.
 * @param {import("./store.js").Store} store
 * @returns {HTMLElement[]}
 */
function signs({ all, state: { shows, dark }, differences }) {
  const theme = themeOf(dark);
  const proven = all.filter((played) => played.proven);
  /** @type {[boolean, string, (context: CanvasRenderingContext2D) => void][]} */
  const known = [
    [shows.critical, "critical path", (context) => framed(context, theme.critical)],
    [proven.some(({ schedule }) => schedule.sums.launches.length > 0), "sum of gradients", (context) => wedge(context, theme.sum)],
    [hasMoves(proven, "offload"), "offload to the host", (context) => bar(context, theme, "offload")],
    [hasMoves(proven, "reload"), "reload from the host", (context) => bar(context, theme, "reload")],
    [shows.memory && proven.length > 0, "memory, its peak", (context) => hill(context, theme)],
    [shows.memory && proven.some(({ kept }) => kept !== null && kept.bound !== null), "bound", (context) => dashed(context, theme.muted)],
    [shows.differences && differences !== null, "on another worker", (context) => triangle(context, theme.difference, true)],
    [shows.differences && differences !== null, "after another operation", (context) => triangle(context, theme.difference, false)],
    [shows.differences && alone(differences), "only in this schedule", (context) => crossed(context, theme.difference)],
  ];
  return known.filter(([drawn]) => drawn).map(([, name, draw]) => entry(sign(draw), name));
}

/**
 * Whether any schedule has moves of a kind.
 * @param {Played[]} proven
 * @param {string} kind
 * @returns {boolean}
 */
function hasMoves(proven, kind) {
  return proven.some(({ schedule }) => schedule.moves.words.some((words) => words.startsWith(kind)));
}

/**
 * Whether some operation of two schedules has no match in the other one.
 * @param {import("./differences.js").Differences | null} differences
 * @returns {boolean}
 */
function alone(differences) {
  return differences !== null && (differences.added.length > 0 || differences.match.some((other) => other < 0));
}

/** @param {number[]} colour @returns {string} */
function hex(colour) {
  return `#${colour.map((value) => Math.round(value).toString(16).padStart(2, "0")).join("")}`;
}

/** @param {CanvasRenderingContext2D} context @param {string} ink */
function crossed(context, ink) {
  context.strokeStyle = ink;
  context.lineWidth = 1.5;
  context.stroke(new Path2D("M1 1H21V15H1ZL21 15"));
}

/** @param {CanvasRenderingContext2D} context @param {string} ink */
function framed(context, ink) {
  context.strokeStyle = ink;
  context.lineWidth = 2;
  context.strokeRect(1, 1, 20, 14);
}

/** @param {CanvasRenderingContext2D} context @param {Theme} theme @param {string} kind */
function bar(context, theme, kind) {
  moveBox(context, theme, kind, 1, 4, 20, 8);
}

/** @param {CanvasRenderingContext2D} context @param {string} ink */
function wedge(context, ink) {
  context.fillStyle = ink;
  context.fill(new Path2D("M6 4L10 10H2ZM8 7H21V11H10Z"));
}

/** @param {CanvasRenderingContext2D} context @param {Theme} theme */
function hill(context, theme) {
  context.fillStyle = theme.memoryFill;
  context.strokeStyle = theme.memory;
  context.fill(new Path2D("M0 16V12H8V5H22V16Z"));
  context.stroke(new Path2D("M0 12H8V5H22"));
  context.fillStyle = theme.memory;
  context.beginPath();
  context.arc(8, 5, 3, 0, 2 * Math.PI);
  context.fill();
}

/** @param {CanvasRenderingContext2D} context @param {string} ink */
function dashed(context, ink) {
  context.strokeStyle = ink;
  context.setLineDash([4, 3]);
  context.stroke(new Path2D("M0 8H22"));
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} ink
 * @param {boolean} filled
 */
function triangle(context, ink, filled) {
  context.beginPath();
  context.moveTo(4, 2);
  context.lineTo(16, 2);
  context.lineTo(4, 14);
  context.closePath();
  context.fillStyle = context.strokeStyle = ink;
  context.lineWidth = 1.5;
  if (filled) context.fill();
  context.stroke();
}

/**
 * @param {(context: CanvasRenderingContext2D) => void} draw
 * @returns {HTMLCanvasElement}
 */
function sign(draw) {
  const canvas = swatch("#00000000", null);
  const context = canvas.getContext("2d");
  if (context !== null) draw(context);
  return canvas;
}

/**
 * @param {HTMLCanvasElement} sample
 * @param {string} name
 * @param {string} words
 * @returns {HTMLElement}
 */
function entry(sample, name, words = "") {
  return element("span", { title: words }, sample, name);
}
