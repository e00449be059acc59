// Replay of a schedule: when every event starts and ends, for given values of the sliders.
//
// prepare(schedule) does once what no slider changes; play(plan, values) takes time linear in the waits. Events,
// operations, messages and sums are given by their rows in the document.

import { sharedLengths } from "./ports.js";

/** Roles of events, by their numbers in the document. */
export const ROLE = Object.freeze({
  BEGIN: 0,
  COMPUTE: 1,
  STEP: 2,
  POST: 3,
  NOTICE: 4,
  WIRE: 5,
  FLIGHT: 6,
  SUM: 7,
  WAIT: 8,
  MOVE: 9,
});

/**
 * A list of rows for every number: list i is `rows[from[i]]` up to, not including, `rows[from[i + 1]]`.
 * @typedef {Object} Lists
 * @property {Int32Array} from one longer than there are lists
 * @property {Int32Array} rows
 */

/**
 * What does not depend on the sliders.
 * @typedef {Object} Plan
 * @property {Schedule} schedule
 * @property {number} events how many there are
 * @property {Lists} before the events that each event waits for
 * @property {Lists} after the events that wait for each event
 * @property {Int32Array} order every event after all that it waits for
 * @property {Uint8Array} role
 * @property {Int32Array} form
 * @property {Int32Array} first the operations of worker w are first[w] up to, not including, first[w + 1]
 * @property {Lists} messages of each link
 * @property {Lists} launches places in `sums.launches`, of each worker
 * @property {Int32Array} sumOf the sum that is launched at each of these places
 * @property {Lists} moves events that copy memory between each worker and its host
 * @property {Float64Array} preference weight of each event among critical paths of equal length
 * @property {Int32Array} laneFrom the events of worker w are laneFrom[w] up to, not including, laneFrom[w + 1]
 * @property {Lists} operations the operations of each event: two of a pair
 * @property {Int32Array} like computes of the same kinds and sizes have the same number; -1 for other events
 * @property {Float64Array} values where the sliders stand at first
 */

/**
 * Times of all events. A wait starts when the event before it on its lane ends.
 * @typedef {Object} Run
 * @property {Float64Array} length
 * @property {Float64Array} start
 * @property {Float64Array} end
 * @property {number} span end of the last event
 * @property {number} rounding a difference of times up to this one is none
 */

/**
 * @param {Schedule} schedule
 * @returns {Plan}
 */
export function prepare(schedule) {
  const { events, operations, messages, sums, workers } = schedule;
  const count = events.form.length;
  const before = { from: new Int32Array(events.before_from), rows: new Int32Array(events.before) };
  const after = inverted(before);
  const rows = grouped(operations.event, count);
  return {
    schedule,
    events: count,
    before,
    after,
    order: ordered(before, after),
    role: new Uint8Array(events.role),
    form: new Int32Array(events.form),
    laneFrom: new Int32Array(events.lane_from),
    first: grouped(operations.worker, workers).from,
    messages: grouped(messages.link, messages.links.length),
    moves: movesOf(schedule),
    launches: grouped(Array.from(sums.launches, (event) => events.worker[event]), workers),
    sumOf: owners({ from: new Int32Array(sums.launches_from), rows: new Int32Array(sums.launches) }),
    preference: preferences(schedule, rows),
    operations: rows,
    like: numbered(operations, rows, count),
    values: Float64Array.from(schedule.sliders, (slider) => slider.value),
  };
}

/**
 * @param {Schedule} schedule
 * @returns {Lists} the events that copy memory, of each worker
 */
function movesOf({ moves, events, workers }) {
  const { from, rows } = grouped(Array.from(moves.event, (event) => events.worker[event]), workers);
  return { from, rows: rows.map((row) => moves.event[row]) };
}

/**
 * @param {Plan} plan
 * @param {ArrayLike<number>} values of the sliders, in the order of the document
 * @returns {Run}
 */
export function play(plan, values) {
  const alone = lengths(plan, values);
  return played(plan, sharedLengths(plan, alone));
}

/**
 * Length of every event; of a message on a shared link, the length that it has alone there.
 * @param {Plan} plan
 * @param {ArrayLike<number>} values
 * @returns {Float64Array}
 */
export function lengths(plan, values) {
  const lengthOf = Float64Array.from(plan.schedule.events.forms, ({ of }) =>
    of.reduce((sum, [slider, factor]) => sum + factor * values[slider], 0),
  );
  const { form } = plan;
  const length = new Float64Array(plan.events);
  for (let event = 0; event < plan.events; event++) length[event] = lengthOf[form[event]];
  return length;
}

/**
 * Times of all events from their lengths.
 * @param {Plan} plan
 * @param {Float64Array} length
 * @returns {Run}
 */
export function played(plan, length) {
  const { before, order, role } = plan;
  const start = new Float64Array(plan.events);
  const end = new Float64Array(plan.events);
  let span = 0;
  for (let number = 0; number < order.length; number++) {
    const event = order[number];
    let begin = 0;
    for (let place = before.from[event]; place < before.from[event + 1]; place++) {
      const other = end[before.rows[place]];
      if (other > begin) begin = other;
    }
    start[event] = role[event] === ROLE.WAIT ? end[event - 1] : begin;
    end[event] = begin + length[event];
    if (end[event] > span) span = end[event];
  }
  return { length, start, end, span, rounding: span * 1e-10 };
}

