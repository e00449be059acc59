// Reads the document of the page. `chimera_ir/page/contents.py` says how its columns of numbers are laid out.

import { unpacked } from "./load.js";

/** The arrays of the types of columns. */
const ARRAYS = { i1: Int8Array, i2: Int16Array, i4: Int32Array, f8: Float64Array };

/** @typedef {{ at: number, length: number, type: keyof typeof ARRAYS, sums: boolean }} PlacedColumn */

/**
 * The document of the page.
 * @returns {Promise<PageDocument>}
 */
export async function loadDocument() {
  const data = await unpacked("document");
  const length = new DataView(data).getUint32(0, true);
  const first = Math.ceil((4 + length) / 8) * 8;
  const read = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
  fillColumns(read, (place) => columnOf(data, first, place));
  return read;
}

/**
 * Replaces the columns in a table and in the tables within it. Lists of texts, which are long, are not looked through.
 * @param {Record<string, unknown> | unknown[]} table
 * @param {(place: PlacedColumn) => Column} columnAt
 */
function fillColumns(table, columnAt) {
  for (const [name, value] of Object.entries(table)) {
    if (isPlaced(value)) Object.assign(table, { [name]: columnAt(value) });
    else if (Array.isArray(value) ? typeof value[0] === "object" : value !== null && typeof value === "object") {
      fillColumns(/** @type {Record<string, unknown>} */ (value), columnAt);
    }
  }
}

/**
 * @param {unknown} value
 * @returns {value is PlacedColumn}
 */
function isPlaced(value) {
  return typeof value === "object" && value !== null && "at" in value && "sums" in value && "type" in value;
}

/**
 * The numbers of a column; the first column begins at byte `first`.
 * @param {ArrayBuffer} data
 * @param {number} first
 * @param {PlacedColumn} place
 * @returns {Column}
 */
function columnOf(data, first, place) {
  const stored = new ARRAYS[place.type](data, first + place.at, place.length);
  if (!place.sums) {
    return stored;
  }
  const numbers = new Int32Array(place.length);
  let sum = 0;
  for (let row = 0; row < place.length; row += 1) {
    sum += stored[row];
    numbers[row] = sum;
  }
  return numbers;
}
