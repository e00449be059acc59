// Lines over the lanes: messages, the critical path, what an operation waits for, and what is wrong.

import { listOf, ROLE } from "./engine.js";
import { heightOf } from "./lanes.js";
import { lanesOf, rowOf, xOf, yOf } from "./layout.js";
import { awaited } from "./words.js";

/** Messages that are drawn at most; with more of them between its edges a picture would be grey. */
const MOST_MESSAGES = 3000;

/**
 * The box of an operation on the canvas, or null if its lane has no row.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played[]} all
 * @param {Place} place
 * @returns {{ x: number, y: number, width: number, height: number } | null}
 */
export function boxOf(sight, rows, all, place) {
  const played = all[place.schedule];
  const lane = rowOf(rows, "lane", place.schedule, played.schedule.operations.worker[place.operation]);
  return lane === null ? null : boxIn(sight, lane, played, place.operation);
}

/**
 * The box of an operation in its lane.
 * @param {Sight} sight
 * @param {Row} lane
 * @param {Played} played
 * @param {number} operation
 * @returns {{ x: number, y: number, width: number, height: number }}
 */
export function boxIn(sight, lane, { schedule, start, end }, operation) {
  const width = Math.max(1, (end[operation] - start[operation]) * sight.scale);
  const [y, height] = heightOf(schedule.operations.row[operation], yOf(sight, lane), lane.height);
  return { x: xOf(sight, start[operation]), y, width, height };
}

/**
 * Draws the messages between the edges of the picture. Where they are too many, of each link every third, ninth and so
 * on is drawn, the same ones wherever the picture is moved to.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played} played
 * @param {number} schedule
 * @returns {number} of how many messages one is drawn
 */
export function drawMessages(sight, rows, played, schedule) {
  const { context, theme, from, scale, left } = sight;
  const { messages } = played.schedule;
  const to = from + (sight.width - left) / scale;
  const { start, end } = played.run;
  const tops = lanesOf(rows, schedule);
  const [above, below] = [sight.scrolled, sight.scrolled + sight.height - sight.top];
  const links = messages.links.flatMap(({ from: source, to: target }, link) => {
    const [one, other] = [tops[source], tops[target]];
    const seen = Math.max(one.top + one.height, other.top + other.height) >= above && Math.min(one.top, other.top) <= below;
    return seen ? [{ source: one, target: other, own: listOf(played.plan.messages, link) }] : [];
  });
  const isShown = (/** @type {number} */ row) => end[messages.flight[row]] >= from && start[messages.wire[row]] <= to;
  const count = links.reduce((sum, { own }) => own.reduce((shown, row) => shown + Number(isShown(row)), sum), 0);
  let share = 1;
  while (count / share > MOST_MESSAGES) share *= 3;
  const lines = new Path2D();
  for (const { source, target, own } of links) {
    for (let at = 0; at < own.length; at += share) {
      const row = own[at];
      if (isShown(row)) arrow(lines, sight, start[messages.wire[row]], source, end[messages.flight[row]], target);
    }
  }
  context.strokeStyle = theme.muted;
  context.lineWidth = 0.8;
  context.globalAlpha = 0.75;
  context.stroke(lines);
  context.globalAlpha = 1;
  return share;
}

/**
 * Adds a line between the facing edges of two lanes.
 * @param {Path2D} path
 * @param {Sight} sight
 * @param {number} start
 * @param {Row} source
 * @param {number} end
 * @param {Row} target
 */
function arrow(path, sight, start, source, end, target) {
  const down = target.top > source.top;
  path.moveTo(xOf(sight, start), yOf(sight, source) + (down ? source.height : 0));
  path.lineTo(xOf(sight, end), yOf(sight, target) + (down ? 0 : target.height));
}

/**
 * Draws the critical path: an outline around each operation of it, and lines from lane to lane.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played} played
 * @param {number} schedule
 */
