// Marks of what differs between two schedules.

import { lanesOf } from "./layout.js";
import { boxIn } from "./lines.js";

/** Pixels of a box below which it has no mark. */
const SMALLEST = 5;

/**
 * Marks, in both schedules, operations on another worker (a filled corner), after another operation (an open corner),
 * and those that the other schedule does not have (a cross).
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played[]} all
 * @param {import("./differences.js").Differences} differences
 */
export function drawMarks(sight, rows, all, { match, moved, reordered, added }) {
  const { context, theme } = sight;
  const filled = new Path2D();
  const open = new Path2D();
  const crosses = new Path2D();
  const lanes = all.map((_, schedule) => lanesOf(rows, schedule));
  const until = sight.from + (sight.width - sight.left) / sight.scale;
  /**
   * @param {number} schedule
   * @param {number} operation
   * @returns {Box} null if it is not seen, or too narrow
   */
  const seen = (schedule, operation) => {
    const played = all[schedule];
    const [start, end] = [played.start[operation], played.end[operation]];
    if ((end - start) * sight.scale < SMALLEST || start > until || end < sight.from) return null;
    return boxIn(sight, lanes[schedule][played.schedule.operations.worker[operation]], played, operation);
  };
  match.forEach((other, operation) => {
    if (other < 0) return crossOut(crosses, seen(0, operation));
    if (moved[operation] === 0 && reordered[operation] === 0) return;
    const path = moved[operation] === 1 ? filled : open;
    corner(path, seen(0, operation));
    corner(path, seen(1, other));
  });
  for (const operation of added) crossOut(crosses, seen(1, operation));
  context.fillStyle = theme.difference;
  context.strokeStyle = theme.paper;
  context.lineWidth = 1;
  context.fill(filled);
  context.stroke(filled);
  context.fillStyle = theme.paper;
  context.strokeStyle = theme.difference;
  context.lineWidth = 1.5;
  context.fill(open);
  context.stroke(open);
  context.stroke(crosses);
}

/**
 * @typedef {{ x: number, y: number, width: number, height: number } | null} Box
 * @param {Path2D} path
 * @param {Box} box
 */
function corner(path, box) {
  if (box === null) return;
  const side = Math.min(8, box.width - 1, box.height - 2);
  path.moveTo(box.x + 1, box.y + 0.5);
  path.lineTo(box.x + 1 + side, box.y + 0.5);
  path.lineTo(box.x + 1, box.y + 0.5 + side);
  path.closePath();
}

/**
 * @param {Path2D} path
 * @param {Box} box
 */
function crossOut(path, box) {
  if (box === null) return;
  path.rect(box.x + 1, box.y + 1, box.width - 2, box.height - 2);
  path.moveTo(box.x + 1, box.y + 1);
  path.lineTo(box.x + box.width - 1, box.y + box.height - 1);
}
