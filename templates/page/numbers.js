// Numbers as people read them.

const PARTS = [
  { name: "s", of: 1 },
  { name: "ms", of: 1e-3 },
  { name: "µs", of: 1e-6 },
  { name: "ns", of: 1e-9 },
];

/**
 * The part of a second in which times up to `longest` are written; where costs have no unit, none.
 * @param {"" | "s"} unit
 * @param {number} longest
 * @returns {{ name: string, of: number }}
 */
export function partOf(unit, longest) {
  if (unit === "") return { name: "", of: 1 };
  return PARTS.find((one) => longest >= one.of) ?? PARTS[PARTS.length - 1];
}

/**
 * A time with its unit: "12", "3.25 ms".
 * @param {"" | "s"} unit
 * @param {number} time
 * @returns {string}
 */
export function timeText(unit, time) {
  const { name, of } = partOf(unit, Math.abs(time));
  const digits = numberText(time / of);
  return name === "" || time === 0 ? digits : `${digits} ${name}`;
}

/**
 * A stretch of time: "3 to 5, took 2".
 * @param {"" | "s"} unit
 * @param {number} start
 * @param {number} end
 * @param {string} verb
 * @returns {string}
 */
export function spanText(unit, start, end, verb) {
  return `${timeText(unit, start)} to ${timeText(unit, end)}, ${verb} ${timeText(unit, end - start)}`;
}

/**
 * A number with five digits, or with as many as a whole one has.
 * @param {number} value
 * @returns {string}
 */
export function numberText(value) {
  const whole = Math.floor(Math.log10(Math.max(Math.abs(value), 1))) + 1;
  return String(Number(value.toFixed(Math.max(0, 5 - whole))));
}

/**
 * A number on a scale, with the decimals that tell it from its neighbours.
 * @param {number} value
 * @param {number} step from one number of the scale to the next
 * @returns {string}
 */
export function stepText(value, step) {
  return String(Number(value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)))));
}

/**
 * A difference with its sign: "+2", "−0.5", "0".
 * @param {"" | "s"} unit
 * @param {number} difference
 * @returns {string}
 */
export function differenceText(unit, difference) {
  return signed(difference, timeText(unit, Math.abs(difference)));
}

/**
 * The text of a value's size with the value's sign; "0" where as much as the text says is 0.
 * @param {number} value
 * @param {string} size
 * @returns {string}
 */
export function signed(value, size) {
  if (parseFloat(size) === 0) return "0";
  return `${value > 0 ? "+" : "−"}${size}`;
}

/**
 * @param {number} share
 * @returns {string}
 */
export function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}

/**
 * An amount of memory in its unit.
 * @param {string} unit
 * @param {number} amount
 * @returns {string}
 */
export function amountText(unit, amount) {
  if (unit !== "bytes") return `${numberText(amount)} ${unit}`;
  const steps = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  for (; amount >= 1024 && step < steps.length - 1; step++) amount /= 1024;
  return `${Number(amount.toFixed(amount >= 100 ? 0 : 2))} ${steps[step]}`;
}

/**
 * A count before a noun: "1 operation", "3 operations".
 * @param {number} count
 * @param {string} noun
 * @returns {string}
 */
export function countedText(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/**
 * The smallest of 1, 2 and 5 times a power of ten that is at least `least`.
 * @param {number} least
 * @returns {number}
 */
export function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5, 10].find((factor) => power * factor >= least * (1 - 1e-9)) ?? 10);
}

/** Names that a list has at most. */
const NAMED = 6;

/**
 * The first of some names, and how many more there are.
 * @param {string[]} names
 * @returns {string}
 */
export function inShort(names) {
  const more = names.length > NAMED ? [`${names.length - NAMED} more`] : [];
  return [...names.slice(0, NAMED), ...more].join(", ");
}