export function drawCritical(sight, rows, played, schedule) {
  const { context, theme, from, scale } = sight;
  const { events } = played.schedule;
  const lanes = lanesOf(rows, schedule);
  const path = new Path2D();
  /** @type {{ lane: Row, end: number } | null} */
  let last = null;
  for (const event of played.critical) {
    const role = played.plan.role[event];
    if (role !== ROLE.COMPUTE && role !== ROLE.STEP && role !== ROLE.POST && role !== ROLE.SUM) continue;
    const lane = lanes[events.worker[event]];
    const [start, end] = [played.run.start[event], played.run.end[event]];
    if (last !== null && last.lane !== lane && start >= last.end) arrow(path, sight, last.end, last.lane, start, lane);
    const x = xOf(sight, start);
    for (const row of role === ROLE.SUM ? sumRows(rows, played, schedule, event) : [lane]) {
      if (x < sight.width && end >= from) outline(path, x, yOf(sight, row), (end - start) * scale, row.height);
    }
    last = { lane, end };
  }
  context.strokeStyle = theme.critical;
  context.lineWidth = 2;
  context.lineJoin = "round";
  context.stroke(path);
}

/**
 * The rows in which a sum is drawn: below the lanes of its members.
 * @param {Row[]} rows
 * @param {Played} played
 * @param {number} schedule
 * @param {number} event
 * @returns {Row[]}
 */
function sumRows(rows, played, schedule, event) {
  const { sums, events } = played.schedule;
  const sum = events.subject[event];
  const members = new Set();
  for (let place = sums.launches_from[sum]; place < sums.launches_from[sum + 1]; place++) members.add(events.worker[sums.launches[place]]);
  return rows.filter((row) => row.kind === "sums" && row.schedule === schedule && members.has(row.index));
}

/**
 * @param {Path2D} path
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 */
function outline(path, x, y, width, height) {
  if (width < 3) path.rect(x, y + height - 3, Math.max(width, 0.5), 2);
  else path.roundRect(x + 0.5, y + 0.5, width - 1, height - 1, 2.5);
}

/**
 * Draws what an operation waits for and what waits for it. The need that decides its start is the thickest line.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played[]} all
 * @param {Place} place
 */
export function drawNeeds(sight, rows, all, place) {
  const { theme } = sight;
  const played = all[place.schedule];
  const event = played.schedule.operations.event[place.operation];
  for (const need of played.needs) {
    if (need.to !== event && need.from !== event) continue;
    const [from, to] = [makerOf(played, need), takerOf(played, need)];
    if (from === -1 || to === -1) continue;
    const source = boxOf(sight, rows, all, { schedule: place.schedule, operation: from });
    const target = boxOf(sight, rows, all, { schedule: place.schedule, operation: to });
    if (source === null || target === null) continue;
    const after = need.from === event;
    joined(sight, source, target, after ? theme.awaited : theme.waits, need.decides ? 3 : 1.6, after ? [6, 3] : []);
  }
}

/**
 * The operation that a need waits for, or -1 if it waits for a sum.
 * @param {Played} played
 * @param {import("./paths.js").Need} need
 * @returns {number}
 */
export function makerOf(played, { by, from, row }) {
  return by === "message" ? played.schedule.messages.maker[row] : operationOf(played, from);
}

/**
 * The operation that waits, or -1 if a step does.
 * @param {Played} played
 * @param {import("./paths.js").Need} need
 * @returns {number}
 */
export function takerOf(played, { by, to, row }) {
  return by === "message" ? played.schedule.messages.taker[row] : operationOf(played, to);
}

/**
 * The first operation of an event, or -1.
 * @param {Played} played
 * @param {number} event
 * @returns {number}
 */
export function operationOf({ plan }, event) {
  return listOf(plan.operations, event)[0] ?? -1;
}

/**
 * Draws an arrow from the end of a box to the start of another one, between the edges that face each other.
 * @param {Sight} sight
 * @param {{ x: number, y: number, width: number, height: number }} source
 * @param {{ x: number, y: number, width: number, height: number }} target
 * @param {string} ink
 * @param {number} width
 * @param {number[]} dash
 */
