// Rows of the lanes from top to bottom.

const HEADING_ROW = 26;
const SUMS_ROW = 6;
const HOST_ROW = 8;
const LINK_ROW = 20;
const GAP_BELOW = 6;
const GAP_OF_OVERVIEW = 2;
const GAP_OF_ARROWS = 40;

/** Pixels of the axis above the rows. */
export const AXIS = 30;

/**
 * @param {Played[]} all
 * @param {State} state
 * @param {number} room pixels that rows may take before they become small
 * @returns {{ rows: Row[], height: number }}
 */
export function rowsOf(all, state, room) {
  /** @type {Row[]} */
  const rows = [];
  let top = all.some(({ proven }) => !proven) ? GAP_OF_ARROWS : 4;
  /**
   * @param {Row["kind"]} kind
   * @param {number} schedule
   * @param {number} index
   * @param {number} height
   * @param {string} name
   */
  const add = (kind, schedule, index, height, name) => {
    rows.push({ kind, schedule, index, top, height, name });
    top += height;
  };
  const lanes = all.reduce((count, { schedule }) => count + schedule.workers, 0);
  const { overview, measured, links } = state.shows;
  const withMemory = state.shows.memory && !overview;
  const share = room / lanes / (overview ? 1 : 1.2 + (withMemory ? 0.8 : 0) + (measured ? 1 : 0));
  const lane = overview ? Math.min(18, Math.max(4, Math.floor(share) - GAP_OF_OVERVIEW)) : Math.round(Math.min(44, Math.max(18, share)));
  const gap = overview ? GAP_OF_OVERVIEW : GAP_BELOW;
  all.forEach(({ schedule, memory, proven }, number) => {
    if (all.length > 1) add("heading", number, 0, HEADING_ROW, schedule.name);
    const hasSums = schedule.sums.launches.length > 0 && proven && !overview;
    for (let worker = 0; worker < schedule.workers; worker++) {
      add("lane", number, worker, lane, `P${worker}`);
      if (measured && number === 0) add("measured", number, worker, lane, "run");
      if (schedule.moves.event.length > 0 && proven && !overview) add("host", number, worker, HOST_ROW, "");
      if (hasSums) add("sums", number, worker, SUMS_ROW, "");
      if (withMemory && memory.length > 0) add("memory", number, worker, Math.max(20, lane - 6), "");
      top += proven ? gap : GAP_OF_ARROWS;
    }
    if (links && proven) {
      top += GAP_BELOW;
      schedule.messages.links.forEach(({ from, to }, link) => {
        add("link", number, link, LINK_ROW, `${from}→${to}`);
        top += 3;
      });
    }
    top += GAP_BELOW;
  });
  return { rows, height: top };
}

/** Pixels of rows on a printed sheet, which is 1000 pixels wide. */
const SHEET = 480;

/**
 * Rows on the sheets on which they are printed: a worker's rows are on one sheet.
 * @param {Row[]} rows
 * @returns {{ top: number, height: number }[]}
 */
export function sheetsOf(rows) {
  const sheets = [{ top: 0, height: 0 }];
  rows.forEach(({ kind, top }, number) => {
    if (kind !== "heading" && kind !== "lane" && kind !== "link") return;
    const next = rows.findIndex((row, place) => place > number && ["heading", "lane", "link"].includes(row.kind));
    const last = rows[(next < 0 ? rows.length : next) - 1];
    const bottom = last.top + last.height + 2;
    const sheet = sheets[sheets.length - 1];
    if (bottom - sheet.top > SHEET && sheet.height > 0) sheets.push({ top: top - 3, height: bottom - top + 3 });
    else sheet.height = bottom - sheet.top;
  });
  return sheets;
}

/**
 * The row at a height, or null.
 * @param {Row[]} rows
 * @param {number} y
 * @returns {Row | null}
 */
export function rowAt(rows, y) {
  return rows.find(({ top, height }) => y >= top && y < top + height) ?? null;
}

/**
 * The rows that are at least partly between two heights.
 * @param {Row[]} rows in order
 * @param {number} from
 * @param {number} to
 * @returns {Row[]}
 */
export function rowsBetween(rows, from, to) {
  return rows.filter(({ top, height }) => top + height > from && top < to);
}

/**
 * The row of a worker or a link, or null if it is not shown.
 * @param {Row[]} rows
 * @param {Row["kind"]} kind
 * @param {number} schedule
 * @param {number} index
 * @returns {Row | null}
 */
export function rowOf(rows, kind, schedule, index) {
  return rows.find((row) => row.kind === kind && row.schedule === schedule && row.index === index) ?? null;
}

/**
 * The lanes of a schedule's workers.
 * @param {Row[]} rows
 * @param {number} schedule
 * @returns {Row[]}
 */
export function lanesOf(rows, schedule) {
  return rows.filter((row) => row.kind === "lane" && row.schedule === schedule);
}

/**
 * The place of a time on the canvas, in pixels.
 * @param {Sight} sight
 * @param {number} time
 * @returns {number}
 */
export function xOf({ left, from, scale }, time) {
  return left + (time - from) * scale;
}

/**
 * The upper edge of a row on the canvas, in pixels.
 * @param {Sight} sight
 * @param {Row} row
 * @returns {number}
 */
export function yOf({ top, scrolled }, row) {
  return top + row.top - scrolled;
}
