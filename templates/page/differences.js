// A second schedule beside the first: which of its operations are the same, and how they differ.

/**
 * Differences of one operation of the first schedule, by the matched one of the second schedule.
 * @typedef {Object} Differences
 * @property {Int32Array} match operation of the second schedule; -1 for none
 * @property {Uint8Array} moved whether the matched one runs on another worker
 * @property {Uint8Array} reordered whether the matched one follows another operation on its lane
 * @property {Float64Array} later by how much the matched one starts later; 0 without a match
 * @property {Int32Array} added operations of the second schedule that match none of the first
 */

/**
 * @param {ArrayLike<number>} matches per operation of the first schedule
 * @param {import("./engine.js").Plan} first
 * @param {import("./engine.js").Run} firstRun
 * @param {import("./engine.js").Plan} second
 * @param {import("./engine.js").Run} secondRun
 * @returns {Differences}
 */
export function differences(matches, first, firstRun, second, secondRun) {
  const match = Int32Array.from(matches);
  const [mine, theirs] = [first.schedule.operations, second.schedule.operations];
  const later = new Float64Array(match.length);
  const moved = new Uint8Array(match.length);
  const reordered = new Uint8Array(match.length);
  const matched = new Uint8Array(theirs.event.length);
  match.forEach((other, operation) => {
    if (other < 0) return;
    matched[other] = 1;
    moved[operation] = Number(mine.worker[operation] !== theirs.worker[other]);
    const [before, otherBefore] = [precedent(mine, operation), precedent(theirs, other)];
    reordered[operation] = Number((before < 0 ? -1 : match[before]) !== otherBefore);
    const change = secondRun.start[theirs.event[other]] - firstRun.start[mine.event[operation]];
    later[operation] = Math.abs(change) > firstRun.rounding ? change : 0;
  });
  const added = Int32Array.from(matched.keys()).filter((operation) => matched[operation] === 0);
  return { match, moved, reordered, later, added };
}

/**
 * The operation before another one on its lane; -1 for the first.
 * @param {Operations} operations
 * @param {number} operation
 * @returns {number}
 */
function precedent(operations, operation) {
  return operation > 0 && operations.worker[operation - 1] === operations.worker[operation] ? operation - 1 : -1;
}
