// What decides the end: the critical path, the slack of every event, and what an operation waits for.

import { criticalCycle } from "./period.js";
import { ROLE } from "./engine.js";

/**
 * Events from the first to the last of a critical path: each starts when the one before it ends. Without a flush they
 * are a cycle of the turn that repeats.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @returns {Int32Array}
 */
export function criticalPath(plan, run) {
  const { turn } = plan.schedule;
  if (turn !== null) return criticalCycle(turn, run.length, plan.preference).events;
  const { before, order, preference } = plan;
  const best = new Float64Array(plan.events);
  const previous = new Int32Array(plan.events).fill(-1);
  let last = -1;
  for (let number = 0; number < order.length; number++) {
    const event = order[number];
    const begin = run.end[event] - run.length[event] - run.rounding;
    let most = -1;
    for (let place = before.from[event]; place < before.from[event + 1]; place++) {
      const other = before.rows[place];
      if (run.end[other] >= begin && best[other] > most) {
        most = best[other];
        previous[event] = other;
      }
    }
    best[event] = Math.max(most, 0) + preference[event];
    if (run.end[event] >= run.span - run.rounding && (last < 0 || best[event] > best[last])) last = event;
  }
  const path = [];
  for (let event = last; event >= 0; event = previous[event]) path.push(event);
  return Int32Array.from(path.reverse());
}

/**
 * How much longer each event could take, by itself, before anything that is shown ends later.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @returns {Float64Array} per event
 */
export function slacks(plan, run) {
  const { before, order } = plan;
  const latest = new Float64Array(plan.events).fill(run.span);
  for (let number = order.length - 1; number >= 0; number--) {
    const event = order[number];
    const begin = latest[event] - run.length[event];
    for (let place = before.from[event]; place < before.from[event + 1]; place++) {
      const other = before.rows[place];
      if (begin < latest[other]) latest[other] = begin;
    }
  }
  return latest.map((time, event) => {
    const slack = time - run.end[event];
    return slack > run.rounding ? slack : 0;
  });
}

/**
 * Something that an operation waits for, or that waits for it.
 * @typedef {Object} Need
 * @property {"lane" | "message" | "sum"} by
 * @property {number} from event that has to end first
 * @property {number} to event that waits
 * @property {number} row of messages or sums; -1 of a lane
 * @property {boolean} decides whether the start of the one that waits is the moment at which this need is met
 */

/**
 * What the computes and steps of all lanes wait for: each for the one before it on its lane, and for the messages and
 * sums for which its lane waits in between.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @returns {Need[]} in the order of the lanes
 */
export function needs(plan, run) {
  const { messages, sums, workers } = plan.schedule;
  /** @type {Need[]} */
  const found = [];
  for (let worker = 0; worker < workers; worker++) {
    let last = -1;
    /** @type {number[]} */
    let waits = [];
    for (let event = plan.laneFrom[worker]; event < plan.laneFrom[worker + 1]; event++) {
      if (plan.role[event] === ROLE.WAIT) waits.push(event);
      if (plan.role[event] !== ROLE.COMPUTE && plan.role[event] !== ROLE.STEP) continue;
      const start = run.start[event] - run.rounding;
      if (last >= 0) found.push({ by: "lane", from: last, to: event, row: -1, decides: run.end[last] >= start });
      for (const wait of waits) {
        const row = plan.schedule.events.subject[wait];
        if (messages.wait[row] === wait) {
          const maker = plan.schedule.operations.event[messages.maker[row]];
          const decides = run.end[messages.flight[row]] >= start;
          found.push({ by: "message", from: maker, to: event, row, decides });
        } else if (plan.schedule.events.verbs[plan.schedule.events.verb[wait]] === "wait all_reduce") {
          if (sums.event[row] < 0) continue;
          const decides = run.end[sums.event[row]] >= start;
          found.push({ by: "sum", from: sums.event[row], to: event, row, decides });
        }
      }
      last = event;
      waits = [];
    }
  }
  return found;
}
