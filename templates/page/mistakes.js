// A text that is not proven: what is wrong, in words above the lanes.

import { jump } from "./details.js";
import { element, part } from "./dom.js";
import { shortName } from "./words.js";

/** Operations that are named at most; all are marked. */
const MOST_NAMED = 8;

/**
 * Fills the box of the mistake, if there is one: arrows in the order of their numbers on the lanes, and the first error;
 * notes and further errors unfold.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLElement} box
 */
export function showMistake(chart, box) {
  const { mistake, schedules } = chart.store.page;
  if (mistake === null) return;
  box.hidden = false;
  part("main", HTMLElement).classList.toggle("alone", schedules.length === 0);
  box.append(element("h2", {}, `${mistake.code}: ${mistake.title}`));
  box.append(...mistake.missing.filter((words) => words !== mistake.title).map((words) => element("p", {}, words)));
  const place = (/** @type {number} */ operation) => jump(chart, { schedule: 0, operation }, shortName(chart.store.all[0], operation));
  const [arrows, drawn] = schedules.length > 0 ? [mistake.arrows, Array.from(mistake.operations)] : [[], []];
  const others = drawn.filter((row) => !arrows.some(({ from, to }) => from === row || to === row));
  if (arrows.length > 0) {
    const lines = arrows.map(({ from, to, words }) => element("li", {}, place(from), " → ", place(to), `: ${words}`));
    box.append(element("ol", {}, ...lines));
  }
  if (others.length > 0) {
    const more = others.length > MOST_NAMED ? [`, and ${others.length - MOST_NAMED} more`] : [];
    box.append(element("p", {}, "On the lanes: ", ...others.slice(0, MOST_NAMED).flatMap((row, at) => (at === 0 ? [place(row)] : [", ", place(row)])), ...more));
  }
  const [first, rest] = parted(mistake.text);
  box.append(element("pre", { tabindex: 0 }, first));
  if (rest !== "") {
    const more = /^error/m.test(rest) ? "Notes and further errors" : "Notes";
    box.append(element("details", { open: schedules.length === 0 }, element("summary", {}, more), element("pre", { tabindex: 0 }, rest)));
  }
}

/**
 * The first error of what the compiler prints, without the title, and everything below it.
 * @param {string} text
 * @returns {[string, string]}
 */
function parted(text) {
  const [, ...lines] = text.split("\n");
  const end = lines.findIndex((line) => line === "" || line.startsWith("note:"));
  if (end < 0) return [lines.join("\n"), ""];
  return [lines.slice(0, end).join("\n"), lines.slice(end).join("\n").trim()];
}
