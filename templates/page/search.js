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
 * The operations of a lane whose boxes a point may be in: one, two of a pair, or none.
 * @param {Boxes} played
 * @param {number} worker
 * @param {number} time
 * @param {number} slack of time around boxes that are too narrow to be hit
 * @returns {number[]}
 */
export function operationsAt(played, worker, time, slack) {
  const { first, start, end } = played;
  const near = operationNear(played, worker, time);
  if (near === -1 || start[near] > time + slack || end[near] < time - slack) return [];
  const event = played.schedule.operations.event;
  const all = [near];
  for (const other of [near - 1, near + 1]) {
    const inside = other >= first[worker] && other < first[worker + 1];
    if (inside && event[other] === event[near] && event[near] >= 0) all.push(other);
  }
  return all.sort((one, other) => one - other);
}
