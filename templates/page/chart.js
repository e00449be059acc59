// The lanes: a canvas as large as what is seen of them. Rows scroll as any element does; time is the camera's.

import { drawAxis, drawEnds, drawNames, leftOf } from "./axis.js";
import { Camera } from "./camera.js";
import { listOf } from "./engine.js";
import { drawLane } from "./lanes.js";
import { AXIS, rowAt, rowOf, rowsBetween, rowsOf, sheetsOf, xOf, yOf } from "./layout.js";
import { drawCritical, drawIdleChosen, drawMessages, drawNeeds, drawOutline } from "./lines.js";
import { drawMarks } from "./marks.js";
import { drawMistake } from "./mistake_lines.js";
import { drawActivity } from "./recorded.js";
import { drawLink, drawMemory } from "./steps.js";
import { drawStays, drawStops } from "./stopped.js";
import { moveBox, themeOf } from "./theme.js";

/** Time behind the end of a run that hung, as a multiple of what was recorded: there it says how long it hung. */
const ROOM_BEHIND = 1.2;

export class Chart {
  /**
   * @param {import("./store.js").Store} store
   * @param {HTMLElement} scroller
   * @param {HTMLElement} tall as high as all rows
   * @param {HTMLCanvasElement} canvas
   */
  constructor(store, scroller, tall, canvas) {
    this.store = store;
    this.scroller = scroller;
    this.tall = tall;
    this.canvas = canvas;
    this.camera = new Camera();
    /** @type {Row[]} */
    this.rows = [];
    /** @type {number | null} */
    this.pointed = null; // time under the pointer
    /** @type {(() => void)[]} */
    this.hearers = [];
    this.pending = false;
    this.printing = false;
    this.strips = false; // whether some lane is a strip of mean colours
    this.share = 1; // of how many messages one is drawn
    this.sheet = { top: 0, height: 0 }; // what of the rows is on a printed sheet
    /** @type {HTMLCanvasElement[]} */
    this.sheets = []; // all printed ones but the last
    store.listen((changed) => {
      if (changed.has("played") || changed.has("update")) this.limit();
      if (changed.has("shows") || changed.has("unit")) this.arrange();
      else this.later();
    });
    this.limit();
    this.open();
    scroller.addEventListener("scroll", () => this.later());
    // An observer that changed the sizes of elements at once would be told of them in a loop.
    new ResizeObserver(() => requestAnimationFrame(() => this.arrange())).observe(scroller);
    this.arrange();
  }

  /** Takes the end of time from the schedules. */
  limit() {
    const recorded = (this.store.measured?.end ?? 0) * (this.store.hung ? ROOM_BEHIND : 1);
    const ends = [...this.store.all.map(({ run }) => run.span), recorded];
    const lengths = this.store.all.map(({ start, end }) => shortestLength(start, end));
    this.camera.limit(Math.max(0, ...ends), Math.min(Infinity, ...lengths.filter((length) => length > 0)));
  }

  /** Shows at first all of the time, of a stream the warm-up and one turn. */
  open() {
    if (this.store.page.trace !== null) return;
    const ends = this.store.all.map(seenFirst);
    if (this.store.all.some(({ schedule }) => schedule.turn !== null)) this.camera.span = Math.min(this.camera.end, Math.max(...ends) * 1.02);
  }

  /** Puts rows where they belong, and makes the canvas as large as what is seen of them. */
  arrange() {
    const room = window.innerHeight * 0.6;
    const { rows, height } = rowsOf(this.store.all, this.store.state, room);
    this.rows = rows;
    this.tall.style.height = `${AXIS + height}px`;
    const width = this.printing ? 1000 : this.scroller.clientWidth;
    const seen = this.printing ? AXIS + this.sheet.height : Math.min(AXIS + height, this.scroller.clientHeight);
    if (width === 0) return; // the lanes are not shown
    const ratio = this.printing ? 2 : window.devicePixelRatio;
    this.size = { width, height: seen, ratio };
    this.left = leftOf(rows, width);
    this.camera.width = Math.max(1, width - this.left);
    this.canvas.width = Math.max(1, Math.round(width * ratio));
    this.canvas.height = Math.max(1, Math.round(seen * ratio));
    this.canvas.style.width = this.printing ? "100%" : `${width}px`;
    this.canvas.style.height = this.printing ? "auto" : `${seen}px`;
    this.draw();
  }

  /** Draws before the next frame, once. */
  later() {
    if (this.pending || this.size === undefined) return;
    this.pending = true;
    requestAnimationFrame(() => {
      if (this.pending) this.draw();
    });
  }

