// Recorded updates, made to look like a played schedule, so that lanes are drawn by the same functions.

import { grouped } from "./engine.js";
import { idleOfWorker } from "./search.js";

/**
 * The lanes of a recorded update. Boxes are operations, idle time is everything else; `operation`, `activity` and `line`
 * belong to boxes, `idleActivity` and `idleLine` to the stretches of idle time.
 * @typedef {{
 *   boxes: Boxes, operation: number[], activity: number[], line: number[], idleActivity: number[], idleLine: number[],
 *   end: number,
 * }} Measured
 */

/** Nanoseconds in a second. */
const NANOSECONDS = 1e9;

/**
 * @param {Trace} trace
 * @param {number} update
 * @param {Schedule} schedule
 * @returns {Measured}
 */
export function measuredOf(trace, update, schedule) {
  const { spans } = trace.updates[update];
  const time = (/** @type {number} */ nanoseconds) => trace.start + nanoseconds / NANOSECONDS;
  const { operations, workers } = schedule;
  const [computing, waiting] = [true, false].map((computes) =>
    [...Array(spans.worker.length).keys()].filter((span) => spans.operation[span] >= 0 === computes),
  );
  const operation = computing.map((span) => spans.operation[span]);
  const names = [...new Set(trace.activities.map(({ wait }) => wait))];
  return {
    boxes: {
      schedule: {
        ...schedule,
        operations: {
          ...operations,
          row: operation.map((row) => operations.row[row]),
          look: operation.map((row) => operations.look[row]),
          label: computing.map((span) => labelOf(schedule, spans.operation[span], trace.lines[spans.line[span]])),
          event: operation.map((row) => operations.event[row]),
        },
      },
      first: grouped(computing.map((span) => spans.worker[span]), workers).from,
      start: Float64Array.from(computing, (span) => time(spans.start[span])),
      end: Float64Array.from(computing, (span) => time(spans.end[span])),
      idle: {
        worker: waiting.map((span) => spans.worker[span]),
        start: waiting.map((span) => time(spans.start[span])),
        end: waiting.map((span) => time(spans.end[span])),
        cause: waiting.map((span) => names.indexOf(trace.activities[spans.activity[span]].wait)),
        names,
      },
    },
    operation,
    activity: computing.map((span) => spans.activity[span]),
    line: computing.map((span) => spans.line[span]),
    idleActivity: waiting.map((span) => spans.activity[span]),
    idleLine: waiting.map((span) => spans.line[span]),
    end: Array.from(spans.end).reduce((most, end) => Math.max(most, time(end)), 0),
  };
}

/**
 * The label of a recorded operation. In a stream it may stand for an operation of another turn, with another number.
 * @param {Schedule} schedule
 * @param {number} operation
 * @param {string} line as recorded
 * @returns {string}
 */
function labelOf({ operations }, operation, line) {
  const label = operations.label[operation];
  const number = line === operations.words[operation] ? null : /^\S+ m(\d+)/.exec(line);
  return number === null ? label : label.replace(/^\d+/, number[1]);
}

/**
 * The stretches of time that a worker spent in an activity.
 * @param {Measured} measured
 * @param {Chosen} chosen
 * @returns {{ start: number, end: number }[]}
 */
export function spansOf({ boxes, activity, idleActivity }, { worker, activity: wanted }) {
  const { first, start, end, idle } = boxes;
  const spans = [];
  for (let box = first[worker]; box < first[worker + 1]; box++) {
    if (activity[box] === wanted) spans.push({ start: start[box], end: end[box] });
  }
  const [low, high] = idleOfWorker(idle, worker);
  for (let at = low; at < high; at++) {
    if (idleActivity[at] === wanted) spans.push({ start: idle.start[at], end: idle.end[at] });
  }
  return spans;
}

/**
 * When an operation was recorded in the update that is shown, or null.
 * @param {Measured} measured
 * @param {number} wanted an operation
 * @returns {{ start: number, end: number } | null}
 */
export function recordedTime({ boxes, operation }, wanted) {
  const box = operation.indexOf(wanted);
  return box < 0 ? null : { start: boxes.start[box], end: boxes.end[box] };
}
