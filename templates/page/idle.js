// Idle time of workers by cause. The causes of a worker add up to its idle time: the span without what it computes, steps
// and posts.
//
//   link         both ends have posted the message that it waits for, and the message is on its way
//   sum          all members have launched the sum that it waits for, and the sum is running
//   host         it waits for a copy to its host or back
//   fill         it waits for its first operation
//   drain        its operations are over
//   imbalance    it waits for another worker, whose operations take longer than others of their kind
//   dependency   it waits for another worker for any other reason

import { ROLE } from "./engine.js";

/** Causes, by their numbers in stretches and totals. */
export const CAUSES = Object.freeze(["fill", "drain", "dependency", "link", "imbalance", "sum", "host"]);
const [FILL, DRAIN, DEPENDENCY, LINK, IMBALANCE, SUM, HOST] = CAUSES.keys();

/**
 * A stretch of idle time; several columns of one table.
 * @typedef {Object} Idle
 * @property {number[]} worker
 * @property {number[]} start
 * @property {number[]} end
 * @property {number[]} cause into CAUSES
 * @property {number[]} wait the event that waits; -1 behind the last event of a lane
 * @property {Float64Array[]} totals per worker and cause
 */

/**
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @returns {Idle}
 */
export function idleTimes(plan, run) {
  const { workers } = plan.schedule;
  const totals = Array.from({ length: workers }, () => new Float64Array(CAUSES.length));
  /** @type {Idle} */
  const idle = { worker: [], start: [], end: [], cause: [], wait: [], totals };
  const excess = excesses(plan, run);
  for (let worker = 0; worker < workers; worker++) {
    /** @param {number} wait @param {number} cause @param {number} start @param {number} end */
    const add = (wait, cause, start, end) => {
      if (end <= start) return;
      idle.worker.push(worker);
      idle.start.push(start);
      idle.end.push(end);
      idle.cause.push(cause);
      idle.wait.push(wait);
      totals[worker][cause] += end - start;
    };
    addLane(plan, run, worker, excess, add);
  }
  return idle;
}

/**
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @param {number} worker
 * @param {Float64Array | null} excess
 * @param {(wait: number, cause: number, start: number, end: number) => void} add
 */
function addLane(plan, run, worker, excess, add) {
  const [from, until] = [plan.laneFrom[worker], plan.laneFrom[worker + 1]];
  let [first, last] = [until, from - 1];
  for (let event = from; event < until; event++) {
    if (plan.role[event] !== ROLE.COMPUTE) continue;
    first = Math.min(first, event);
    last = event;
  }
  for (let event = from; event < until; event++) {
    if (plan.role[event] !== ROLE.WAIT) continue;
    const { awaited, posted, cause } = awaitedBy(plan, run, event);
    const [start, end] = [run.start[event], run.end[event]];
    const middle = Math.min(Math.max(posted, start), end);
    if (event < first) add(event, FILL, start, middle);
    else if (event > last) add(event, DRAIN, start, middle);
    else {
      const slow = excess === null ? 0 : Math.min(excessWithin(plan, run, excess, awaited, start, middle), middle - start);
      add(event, DEPENDENCY, start, middle - slow);
      add(event, IMBALANCE, middle - slow, middle);
    }
    add(event, cause, middle, end);
  }
  add(-1, DRAIN, until > from ? run.end[until - 1] : 0, run.span);
}

/**
 * What a wait waits for: the event, the time at which all workers have posted it, and the cause of idle time after that.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @param {number} wait
 * @returns {{ awaited: number; posted: number; cause: number }}
 */
function awaitedBy(plan, run, wait) {
  const { events, messages, moves, sums } = plan.schedule;
  const row = events.subject[wait];
  const verb = events.verbs[events.verb[wait]];
  if (verb === "wait move") return { awaited: moves.event[row], posted: run.start[wait], cause: HOST };
  if (verb === "wait all_reduce") {
    const awaited = sums.event[row];
    let posted = 0;
    for (let place = sums.launches_from[row]; place < sums.launches_from[row + 1]; place++) {
      posted = Math.max(posted, run.end[sums.launches[place]]);
    }
    return { awaited, posted, cause: SUM };
  }
  const posted = Math.max(run.end[messages.send[row]], run.end[messages.recv[row]]);
  return { awaited: verb === "wait send" ? messages.wire[row] : messages.flight[row], posted, cause: LINK };
}

/**
 * By how much each compute takes longer than the mean of those with the same kinds and sizes.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @returns {Float64Array | null} per event, 0 or more; null if all are 0
 */
function excesses(plan, run) {
  const groups = plan.like.reduce((most, number) => Math.max(most, number), -1) + 1;
  const sums = new Float64Array(groups);
  const counts = new Float64Array(groups);
  for (let event = 0; event < plan.events; event++) {
    if (plan.like[event] < 0) continue;
    sums[plan.like[event]] += run.length[event];
    counts[plan.like[event]]++;
  }
  const excess = new Float64Array(plan.events);
  let some = false;
  for (let event = 0; event < plan.events; event++) {
    if (plan.like[event] < 0) continue;
    const more = run.length[event] - sums[plan.like[event]] / counts[plan.like[event]];
    if (more <= run.rounding) continue;
    excess[event] = more;
    some = true;
  }
  return some ? excess : null;
}

/**
 * The excess of those events that decide when `event` starts, as far back as `start`: the chain of events each of which
 * starts when the one before it ends. An event that is there only in part counts in part.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @param {Float64Array} excess
 * @param {number} event
 * @param {number} start
 * @param {number} until
 * @returns {number}
 */
function excessWithin(plan, run, excess, event, start, until) {
  let sum = 0;
  while (event >= 0 && run.end[event] > start) {
    if (excess[event] > 0) {
      const [first, last] = [Math.max(start, run.end[event] - run.length[event]), Math.min(until, run.end[event])];
      if (last > first) sum += (excess[event] * (last - first)) / run.length[event];
    }
    let decided = -1;
    for (let place = plan.before.from[event]; place < plan.before.from[event + 1]; place++) {
      const other = plan.before.rows[place];
      if (decided < 0 || run.end[other] > run.end[decided]) decided = other;
    }
    event = decided;
  }
  return sum;
}
