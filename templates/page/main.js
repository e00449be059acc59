// The page: reads its document, and connects its parts.

import { Chart } from "./chart.js";
import { showDetails } from "./details.js";
import { element, part } from "./dom.js";
import { connectKeys, speak } from "./keys.js";
import { showLegend } from "./legend.js";
import { showMistake } from "./mistakes.js";
import { percent, timeText } from "./numbers.js";
import { connectPointer } from "./pointer.js";
import { loadDocument } from "./read.js";
import { showRecorded } from "./recorded.js";
import { showSliders } from "./sliders.js";
import { showStopped } from "./stopped.js";
import { isChanged, Store } from "./store.js";
import { showTables } from "./tables.js";
import { Texts } from "./texts.js";
import { showTools } from "./tools.js";

const DARK_MODE = matchMedia("(prefers-color-scheme: dark)");

/**
 * Shows a document.
 * @param {PageDocument} page
 */
function show(page) {
  const store = new Store(page, DARK_MODE.matches);
  part("picture", HTMLElement).hidden = part("details", HTMLElement).hidden = page.schedules.length === 0;
  const dialog = part("keys", HTMLDialogElement);
  const chart = new Chart(store, part("lanes", HTMLElement), part("tall", HTMLElement), part("canvas", HTMLCanvasElement));
  const texts = new Texts(chart, part("texts", HTMLElement));
  showTools(chart, part("tools", HTMLElement), dialog);
  showLegend(chart, part("legend", HTMLElement));
  showDetails(chart, part("details", HTMLElement), (text) => texts.open(text));
  showMistake(chart, part("mistake", HTMLElement));
  showStopped(chart, part("mistake", HTMLElement));
  const below = part("below", HTMLElement);
  const sliders = element("section");
  below.append(sliders);
  showSliders(store, sliders);
  showRecorded(chart, part("tools", HTMLElement), below, part("spoken", HTMLElement));
  showTables(chart, below);
  showNotes(store, below);
  showFigures(store, part("figures", HTMLElement));
  showAnswers(store, part("answers", HTMLElement));
  connectPointer(chart, part("tip", HTMLElement));
  connectKeys(chart, dialog);
  speak(store, part("spoken", HTMLElement));
  showHint(chart, part("hint", HTMLElement));
  let { dark } = store.state; // before it is printed, in light colours
  DARK_MODE.addEventListener("change", () => store.change({ dark: DARK_MODE.matches }));
  addEventListener("beforeprint", () => {
    dark = store.state.dark;
    store.change({ dark: false });
    chart.print(true);
  });
  addEventListener("afterprint", () => {
    store.change({ dark });
    chart.print(false);
  });
}

/**
 * Says how the lanes move, and how many of the messages are drawn.
 * @param {Chart} chart
 * @param {HTMLElement} line
 */
function showHint(chart, line) {
  const keys = "Drag to move. Zoom with the buttons, two fingers, Ctrl and the wheel, or + and −.";
  const update = () => {
    const words = chart.share > 1 ? `Too many messages to draw all: one of ${chart.share} on each link is drawn; closer there are more. ${keys}` : keys;
    if (line.textContent !== words) line.textContent = words;
  };
  chart.whenDrawn(update);
  update();
}

/**
 * Keeps the line of figures below the title up to date.
 * @param {Store} store
 * @param {HTMLElement} line
 */
function showFigures(store, line) {
  const measured = store.page.trace?.measured ?? null;
  const shown = () => store.all.filter(({ proven }) => proven);
  const update = () => line.replaceChildren(...shown().flatMap((played, place, all) => figuresOf(played, all, measured)));
  store.listen((changed) => {
    if (changed.has("played")) update();
  });
  update();
}

/**
 * Puts the compiler's answers below the figures, each a link to where it is said in full: what is proven, and, as long as
 * no slider has moved, speed, memory and what limits both.
 * @param {Store} store
 * @param {HTMLElement} line
 */
function showAnswers(store, line) {
  const { notes, trace } = store.page;
  if (trace !== null || !store.all.some(({ proven }) => proven)) return;
  const places = { speed: store.all.length > 1 ? "compared" : "said", memory: "memory", limit: "idle" };
  const answers = Object.entries(places).flatMap(([name, id]) => {
    const [words] = notes.filter((note) => note.startsWith(`${name}: `));
    if (words === undefined) return [];
    const shown = part("below", HTMLElement).querySelector(`#${id}:not([hidden])`) === null ? "said" : id;
    return [element("a", { href: `#${shown}` }, words.split(/; | \(/)[0])];
  });
  line.append(element("a", { href: "#said" }, "proven"), ...answers);
  store.listen((changed) => changed.has("played") && answers.forEach((answer) => (answer.hidden = store.isChanged)));
}

/**
 * @param {Played} played
 * @param {Played[]} all
 * @param {Trace["measured"]} measured
 * @returns {HTMLElement[]}
 */
function figuresOf({ schedule, update, bubbleRatio, plan, values }, all, measured) {
  const figure = (/** @type {string} */ name, /** @type {string} */ value) => element("span", {}, `${name} `, element("b", {}, value));
  const beside = all.length > 1 ? [element("span", {}, schedule.name)] : [];
  const before = isChanged(plan, values) ? [element("span", {}, `compiled: ${timeText(schedule.unit, schedule.facts.makespan)}`)] : [];
  const stream = schedule.turn === null ? "makespan" : "time of an update";
  const figures = [figure(stream, timeText(schedule.unit, update)), figure(measured === null ? "bubble ratio" : "bubble ratio, with steps", percent(bubbleRatio))];
  if (measured !== null) {
    figures.splice(1, 0, figure("measured", timeText("s", measured.seconds)));
    const of = measured.updates === 1 ? "one update" : `${measured.updates} updates`;
    figures.push(figure("measured", percent(measured.bubble_ratio)), element("span", {}, `mean of ${of}`));
  }
  return [element("div", {}, ...beside, ...figures, ...before)];
}

/**
 * Adds what was said of the schedule as it was compiled; once a slider has moved, with a remark that this is so.
 * @param {Store} store
 * @param {HTMLElement} below
 */
function showNotes(store, below) {
  const { notes, trace } = store.page;
  if (notes.length === 0) return;
  const lines = notes.map((note) => element("li", {}, note));
  const words = "It speaks of the costs with which the schedule was compiled; lanes, figures and tables are those of the sliders.";
  const remark = element("p", { class: "stale", role: "note" }, words);
  below.append(element("section", { id: "said" }, element("h2", {}, trace === null ? "What the compiler says" : "About the run"), remark, element("ul", { class: "notes" }, ...lines)));
  const update = () => (remark.hidden = !store.isChanged);
  store.listen((changed) => changed.has("played") && update());
  update();
}

show(await loadDocument());
document.documentElement.dataset.ready = "yes";
performance.mark("ready");
