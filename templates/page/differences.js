// A second schedule beside the first: which of its operations are the same, and how they differ.

/**
 * Differences of one operation of the first schedule, by the matched one of the second schedule.
 * @typedef {Object} Differences
 * @property {Int32Array} match operation of the second schedule; -1 for none
 * @property {Uint8Array} halved whether one of both is a half of a backward, and the other one whole
 * @property {Uint8Array} moved whether the matched one runs on another worker
 * @property {Uint8Array} reordered whether the matched one follows another operation on its lane
 * @property {Float64Array} later by how much the matched one starts later; 0 without a match
 * @property {Int32Array} added operations of the second schedule that match none of the first
 */

/**
 * @param {ArrayLike<number>} matches per operation of the first schedule
 * @param {ArrayLike<number>} matchedBy per operation of the second schedule
 * @param {import("./engine.js").Plan} first
 * @param {import("./engine.js").Run} firstRun
 * @param {import("./engine.js").Plan} second
 * @param {import("./engine.js").Run} secondRun
 * @returns {Differences}
 */
export function differences(matches, matchedBy, first, firstRun, second, secondRun) {
  const match = Int32Array.from(matches);
  const [mine, theirs] = [first.schedule.operations, second.schedule.operations];
  const later = new Float64Array(match.length);
  const halved = new Uint8Array(match.length);
  const moved = new Uint8Array(match.length);
  const reordered = new Uint8Array(match.length);
  match.forEach((other, operation) => {
    if (other < 0) return;
    halved[operation] = Number(letterOf(first.schedule, operation) !== letterOf(second.schedule, other));
    moved[operation] = Number(mine.worker[operation] !== theirs.worker[other]);
    const [before, otherBefore] = [precedent(mine, operation), precedent(theirs, other)];
    // Of a split backward the second half may follow the first, and what follows the whole one follows the second.
    const follows = before < 0 ? otherBefore < 0 : match[before] === otherBefore || match[before] === other || (otherBefore >= 0 && matchedBy[otherBefore] === before);
    reordered[operation] = Number(!follows);
    const change = secondRun.start[theirs.event[other]] - firstRun.start[mine.event[operation]];
    later[operation] = Math.abs(change) > firstRun.rounding ? change : 0;
  });
  const added = Int32Array.from(Array.from(matchedBy).keys()).filter((operation) => matchedBy[operation] < 0);
  return { match, halved, moved, reordered, later, added };
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

/**
 * @param {Schedule} schedule
 * @param {number} operation
 * @returns {string} the letter of its kind
 */
function letterOf({ kinds, operations }, operation) {
  return kinds[operations.kind[operation]].letter;
}
