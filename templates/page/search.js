// Places in columns of ascending numbers.

/**
 * The first place between `from` and `to` whose number is above `limit`, or `to`.
 * @param {ArrayLike<number>} numbers
 * @param {number} limit
 * @param {number} from
 * @param {number} to
 * @returns {number}
 */
export function firstAbove(numbers, limit, from, to) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (numbers[middle] > limit) to = middle;
    else from = middle + 1;
  }
  return from;
}

/**
 * The operation of a lane at a time, or the nearest one; -1 in an empty lane.
 * @param {Boxes} played
 * @param {number} worker
 * @param {number} time
 * @returns {number}
 */
export function operationNear(played, worker, time) {
  const { first, start, end } = played;
  const [from, to] = [first[worker], first[worker + 1]];
  if (from === to) return -1;
  const next = Math.min(firstAbove(end, time, from, to), to - 1);
  const before = next - 1;
  if (before < from || start[next] <= time) return next;
  return time - end[before] < start[next] - time ? before : next;
}

/**
 * The operation of a lane whose box a point is in, of a pair the part under it; -1 for none.
 * @param {Boxes} played
 * @param {number} worker
 * @param {number} time
 * @param {number} slack of time around boxes that are too narrow to be hit
 * @param {boolean} lower whether the point is in the lower half of the lane
 * @returns {number}
 */
export function operationAt(played, worker, time, slack, lower) {
  const { first, start, end } = played;
  const near = operationNear(played, worker, time);
  if (near === -1 || start[near] > time + slack || end[near] < time - slack) return -1;
  const { event, row } = played.schedule.operations;
  const isBeside = (/** @type {number} */ part) => (event[near] < 0 ? start[part] === start[near] : event[part] === event[near]);
  const isOfPair = (/** @type {number} */ part) => part >= first[worker] && part < first[worker + 1] && isBeside(part);
  const half = lower ? 2 : 1;
  const parts = row[near] === 0 ? [] : [near - 1, near + 1].filter(isOfPair);
  return parts.find((part) => row[part] === half) ?? near;
}

/**
 * The rows of idle time of a worker.
 * @param {Boxes["idle"]} idle
 * @param {number} worker
 * @returns {[number, number]} the first of them, and one behind the last
 */
export function idleOfWorker({ worker: workers }, worker) {
  const low = firstAbove(workers, worker - 1, 0, workers.length);
  return [low, firstAbove(workers, worker, low, workers.length)];
}

/**
 * The row of idle time of a worker at a time; -1 for none.
 * @param {Boxes["idle"]} idle
 * @param {number} worker
 * @param {number} time
 * @returns {number}
 */
export function idleAt(idle, worker, time) {
  const [low, high] = idleOfWorker(idle, worker);
  const at = firstAbove(idle.end, time, low, high);
  return at === high || idle.start[at] > time ? -1 : at;
}
