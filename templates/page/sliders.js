// Sliders for costs: each change plays the schedules again.

import { element } from "./dom.js";
import { numberText } from "./numbers.js";

/**
 * Adds a slider with a field of numbers for each cost.
 * @param {import("./store.js").Store} store
 * @param {HTMLElement} section
 */
export function showSliders(store, section) {
  const all = store.sliders();
  section.hidden = all.length === 0 || store.page.mistake !== null;
  const unit = store.page.schedules[0]?.unit ?? "";
  const source = store.page.trace === null ? "the profile's" : "the predicted ones";
  const words = unit === "" ? "Costs" : `Costs, as multiples of ${source}`;
  const back = element("button", { type: "button", click: () => store.setValues(all.map(({ name, value }) => [name, value])) }, "Reset");
  const lines = all.map((slider) => lineOf(store, slider));
  const remarks = store.page.schedules.flatMap((schedule) => schedule.remarks);
  const notes = element("ul", { class: "notes" }, ...[...new Set(remarks)].map((words) => element("li", {}, words)));
  section.append(element("h2", {}, words), ...lines.map(({ line }) => line), back, notes);
  store.listen((changed) => {
    if (changed.has("played")) lines.forEach(({ update }) => update());
  });
}

/**
 * @param {import("./store.js").Store} store
 * @param {Slider} slider
 * @returns {{ line: HTMLElement, update: () => void }}
 */
function lineOf(store, { name, label, max }) {
  const id = `cost-${name}`;
  const value = () => store.values.get(name) ?? 0;
  const refusal = element("p", { class: "refusal", id: `refusal-${name}`, "aria-live": "polite" });
  const refuse = (/** @type {boolean} */ refused) => {
    field.setAttribute("aria-invalid", String(refused));
    refusal.textContent = refused ? `A cost is a number from 0 on; ${numberText(value())} counts.` : "";
  };
  const set = (/** @type {Event} */ event) => {
    const entered = event.target instanceof HTMLInputElement ? event.target.valueAsNumber : NaN;
    const refused = !Number.isFinite(entered) || entered < 0;
    if (!refused) store.setValues([[name, entered]]);
    refuse(refused);
  };
  const range = element("input", { type: "range", id, min: 0, max, step: max / 200, value: value(), input: set });
  const field = element("input", { type: "number", min: 0, step: "any", value: value(), "aria-label": `${label}, as a number`, "aria-describedby": `refusal-${name}`, change: set });
  const update = () => {
    if (field.getAttribute("aria-invalid") === "true") refuse(false);
    range.value = String(value());
    range.setAttribute("aria-valuetext", numberText(value()));
    if (document.activeElement !== field) field.value = numberText(value());
  };
  return { line: element("div", { class: "slider" }, element("label", { for: id }, label), range, field, refusal), update };
}
