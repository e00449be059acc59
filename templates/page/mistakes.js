// A text that is not proven: what is wrong, in words above the lanes.

import { jump } from "./details.js";
import { element } from "./dom.js";
import { shortName } from "./words.js";

/**
 * Fills the box of the mistake, if there is one.
 * @param {import("./chart.js").Chart} chart
 * @param {HTMLElement} box
 */
export function showMistake(chart, box) {
  const { mistake, schedules } = chart.store.page;
  if (mistake === null) return;
  box.hidden = false;
  box.append(element("h2", {}, `${mistake.code}: ${mistake.title}`));
  box.append(...mistake.missing.filter((words) => words !== mistake.title).map((words) => element("p", {}, words)));
  if (schedules.length > 0 && mistake.operations.length > 0) {
    const places = Array.from(mistake.operations, (operation) => {
      return jump(chart, { schedule: 0, operation }, shortName(chart.store.all[0], operation));
    });
    box.append(element("p", {}, "On the lanes: ", ...places.flatMap((button, at) => (at === 0 ? [button] : [", ", button]))));
  }
  box.append(element("pre", { tabindex: 0 }, mistake.text));
}