/**
 * @param {Lists} lists
 * @param {number} number
 * @returns {Int32Array}
 */
export function listOf(lists, number) {
  return lists.rows.subarray(lists.from[number], lists.from[number + 1]);
}

/**
 * Rows by the number that each one has: list i has the rows whose number is i, in order.
 * @param {ArrayLike<number>} numbers
 * @param {number} count of lists
 * @returns {Lists}
 */
export function grouped(numbers, count) {
  const from = new Int32Array(count + 1);
  for (let row = 0; row < numbers.length; row++) from[numbers[row] + 1]++;
  for (let number = 0; number < count; number++) from[number + 1] += from[number];
  const next = from.slice();
  const rows = new Int32Array(numbers.length);
  for (let row = 0; row < numbers.length; row++) rows[next[numbers[row]]++] = row;
  return { from, rows };
}

/**
 * The number of the list that each place of `lists.rows` belongs to.
 * @param {Lists} lists
 * @returns {Int32Array}
 */
function owners(lists) {
  const owner = new Int32Array(lists.rows.length);
  for (let list = 0; list + 1 < lists.from.length; list++) owner.fill(list, lists.from[list], lists.from[list + 1]);
  return owner;
}

/**
 * For each row the numbers of the lists that have it; there are as many rows as lists.
 * @param {Lists} lists
 * @returns {Lists}
 */
function inverted(lists) {
  const owner = owners(lists);
  const { from, rows } = grouped(lists.rows, lists.from.length - 1);
  return { from, rows: rows.map((place) => owner[place]) };
}

/**
 * A number for each event, equal for those whose operations have the same kinds and sizes.
 * @param {Operations} operations
 * @param {Lists} rows of the operations of each event
 * @param {number} count of events
 * @returns {Int32Array}
 */
function numbered(operations, rows, count) {
  /** @type {Map<string, number>} */
  const known = new Map();
  const like = new Int32Array(count).fill(-1);
  for (let event = 0; event < count; event++) {
    let key = "";
    for (const row of listOf(rows, event)) key += `${operations.kind[row]} ${operations.size[row]} `;
    if (key === "") continue;
    const number = known.get(key) ?? known.size;
    known.set(key, number);
    like[event] = number;
  }
  return like;
}

/**
 * Weight of every event among critical paths of equal length, by the rule of the compiler: the path with the most
 * micro-batches of preference 3, then the one with the most pairs, then the one with the most of preference 1, and, if
 * memory moves, then the one with the most of all that are not moves.
 * @param {Schedule} schedule
 * @param {Lists} rows of the operations of each event; moves are not among them
 * @returns {Float64Array}
 */
function preferences({ kinds, operations, moves }, rows) {
  const events = rows.from.length - 1;
  const size = new Float64Array(events);
  const rank = new Uint8Array(events);
  const sums = [0, 0, 0, 0];
  const grain = measureOf(operations.size) / 2;
  for (let event = 0; event < events; event++) {
    const parts = listOf(rows, event);
    if (parts.length === 0) continue;
    // A pair has the mean size of its two operations.
    const both = operations.size[parts[0]] + operations.size[parts[parts.length - 1]];
    size[event] = Math.round(both / 2 / grain);
    rank[event] = parts.length > 1 ? 2 : kinds[operations.kind[parts[0]]].preference;
    sums[rank[event]] += size[event];
  }
  // Each rank counts more than all operations of the ranks below it can sum up.
  const last = moves.event.length > 0 ? 1 : 0;
  const units = [0, 1 + last * sums.reduce((sum, amount) => sum + amount), 0, 0];
  for (let number = 2; number < units.length; number++) units[number] = units[number - 1] * (1 + sums[number - 1]);
  return size.map((amount, event) => amount * (units[rank[event]] + last));
}

/**
 * The largest number of which all sizes are whole multiples, up to rounding.
 * @param {ArrayLike<number>} sizes
 * @returns {number}
 */
function measureOf(sizes) {
  let measure = 0;
  for (const size of new Set(Array.from(sizes))) {
    for (let rest = size; rest > 1e-6; ) [measure, rest] = [rest, Math.abs(measure - Math.round(measure / rest) * rest)];
  }
  return measure;
}

/**
 * All events, each after those that it waits for, and if possible right after the one before it on its lane. Events that
 * wait for one another for ever are left out.
 * @param {Lists} before
 * @param {Lists} after
 * @returns {Int32Array}
 */
function ordered(before, after) {
  const count = before.from.length - 1;
  const missing = new Int32Array(count);
  const order = new Int32Array(count);
  const ready = new Int32Array(count);
  let [known, waiting] = [0, 0];
  for (let event = count - 1; event >= 0; event--) {
    missing[event] = before.from[event + 1] - before.from[event];
    if (missing[event] === 0) ready[waiting++] = event;
  }
  while (waiting > 0) {
    const event = ready[--waiting];
    order[known++] = event;
    for (let place = after.from[event + 1] - 1; place >= after.from[event]; place--) {
      if (--missing[after.rows[place]] === 0) ready[waiting++] = after.rows[place];
    }
  }
  return order.subarray(0, known);
}
