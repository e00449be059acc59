// What the page says about an operation, a stretch of idle time, a message.

import { CAUSES } from "./idle.js";
import { spanText, timeText } from "./numbers.js";

/**
 * An operation in a few words: "F m3 s1 on P2".
 * @param {Played} played
 * @param {number} operation
 * @returns {string}
 */
export function shortName({ schedule: { operations } }, operation) {
  return `${operations.words[operation]} on P${operations.worker[operation]}`;
}

/**
 * @param {Played} played
 * @param {number} operation
 * @returns {string}
 */
export function whenText({ schedule: { unit, clocks }, start, end, proven }, operation) {
  if (!proven) return `${clocks === null ? "without a time" : `on clock ${clocks[operation]}`}: the text is not proven`;
  return spanText(unit, start[operation], end[operation], "takes");
}

/**
 * @param {Played} played
 * @param {number} operation
 * @returns {string}
 */
export function slackText(played, operation) {
  const slack = played.slack[played.schedule.operations.event[operation]];
  if (slack > 0) return `${timeText(played.schedule.unit, slack)}: it may take that much longer`;
  return "none: if it took longer, so would the whole";
}

/**
 * One sentence on an operation, for the live region and the tip.
 * @param {Played} played
 * @param {number} operation
 * @returns {string}
 */
export function sentence(played, operation) {
  const { operations, looks } = played.schedule;
  return `${shortName(played, operation)}, ${looks[operations.look[operation]].name}, ${whenText(played, operation)}`;
}

const REASONS = {
  fill: "the pipes fill: it waits for its first operation",
  drain: "the pipes run empty: its operations are over",
  dependency: "it waits for another worker",
  link: "it waits for a message that is on its way",
  imbalance: "it waits for a worker that takes longer than others",
  sum: "it waits for a sum of gradients",
  host: "it waits for a copy to its host or back",
};

/**
 * A cause of idle time in words.
 * @param {number} cause
 * @returns {string}
 */
export function reason(cause) {
  return REASONS[/** @type {keyof typeof REASONS} */ (CAUSES[cause])];
}

/**
 * What a stretch of idle time waits for: the operation that makes it, -1 if that is none, and words; empty if it waits
 * for nothing.
 * @param {Played} played
 * @param {number} row of idle time
 * @returns {{ operation: number, words: string }}
 */
export function awaited({ idle, run, schedule: { unit, events, messages, moves, sums } }, row) {
  const wait = idle.wait[row];
  if (wait < 0) return { operation: -1, words: "" };
  const subject = events.subject[wait];
  const over = timeText(unit, run.end[wait]);
  const verb = events.verbs[events.verb[wait]];
  if (verb === "wait move") return { operation: -1, words: `${moves.words[subject]}, over at ${over}` };
  if (verb === "wait all_reduce") return { operation: -1, words: `the sum of ${sums.words[subject]}, over at ${over}` };
  if (verb === "wait send") return { operation: messages.taker[subject], words: `message ${messages.words[subject]} to be taken, at ${over}` };
  return { operation: messages.maker[subject], words: `message ${messages.words[subject]}, there at ${over}` };
}

/**
 * A stretch of idle time in words.
 * @param {Played} played
 * @param {number} row
 * @returns {string}
 */
export function idleText(played, row) {
  const { idle, schedule: { unit } } = played;
  const { operation, words } = awaited(played, row);
  const of = operation < 0 ? "" : `${shortName(played, operation)}: `;
  const when = `P${idle.worker[row]} is idle, ${spanText(unit, idle.start[row], idle.end[row], "for")}`;
  return `${when}\n${CAUSES[idle.cause[row]]}: ${reason(idle.cause[row])}${words === "" ? "" : `\nwaits for ${of}${words}`}`;
}

/**
 * A need in words, without the operation at its other end: "its message arrives at 4".
 * @param {Played} played
 * @param {import("./paths.js").Need} need
 * @param {boolean} after whether the one at the other end is the one that waits
 * @returns {string}
 */
export function needText(played, need, after) {
  const { run, schedule } = played;
  if (need.by === "lane" && after) return `after it on the lane, starts at ${timeText(schedule.unit, run.start[need.to])}`;
  if (need.by === "lane") return `before it on the lane, ends at ${timeText(schedule.unit, run.end[need.from])}`;
  if (need.by === "sum") return `sum of ${schedule.sums.words[need.row]}, over at ${timeText(schedule.unit, run.end[need.from])}`;
  const arrives = run.end[schedule.messages.flight[need.row]];
  return `message ${schedule.messages.words[need.row]}, there at ${timeText(schedule.unit, arrives)}`;
}

/**
 * How the matched operation of the second schedule differs.
 * @param {Played} second
 * @param {import("./differences.js").Differences} differences
 * @param {number} operation of the first schedule
 * @returns {string}
 */
export function differenceWords(second, { match, halved, moved, reordered, later }, operation) {
  const other = match[operation];
  if (other < 0) return "no such operation";
  const { operations, unit } = second.schedule;
  const parts = halved[operation] === 1 ? [`there ${operations.words[other]}`] : [];
  if (moved[operation] === 1) parts.push(`on P${operations.worker[other]}`);
  if (reordered[operation] === 1) parts.push("after another operation");
  const late = later[operation];
  if (late !== 0) parts.push(`starts ${timeText(unit, Math.abs(late))} ${late > 0 ? "later" : "earlier"}`);
  return parts.length === 0 ? "the same" : parts.join(", ");
}

/**
 * Which kinds stand for which where one schedule splits backwards and the other does not; empty if none does.
 * @param {Played} first
 * @param {Played} second
 * @param {import("./differences.js").Differences} differences
 * @param {ArrayLike<number>} matchedBy per operation of the second schedule
 * @returns {string}
 */
export function halvesText({ schedule: first }, { schedule: second }, { match, halved }, matchedBy) {
  if (!halved.includes(1)) return "";
  const kinds = [first, second].map(() => /** @type {Set<string>} */ (new Set()));
  /** @param {number} operation @param {number} other */
  const add = (operation, other) => {
    const [mine, theirs] = [first.kinds[first.operations.kind[operation]], second.kinds[second.operations.kind[other]]];
    if (mine.letter === theirs.letter) return;
    kinds[0].add(mine.name);
    kinds[1].add(theirs.name);
  };
  match.forEach((other, operation) => other >= 0 && add(operation, other));
  Array.from(matchedBy).forEach((operation, other) => operation >= 0 && add(operation, other));
  const [mine, theirs] = kinds.map((names) => [...names].join(" and "));
  return `${first.name} has ${mine} where ${second.name} has ${theirs}; they are compared as the same operation`;
}