  /**
   * Where times and rows are now.
   * @returns {Sight}
   */
  sight() {
    const context = this.canvas.getContext("2d", { alpha: false });
    if (context === null || this.size === undefined) throw new Error("this browser draws on no canvas");
    const { width, height, ratio } = this.size;
    const theme = themeOf(this.store.state.dark);
    const scrolled = this.printing ? this.sheet.top : this.scroller.scrollTop;
    const { from, scale } = this.camera;
    return { context, theme, left: this.left ?? 0, top: AXIS, width, height, ratio, from, scale, scrolled };
  }

  draw() {
    this.pending = false;
    const sight = this.sight();
    const { context, theme, width, height, ratio, left, top, scrolled } = sight;
    const { all, state, page } = this.store;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = theme.paper;
    context.fillRect(0, 0, width, height);
    const seen = rowsBetween(this.rows, scrolled, scrolled + height - top);
    const dimmed = all.map((_, schedule) => this.store.dimmed(schedule));
    this.strips = false;
    for (const row of seen) this.drawRow(sight, row, dimmed[row.schedule]);
    context.save();
    context.beginPath();
    context.rect(left, top, width - left, height - top);
    context.clip();
    drawEnds(sight, this.rows, all);
    this.share = 1;
    all.forEach((played, schedule) => {
      if (state.shows.messages) this.share = Math.max(this.share, drawMessages(sight, this.rows, played, schedule));
      if (state.shows.critical) drawCritical(sight, this.rows, played, schedule);
    });
    if (state.shows.differences && this.store.differences !== null) {
      drawMarks(sight, this.rows, all, this.store.differences);
    }
    if (page.mistake !== null) drawMistake(sight, this.rows, all, page.mistake);
    if (page.trace !== null && page.trace.hang !== null) drawStops(sight, this.rows, all[0], page.trace.hang);
    if (page.trace !== null && page.trace.hang !== null && this.store.hung && this.store.measured !== null) {
      drawStays(sight, this.rows, this.store.measured, page.trace.hang);
    }
    if (this.store.measured !== null && state.activity !== null) drawActivity(sight, this.rows, this.store.measured, state.activity);
    this.drawChosen(sight);
    context.restore();
    drawNames(sight, this.rows, all);
    drawAxis(sight, all, this.printing ? null : this.pointed);
    for (const hear of this.hearers) hear();
  }

  /** @param {() => void} hear is called whenever all is drawn */
  whenDrawn(hear) {
    this.hearers.push(hear);
  }

  /**
   * @param {Sight} sight
   * @param {Row} row
   * @param {Uint8Array | null} dimmed
   */
  drawRow(sight, row, dimmed) {
    const played = this.store.all[row.schedule];
    if (row.kind === "lane" && drawLane(sight, played, row, dimmed)) this.strips = true;
    if (row.kind === "measured" && this.store.measured !== null) drawLane(sight, this.store.measured.boxes, row, null);
    if (row.kind === "link") drawLink(sight, row, played);
    if (row.kind === "sums") drawSums(sight, row, played);
    if (row.kind === "host") drawMoves(sight, row, played);
    if (row.kind === "memory") {
      const bound = played.kept?.bound ?? null;
      const peaks = played.memory.map(({ peak }, worker) => Math.max(peak, bound === null ? 0 : bound[worker]));
      drawMemory(sight, row, played.memory[row.index], Math.max(...peaks), bound === null ? null : bound[row.index]);
    }
  }

  /**
   * Draws what is selected and what is pointed at, each with its match in the other schedule.
   * @param {Sight} sight
   */
  drawChosen(sight) {
    const { all, state } = this.store;
    const { selected, hovered, idle } = state;
    if (idle !== null) drawIdleChosen(sight, this.rows, all, idle);
    const needs = selected ?? hovered;
    if (needs !== null) drawNeeds(sight, this.rows, all, needs);
    for (const [place, width] of /** @type {[Place | null, number][]} */ ([[hovered, 1.5], [selected, 2.5]])) {
      if (place === null) continue;
      drawOutline(sight, this.rows, all, place, sight.theme.select, width);
      const match = this.store.matchOf(place);
      if (match !== null) drawOutline(sight, this.rows, all, match, sight.theme.select, width, [4, 3]);
    }
  }

  /**
   * The row and the time at a point of the canvas.
   * @param {number} x
   * @param {number} y
   * @returns {{ row: Row | null, time: number }}
   */
  at(x, y) {
    const { left, top, from, scale, scrolled } = this.sight();
    const inside = x >= left && y >= top;
    return { row: inside ? rowAt(this.rows, y - top + scrolled) : null, time: from + (x - left) / scale };
  }

