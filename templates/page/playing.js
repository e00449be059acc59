// Schedules as they are shown: played with the values of their sliders, or, where nothing is proven, in lane order.

import { linkCurves, memoryCurves } from "./curves.js";
import { play, prepare, ROLE } from "./engine.js";
import { idleTimes } from "./idle.js";
import { criticalPath, needs, slacks } from "./paths.js";
import { updateTime } from "./period.js";

/**
 * Plays a schedule. What was prepared for it before can be used again.
 * @param {Schedule} schedule
 * @param {number[]} values one per slider
 * @param {Memory | null} kept what is shown below the lanes
 * @param {import("./engine.js").Plan} plan
 * @returns {Played}
 */
export function playedWith(schedule, values, kept, plan = prepare(schedule)) {
  const proven = schedule.events.role.length > 0;
  const run = play(plan, values);
  const count = schedule.operations.event.length;
  const start = new Float64Array(count);
  const end = new Float64Array(count);
  const { first } = plan;
  if (proven) {
    for (let row = 0; row < count; row++) {
      const event = schedule.operations.event[row];
      start[row] = run.start[event];
      end[row] = run.end[event];
    }
  } else {
    placeInOrder(schedule, first, start, end);
    run.span = end.reduce((most, time) => Math.max(most, time), 0);
  }
  // What is not always shown is computed when it is first asked for.
  const critical = lazily(() => (proven ? criticalPath(plan, run) : new Int32Array(0)));
  const isCritical = lazily(() => marked(plan.events, critical()));
  const slack = lazily(() => slacks(plan, run));
  const links = lazily(() => (proven ? linkCurves(plan, run) : []));
  const waits = lazily(() => (proven ? needs(plan, run) : []));
  const update = proven ? updateTime(plan, run) : 0;
  const memory = proven && kept !== null ? memoryCurves(plan, run, kept) : [];
  return {
    ...{ schedule, plan, values, run, proven, start, end, first, update, kept, memory },
    bubbleRatio: proven ? bubbleRatioOf(plan, run, update) : 0,
    idle: proven ? idleTimes(plan, run) : { worker: [], start: [], end: [], cause: [], wait: [], totals: [] },
    get critical() {
      return critical();
    },
    get isCritical() {
      return isCritical();
    },
    get slack() {
      return slack();
    },
    get links() {
      return links();
    },
    get needs() {
      return waits();
    },
  };
}

/**
 * A value that is made when it is first asked for.
 * @template T
 * @param {() => T} make
 * @returns {() => T}
 */
function lazily(make) {
  /** @type {{ value: T } | null} */
  let made = null;
  return () => (made ??= { value: make() }).value;
}

/**
 * @param {number} count
 * @param {Int32Array} rows
 * @returns {Uint8Array} 1 for each of the rows
 */
function marked(count, rows) {
  const marks = new Uint8Array(count);
  for (const row of rows) marks[row] = 1;
  return marks;
}

/**
 * Gives each operation of a lane a unit of time: its clock, or the next one; both parts of a pair have the same.
 * @param {Schedule} schedule
 * @param {Int32Array} first
 * @param {Float64Array} start
 * @param {Float64Array} end
 */
function placeInOrder({ workers, operations, clocks }, first, start, end) {
  for (let worker = 0; worker < workers; worker++) {
    let time = 0;
    for (let row = first[worker]; row < first[worker + 1]; row++) {
      start[row] = clocks === null ? time : clocks[row];
      end[row] = start[row] + 1;
      if (operations.row[row] !== 1) time++;
    }
  }
}

/**
 * The idle share of the workers' time: of the span or, without a flush, of the steady state.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @param {number} update the time of an update
 * @returns {number}
 */
function bubbleRatioOf(plan, run, update) {
  const { turn, workers } = plan.schedule;
  let computing = 0;
  for (let at = 0; at < (turn === null ? plan.events : turn.events.length); at++) {
    const event = turn === null ? at : turn.events[at];
    if (plan.role[event] === ROLE.COMPUTE) computing += run.length[event];
  }
  const time = update * workers * (turn === null ? 1 : turn.updates);
  return time > 0 ? 1 - computing / time : 0;
}
