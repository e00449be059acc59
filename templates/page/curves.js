// Amounts over time: what every worker keeps, and what is under way on every link.

import { grouped, listOf } from "./engine.js";

/**
 * An amount over time: from times[i] on it is amounts[i], until times[i + 1]; the first time is 0.
 * @typedef {Object} Curve
 * @property {Float64Array} times
 * @property {Float64Array} amounts
 * @property {number} peak the largest amount
 * @property {number} at row of the change that reaches the peak first, or -1 if the curve begins with it
 */

/**
 * What every worker keeps in one unit. Where changes come at the same time, the order of the document counts.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @param {Memory} memory
 * @returns {Curve[]} per worker; a change is a row of `memory.changes`
 */
export function memoryCurves(plan, run, memory) {
  const { worker, operation, at_end, amount } = memory.changes;
  const rows = grouped(worker, plan.schedule.workers);
  return Array.from({ length: plan.schedule.workers }, (_, number) => {
    const changes = listOf(rows, number);
    const times = new Float64Array(changes.length);
    const amounts = new Float64Array(changes.length);
    changes.forEach((row, place) => {
      const event = plan.schedule.operations.event[operation[row]];
      times[place] = at_end[row] ? run.end[event] : run.start[event];
      amounts[place] = amount[row];
    });
    return curve(memory.start[number], changes, times, amounts);
  });
}

/**
 * Of which micro-batches and stages a worker keeps something at a time, in the order in which they came.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @param {Memory} memory
 * @param {number} worker
 * @param {number} time
 * @returns {string[]} as "m3 s1"
 */
export function keptAt({ schedule: { operations } }, run, { changes }, worker, time) {
  /** @type {Map<number, number>} */
  const amounts = new Map();
  for (let row = 0; row < changes.worker.length; row++) {
    if (changes.worker[row] !== worker) continue;
    const event = operations.event[changes.operation[row]];
    if ((changes.at_end[row] ? run.end[event] : run.start[event]) > time) continue;
    amounts.set(changes.of[row], (amounts.get(changes.of[row]) ?? 0) + changes.amount[row]);
  }
  const most = Math.max(...amounts.values(), 0);
  const kept = [...amounts].filter(([, amount]) => amount > most * 1e-9);
  return kept.map(([of]) => operations.words[of].split(" ").slice(1).join(" "));
}

/**
 * The messages on every link, from the start of their transfers to their arrivals, each as one.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @returns {Curve[]} per link; a change is a row of messages
 */
export function linkCurves(plan, run) {
  const { messages } = plan.schedule;
  return messages.links.map((_, link) => {
    const own = listOf(plan.messages, link);
    const changes = new Int32Array(2 * own.length);
    changes.set(own);
    changes.set(own, own.length);
    const times = new Float64Array(changes.length);
    const amounts = new Float64Array(changes.length);
    own.forEach((row, place) => {
      times[place] = run.end[messages.flight[row]];
      amounts[place] = -1;
      times[own.length + place] = run.start[messages.wire[row]];
      amounts[own.length + place] = 1;
    });
    return curve(0, changes, times, amounts);
  });
}

/**
 * Messages that are on their way on a link at a time.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @param {number} link
 * @param {number} time
 * @returns {number[]} rows of messages
 */
export function underWay(plan, run, link, time) {
  const { wire, flight } = plan.schedule.messages;
  return [...listOf(plan.messages, link)].filter((row) => run.start[wire[row]] <= time && time < run.end[flight[row]]);
}

/**
 * @param {number} first amount at time 0, before any change
 * @param {Int32Array} rows of the changes
 * @param {Float64Array} times of the changes
 * @param {Float64Array} changes
 * @returns {Curve}
 */
function curve(first, rows, times, changes) {
  const order = sortedPlaces(times);
  const points = { times: new Float64Array(rows.length + 1), amounts: new Float64Array(rows.length + 1) };
  points.amounts[0] = first;
  let [amount, peak, at] = [first, first, -1];
  order.forEach((place, number) => {
    amount += changes[place];
    points.times[number + 1] = times[place];
    points.amounts[number + 1] = amount;
    if (amount > peak) [peak, at] = [amount, rows[place]];
  });
  return { ...points, peak, at };
}

/**
 * Places of times in order; those of equal times keep their order. Mostly times are in order, or are two lists in order,
 * which the sort of an array only merges.
 * @param {Float64Array} times
 * @returns {number[]}
 */
function sortedPlaces(times) {
  const places = Array.from(times.keys());
  if (times.every((time, place) => place === 0 || time >= times[place - 1])) return places;
  return places.sort((one, other) => times[one] - times[other] || one - other);
}