  /**
   * Moves lanes so that an operation is seen.
   * @param {Place} place
   */
  reveal({ schedule, operation }) {
    const played = this.store.all[schedule];
    const worker = played.schedule.operations.worker[operation];
    this.show(rowOf(this.rows, "lane", schedule, worker), played.start[operation], played.end[operation]);
  }

  /**
   * Moves lanes so that a stretch of time is seen in the recorded lane of a worker.
   * @param {number} worker
   * @param {number} start
   * @param {number} end
   */
  revealMeasured(worker, start, end) {
    this.show(rowOf(this.rows, "measured", 0, worker), start, end);
  }

  /**
   * Shows a stretch of time alone.
   * @param {number} start
   * @param {number} end
   */
  frame(start, end) {
    this.camera.frame(start, end);
    this.later();
  }

  /**
   * @param {Row | null} row
   * @param {number} start
   * @param {number} end
   */
  show(row, start, end) {
    this.camera.reveal(start, end);
    if (row !== null) {
      const room = this.scroller.clientHeight - AXIS;
      if (row.top < this.scroller.scrollTop) this.scroller.scrollTop = row.top - 4;
      if (row.top + 2 * row.height > this.scroller.scrollTop + room) this.scroller.scrollTop = row.top + 2 * row.height - room;
    }
    this.later();
  }

  /**
   * Draws all rows and all of the time, as printers need it, on as many sheets as they fill, or again what was shown
   * before.
   * @param {boolean} printing
   */
  print(printing) {
    this.printing = printing;
    for (const sheet of this.sheets.splice(0)) sheet.remove();
    if (!printing) {
      if (this.before !== undefined) Object.assign(this.camera, this.before);
      this.arrange();
      return;
    }
    this.before = { from: this.camera.from, span: this.camera.span };
    this.camera.showAll();
    sheetsOf(this.rows).forEach((sheet, number) => {
      if (number > 0) this.sheets.push(copyBefore(this.canvas));
      this.sheet = sheet;
      this.arrange();
    });
  }
}

/**
 * The end of what is shown first: of a stream, two turns behind the idle time of its warm-up; so one is seen on all lanes.
 * @param {Played} played
 * @returns {number}
 */
function seenFirst({ schedule: { turn }, run, idle, update }) {
  if (turn === null) return run.span;
  const steady = Array.from(turn.events).reduce((least, event) => Math.min(least, run.start[event]), run.span);
  const warmUp = idle.end.reduce((most, end) => (end <= steady ? Math.max(most, end) : most), 0);
  return Math.min(run.span, warmUp + 2 * turn.updates * update);
}

/**
 * @param {Float64Array} start
 * @param {Float64Array} end
 * @returns {number}
 */
function shortestLength(start, end) {
  let least = Infinity;
  for (let at = 0; at < start.length; at++) {
    const length = end[at] - start[at];
    if (length > 0 && length < least) least = length;
  }
  return least === Infinity ? 0 : least;
}

/**
 * Puts a copy of what is on a canvas before it.
 * @param {HTMLCanvasElement} canvas
 * @returns {HTMLCanvasElement}
 */
function copyBefore(canvas) {
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  copy.getContext("2d")?.drawImage(canvas, 0, 0);
  canvas.before(copy);
  return copy;
}

/**
 * Draws the copies between a worker and its host below the lane.
 * @param {Sight} sight
 * @param {Row} row
 * @param {Played} played
 */
function drawMoves(sight, row, { plan, run, schedule: { events, moves } }) {
  const { context, theme, scale } = sight;
  for (const move of listOf(plan.moves, row.index)) {
    const width = Math.max(1, run.length[move] * scale - 1);
    moveBox(context, theme, moves.words[events.subject[move]], xOf(sight, run.start[move]), yOf(sight, row) + 2, width, row.height - 4);
  }
}

/**
 * Draws the sums that a worker takes part in.
 * @param {Sight} sight
 * @param {Row} row
 * @param {Played} played
 */
function drawSums(sight, row, { plan, run, schedule: { sums } }) {
  const { context, theme, scale } = sight;
  const y = yOf(sight, row);
  context.fillStyle = theme.sum;
  for (const place of listOf(plan.launches, row.index)) {
    const x = xOf(sight, run.end[sums.launches[place]]);
    context.beginPath();
    context.moveTo(x, y + 1);
    context.lineTo(x + 4, y + row.height);
    context.lineTo(x - 4, y + row.height);
    context.fill();
    const event = sums.event[plan.sumOf[place]];
    context.fillRect(xOf(sight, run.start[event]), y + 2, run.length[event] * scale, row.height - 3);
  }
}
