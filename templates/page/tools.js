// Buttons above the lanes.

import { element } from "./dom.js";
import { select, toggle } from "./keys.js";

/** @type {{ name: keyof State["shows"], words: string }[]} */
const LAYERS = [
  { name: "critical", words: "Critical path" },
  { name: "messages", words: "Messages" },
  { name: "memory", words: "Memory" },
  { name: "links", words: "Links" },
  { name: "differences", words: "Differences" },
  { name: "measured", words: "Recorded" },
  { name: "overview", words: "Overview" },
];

/**
 * Adds the buttons, and keeps them up to date.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLElement} bar
 * @param {HTMLDialogElement} dialog of the keys
 */
export function showTools(chart, bar, dialog) {
  const { store, camera } = chart;
  const zoom = (/** @type {() => void} */ change) => () => {
    change();
    chart.later();
  };
  const zooms = element(
    "span",
    { class: "group" },
    button("Closer", zoom(() => camera.zoom(1 / 1.5))),
    button("Farther", zoom(() => camera.zoom(1.5))),
    button("Whole", zoom(() => camera.showAll())),
  );
  const layers = LAYERS.filter(({ name }) => store.has[name]).map(({ name, words }) => ({ name, made: button(words, () => toggle(store, name)) }));
  bar.append(zooms, ...(layers.length > 0 ? [element("span", { class: "group" }, ...layers.map(({ made }) => made))] : []));
  const units = store.page.schedules[0]?.memory ?? [];
  if (units.length > 1) {
    const choose = (/** @type {Event} */ event) => {
      if (event.target instanceof HTMLSelectElement) store.change({ unit: Number(event.target.value) });
    };
    const options = units.map(({ name, unit }, number) => element("option", { value: number }, `${name} (${unit})`));
    bar.append(element("select", { "aria-label": "Unit of memory", change: choose }, ...options));
  }
  if (store.page.schedules.length > 0) bar.append(finder(chart));
  const mode = button("Dark", () => store.change({ dark: !store.state.dark }));
  bar.append(element("span", { class: "group apart" }, mode, button("Keys", () => dialog.showModal())));
  const update = () => {
    for (const { name, made } of layers) made.setAttribute("aria-pressed", String(store.state.shows[name]));
    mode.setAttribute("aria-pressed", String(store.state.dark));
    document.documentElement.classList.toggle("dark", store.state.dark);
  };
  store.listen((changed) => {
    if (changed.has("shows") || changed.has("dark")) update();
  });
  update();
}

/**
 * @param {string} words
 * @param {() => void} press
 * @returns {HTMLButtonElement}
 */
function button(words, press) {
  return element("button", { type: "button", click: press }, words);
}

/**
 * A field that selects the next operation which has all the words in it, as "B m3" or "m3 P2".
 * @param {import("./chart.js").Chart} chart
 * @returns {HTMLElement}
 */
function finder(chart) {
  const { all, state } = chart.store;
  const field = element("input", { type: "search", "aria-label": "Find an operation", placeholder: "find: B m3 s0", size: 14 });
  const find = () => {
    const wanted = field.value.trim().toLowerCase().split(/\s+/);
    const places = all.flatMap(({ schedule: { operations } }, schedule) =>
      operations.words.flatMap((words, operation) => {
        const known = `${words} P${operations.worker[operation]}`.toLowerCase().split(" ");
        return wanted.every((word) => known.includes(word)) ? [{ schedule, operation }] : [];
      }),
    );
    const { selected } = state;
    const isBehind = (/** @type {Place} */ place) =>
      selected === null || place.schedule > selected.schedule || (place.schedule === selected.schedule && place.operation > selected.operation);
    field.setAttribute("aria-invalid", String(places.length === 0 && field.value !== ""));
    select(chart, places.find(isBehind) ?? places[0] ?? null);
  };
  field.addEventListener("keydown", (event) => event.key === "Enter" && find());
  return field;
}
