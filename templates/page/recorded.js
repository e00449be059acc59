// What ranks recorded: the choice of an update, the table of what took longer or shorter than predicted, its boxes.

import { element, scrolled, table } from "./dom.js";
import { rowOf, xOf, yOf } from "./layout.js";
import { spansOf } from "./measured.js";
import { countedText, numberText, partOf, percent, signed, spanText, timeText } from "./numbers.js";
import { firstAbove, idleOfWorker, operationAt } from "./search.js";

/** Lines of the table, the longest first; more of them are behind a button. */
const FEW = 12;

/**
 * Adds the choice of an update to the tools, and the table below the lanes.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLElement} bar
 * @param {HTMLElement} below
 * @param {HTMLElement} spoken
 */
export function showRecorded(chart, bar, below, spoken) {
  const { store } = chart;
  const { trace } = store.page;
  if (trace === null) return;
  if (store.measured !== null && trace.start > 0) chart.frame(trace.start, store.measured.end);
  if (trace.updates.length > 1) bar.insertBefore(choiceOf(store, trace), bar.lastElementChild);
  if (trace.residuals.length === 0) return;
  const section = element("section", { class: "broad" });
  below.append(section);
  const lines = linesOfTable(chart, trace, spoken);
  const build = (/** @type {number} */ most) => section.replaceChildren(residualTable(trace, lines.slice(0, most)));
  const showAll = () => {
    build(Infinity);
    lines[FEW].button.focus();
  };
  build(FEW);
  if (lines.length > FEW) section.append(element("button", { type: "button", click: showAll }, `All ${lines.length} lines`));
  store.listen((changed) => {
    if (changed.has("activity")) for (const { button, isChosen } of lines) button.setAttribute("aria-pressed", String(isChosen()));
  });
}

/**
 * @param {import("./store.js").Store} store
 * @param {Trace} trace
 * @returns {HTMLElement}
 */
function choiceOf(store, { updates, typical, hang }) {
  const options = updates.map(({ name, seconds }, number) => {
    const words = `${name}: ${timeText("s", seconds)}${number === typical && hang === null ? ", typical" : ""}`;
    return element("option", { value: number, selected: number === typical }, words);
  });
  const choose = (/** @type {Event} */ event) => {
    if (event.target instanceof HTMLSelectElement) store.change({ update: Number(event.target.value) });
  };
  const chosen = element("select", { "aria-label": "Recorded update", change: choose }, ...options);
  const move = (/** @type {number} */ by) => () => {
    const number = Math.min(Math.max(store.state.update + by, 0), updates.length - 1);
    chosen.value = String(number);
    store.change({ update: number });
  };
  const before = element("button", { type: "button", "aria-label": "Update before", click: move(-1) }, "‹");
  const after = element("button", { type: "button", "aria-label": "Update after", click: move(1) }, "›");
  return element("span", { class: "group" }, before, chosen, after);
}

/**
 * Predicted and measured time of an activity of a worker. A press on its button shows its boxes, or nothing again.
 * @typedef {Trace["residuals"][number] & { difference: number, share: number, button: HTMLButtonElement, isChosen: () => boolean }} Line
 */

/**
 * The lines of the table, the largest difference first.
 * @param {import("./chart.js").Chart} chart
 * @param {Trace} trace
 * @param {HTMLElement} spoken
 * @returns {Line[]}
 */
function linesOfTable(chart, { residuals, activities }, spoken) {
  const total = new Map();
  for (const { worker, measured } of residuals) total.set(worker, (total.get(worker) ?? 0) + measured);
  const lines = residuals.map((residual) => {
    const { worker, activity, predicted, measured } = residual;
    const isChosen = () => {
      const chosen = chart.store.state.activity;
      return chosen !== null && chosen.worker === worker && chosen.activity === activity;
    };
    const click = () => chooseActivity(chart, spoken, isChosen() ? null : { worker, activity });
    const words = `P${worker}: ${activities[activity].name}`;
    const button = element("button", { type: "button", class: "plain", "aria-pressed": "false", click }, words);
    const share = total.get(worker) > 0 ? measured / total.get(worker) : 0;
    return { ...residual, difference: measured - predicted, share, button, isChosen };
  });
  return lines.sort((one, other) => Math.abs(other.difference) - Math.abs(one.difference));
}