export function joined(sight, source, target, ink, width, dash) {
  const path = new Path2D();
  const head = new Path2D();
  const [x, toX] = [source.x + source.width, target.x];
  if (source.y === target.y) {
    const y = source.y + source.height / 2;
    const ahead = toX > x ? 1 : -1;
    if (Math.abs(toX - x) < 14) return;
    path.moveTo(x, y);
    path.lineTo(toX - ahead * 6, y);
    triangleAt(head, toX, y, ahead, 0);
  } else {
    const down = target.y > source.y;
    const [y, toY] = down ? [source.y + source.height, target.y] : [source.y, target.y + target.height];
    const turn = down ? 1 : -1;
    const inset = Math.min(5, source.width / 2);
    const landing = toX + Math.min(5, target.width / 2);
    const bend = Math.max(8, Math.abs(toY - y) / 2);
    path.moveTo(x - inset, y);
    path.bezierCurveTo(x - inset, y + turn * bend, landing, toY - turn * bend, landing, toY - turn * 6);
    triangleAt(head, landing, toY, 0, turn);
  }
  strokeArrow(sight, path, head, ink, width, dash);
}

/**
 * Draws the line and the head of an arrow, with an edge that keeps it apart from what is below.
 * @param {Sight} sight
 * @param {Path2D} path
 * @param {Path2D} head
 * @param {string} ink
 * @param {number} width
 * @param {number[]} dash
 */
export function strokeArrow({ context, theme }, path, head, ink, width, dash) {
  context.lineWidth = width + 3;
  context.strokeStyle = theme.paper;
  context.stroke(path);
  context.setLineDash(dash);
  context.lineWidth = width;
  context.strokeStyle = ink;
  context.stroke(path);
  context.setLineDash([]);
  context.fillStyle = ink;
  context.lineWidth = 1.5;
  context.strokeStyle = theme.paper;
  context.stroke(head);
  context.fill(head);
}

/**
 * Adds a triangle whose tip is at a point.
 * @param {Path2D} path
 * @param {number} x
 * @param {number} y
 * @param {number} right direction in which it points
 * @param {number} down
 */
export function triangleAt(path, x, y, right, down) {
  path.moveTo(x, y);
  path.lineTo(x - 8 * right - 5 * down, y - 8 * down - 5 * right);
  path.lineTo(x - 8 * right + 5 * down, y - 8 * down + 5 * right);
  path.closePath();
}

/**
 * Draws an outline around an operation.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played[]} all
 * @param {Place} place
 * @param {string} ink
 * @param {number} width
 * @param {number[]} dash
 */
export function drawOutline(sight, rows, all, place, ink, width, dash = []) {
  const box = boxOf(sight, rows, all, place);
  if (box === null) return;
  const { context } = sight;
  const wide = Math.max(box.width, 5);
  const x = box.x - (wide - box.width) / 2;
  const ring = new Path2D();
  ring.roundRect(x - 1, box.y - 1, wide + 2, box.height + 2, 3.5);
  context.setLineDash([]);
  context.strokeStyle = sight.theme.paper;
  context.lineWidth = width + 2;
  context.stroke(ring);
  context.setLineDash(dash);
  context.strokeStyle = ink;
  context.lineWidth = width;
  context.stroke(ring);
  context.setLineDash([]);
}

/**
 * Draws an outline around a stretch of idle time, and one around the operation that it waits for.
 * @param {Sight} sight
 * @param {Row[]} rows
 * @param {Played[]} all
 * @param {Stretch} stretch
 */
export function drawIdleChosen(sight, rows, all, { schedule, row }) {
  const { idle } = all[schedule];
  const { operation } = awaited(all[schedule], row);
  if (operation >= 0) drawOutline(sight, rows, all, { schedule, operation }, sight.theme.waits, 2.5);
  const lane = rowOf(rows, "lane", schedule, idle.worker[row]);
  if (lane === null) return;
  const { context, theme } = sight;
  context.strokeStyle = theme.select;
  context.lineWidth = 2.5;
  const x = xOf(sight, idle.start[row]);
  context.strokeRect(x, yOf(sight, lane), Math.max(2, xOf(sight, idle.end[row]) - x), lane.height);
}