/**
 * @param {Trace} trace
 * @param {Line[]} lines
 * @returns {HTMLElement}
 */
function residualTable({ residuals }, lines) {
  const unit = partOf("s", Math.max(...residuals.map(({ predicted, measured }) => Math.max(predicted, measured))) / 2);
  const time = (/** @type {number} */ seconds) => numberText(seconds / unit.of);
  const rows = lines.map(({ button, predicted, measured, difference, share }) => [
    ...[button, time(predicted), time(measured), signed(difference, time(Math.abs(difference))), percent(share)],
  ]);
  const heads = ["of an update", "predicted", "measured", "difference", "share"];
  const title = "Predicted and measured";
  return scrolled(table(`${title}, in ${unit.name}: a line shows its boxes`, heads, rows), title);
}

/**
 * Outlines what a worker did in an activity, and moves the lanes to the longest span of it.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLElement} spoken
 * @param {Chosen | null} chosen
 */
function chooseActivity(chart, spoken, chosen) {
  const { store } = chart;
  const shows = { ...store.state.shows, measured: store.state.shows.measured || chosen !== null };
  store.change({ activity: chosen, shows });
  if (chosen === null || store.measured === null || store.page.trace === null) return;
  const spans = spansOf(store.measured, chosen);
  const longest = spans.reduce((most, span) => (span.end - span.start > most.end - most.start ? span : most), spans[0]);
  const { name } = store.page.trace.activities[chosen.activity];
  if (longest === undefined) {
    spoken.textContent = `P${chosen.worker}, ${name}: too short to be seen in this update`;
    return;
  }
  const length = timeText("s", longest.end - longest.start);
  spoken.textContent = `P${chosen.worker}, ${name}: ${countedText(spans.length, "span")}, the longest of ${length}`;
  chart.revealMeasured(chosen.worker, longest.start, longest.end);
}

/**
 * Outlines the spans of the chosen activity.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {import("./measured.js").Measured} measured
 * @param {Chosen} chosen
 */
export function drawActivity(sight, rows, measured, chosen) {
  const row = rowOf(rows, "measured", 0, chosen.worker);
  if (row === null) return;
  const { context, theme, scale } = sight;
  context.strokeStyle = theme.select;
  context.lineWidth = 2;
  for (const { start, end } of spansOf(measured, chosen)) {
    context.strokeRect(xOf(sight, start) - 1, yOf(sight, row) - 1, Math.max(2, (end - start) * scale + 2), row.height + 2);
  }
}

/**
 * What a worker did at a time of the recorded update: its words, and the operation if it was one.
 * @param {import("./store.js").Store} store
 * @param {number} worker
 * @param {number} time
 * @param {number} slack
 * @param {boolean} lower whether the lower half of the lane is meant
 * @returns {{ words: string, operation: number }}
 */
export function recordedAt({ measured, page: { trace } }, worker, time, slack, lower) {
  if (measured === null || trace === null) return { words: "", operation: -1 };
  const { boxes, operation, line, idleLine, idleActivity } = measured;
  const box = operationAt(boxes, worker, time, slack, lower);
  if (box >= 0) {
    const words = `${trace.lines[line[box]]} as recorded on P${worker}, ${spanText("s", boxes.start[box], boxes.end[box], "took")}`;
    return { words, operation: operation[box] };
  }
  const { idle } = boxes;
  const [low, high] = idleOfWorker(idle, worker);
  const at = firstAbove(idle.end, time - slack, low, high);
  if (at === high || idle.start[at] > time + slack) return { words: "", operation: -1 };
  const { name } = trace.activities[idleActivity[at]];
  const did = trace.lines[idleLine[at]];
  const words = did === name ? did : `${did}\n${name}`;
  return { words: `P${worker}, ${spanText("s", idle.start[at], idle.end[at], "took")}\n${words}`, operation: -1 };
}
