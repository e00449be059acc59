// Colours and patterns. The colours of operations come with the document; those here belong to the page itself, and
// differ for colour-blind readers: hues of Okabe and Ito, and a pattern for each cause of idle time.

/** @type {Theme} */
const LIGHT = {
  dark: false,
  mode: "light",
  paper: "#ffffff",
  ink: "#1a1a1a",
  muted: "#555555",
  line: "#d4d4d4",
  stripe: "#f4f5f7",
  critical: "#d8001f",
  waits: "#0072b2",
  awaited: "#b34700",
  memory: "#00735a",
  memoryFill: "#bfe3d8",
  link: "#3b6f9c",
  linkFill: "#c9dff0",
  sum: "#8a7f72",
  difference: "#a3006d",
  select: "#000000",
};

/** @type {Theme} */
const DARK = {
  dark: true,
  mode: "dark",
  paper: "#14171c",
  ink: "#eceff3",
  muted: "#a9b1bc",
  line: "#3a414b",
  stripe: "#1c2027",
  critical: "#ff6257",
  waits: "#56b4e9",
  awaited: "#f0a030",
  memory: "#4fd0ab",
  memoryFill: "#1f4a40",
  link: "#7fb9e6",
  linkFill: "#24405a",
  sum: "#a99c8c",
  difference: "#f08ac8",
  select: "#ffffff",
};

/**
 * @param {boolean} dark
 * @returns {Theme}
 */
export function themeOf(dark) {
  return dark ? DARK : LIGHT;
}

/**
 * A tile that is repeated: lines of a colour along a path in SVG's syntax. As chimera_ir/picture/chart.py has them,
 * for all pictures.
 * @typedef {{ size: number, path: string, width: number, mark: string }} Pattern
 * @type {Record<string, Pattern & { dark: string }>}
 */
const WAITS = {
  bubble: { size: 7, path: "M-1 1L1 -1M0 7L7 0M6 8L8 6", width: 0.7, mark: "#555555", dark: "#5a6969" },
  message: { size: 5, path: "M1.5 0V5", width: 2, mark: "#4400bb", dark: "#5a69f0" },
  sum: { size: 5, path: "M0 1.5H5", width: 2, mark: "#994400", dark: "#c31e1e" },
  send: { size: 6, path: "M2 3H4M5 0H6M0 0H1M5 6H6M0 6H1", width: 2, mark: "#883399", dark: "#873ca5" },
  post: { size: 4, path: "M0 0L4 4M4 0L0 4", width: 1, mark: "#442200", dark: "#780fff" },
};

/**
 * The causes that a picture without causes calls a bubble differ in their lines alone.
 * @type {Record<string, Pattern & { dark: string }>}
 */
const CAUSE_PATTERNS = {
  fill: { ...WAITS.bubble, path: "M0 -1V8", size: 7 },
  drain: { ...WAITS.bubble, path: "M-1 6L1 8M0 0L7 7M6 -1L8 1" },
  dependency: { ...WAITS.bubble, path: "M0 5L3.5 1.5L7 5", width: 0.8 },
  bubble: WAITS.bubble,
  link: WAITS.message,
  imbalance: { ...WAITS.bubble, path: "M-1 1L1 -1M0 7L7 0M6 8L8 6M-1 6L1 8M0 0L7 7M6 -1L8 1" },
  sum: WAITS.sum,
  host: WAITS.send,
  message: WAITS.message,
  send: WAITS.send,
  post: WAITS.post,
  "": { size: 4, path: "M0 2H4", width: 4, mark: "#4d4d4d", dark: "#6b6b6b" }, // a step of the optimizer
};

/**
 * Patterns of operations, which tell the stages of a worker apart without colour. Number 0 is plain.
 * @type {Pick<Pattern, "size" | "path" | "width">[]}
 */
const LOOK_PATTERNS = [
  { size: 8, path: "", width: 0 },
  { size: 8, path: "M-1 1L1 -1M0 8L8 0M7 9L9 7", width: 1.6 },
  { size: 8, path: "M-1 7L1 9M0 0L8 8M7 -1L9 1", width: 1.6 },
  { size: 6, path: "M0 3H6", width: 1.6 },
  { size: 6, path: "M3 0V6", width: 1.6 },
  { size: 6, path: "M2 3H4", width: 2 },
  { size: 8, path: "M0 4H8M4 0V8", width: 1.2 },
  { size: 8, path: "M0 8L8 0M0 0L8 8", width: 1.2 },
];

const GROUND = { light: "#f6f6f6", dark: "#181a1f" };

/**
 * The pattern of idle time, by its cause.
 * @param {string} cause
 * @param {boolean} dark
 * @returns {{ pattern: Pattern, ground: string }}
 */
export function idleLook(cause, dark) {
  const pattern = CAUSE_PATTERNS[cause] ?? WAITS.bubble;
  return dark ? { pattern: { ...pattern, mark: pattern.dark }, ground: GROUND.dark } : { pattern, ground: GROUND.light };
}

/**
 * The pattern of operations with some look, drawn over their colour.
 * @param {number} number
 * @param {string} ink
 * @returns {Pattern | null} null for a plain one
 */
export function lookPattern(number, ink) {
  if (number <= 0) return null;
  return { ...LOOK_PATTERNS[1 + ((number - 1) % (LOOK_PATTERNS.length - 1))], mark: `${ink}38` };
}

/**
 * Draws the box of a move of memory: an offload is filled, a reload has a frame around a lighter colour.
 * @param {CanvasRenderingContext2D} context
 * @param {Theme} theme
 * @param {string} words of the move, or its kind
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 */
export function moveBox(context, theme, words, x, y, width, height) {
  context.fillStyle = theme.link;
  context.fillRect(x, y, width, height);
  if (!words.startsWith("reload") || width < 4) return;
  context.fillStyle = theme.linkFill;
  context.fillRect(x + 1, y + 1, width - 2, height - 2);
}

/** @type {Map<string, CanvasPattern>} */
const paints = new Map();

/**
 * The paint of a pattern. It moves with `shift`, so that it stays with what it fills.
 * @param {CanvasRenderingContext2D} context
 * @param {Pattern} pattern
 * @param {string} ground empty for none
 * @param {number} shift in pixels
 * @returns {CanvasPattern | string}
 */
export function paint(context, pattern, ground, shift = 0) {
  const key = `${ground} ${pattern.mark} ${pattern.path}`;
  const known = paints.get(key) ?? context.createPattern(tile(pattern, ground), "repeat");
  if (known === null) return ground;
  paints.set(key, known);
  known.setTransform(new DOMMatrix([1 / GRAIN, 0, 0, 1 / GRAIN, shift % pattern.size, 0]));
  return known;
}

/** Pixels of a tile for each pixel of the picture. */
const GRAIN = 4;

/**
 * @param {Pattern} pattern
 * @param {string} ground
 * @returns {HTMLCanvasElement}
 */
function tile({ size, path, width, mark }, ground) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size * GRAIN;
  const context = canvas.getContext("2d");
  if (context === null) return canvas;
  context.scale(GRAIN, GRAIN);
  if (ground !== "") {
    context.fillStyle = ground;
    context.fillRect(0, 0, size, size);
  }
  context.strokeStyle = mark;
  context.lineWidth = width;
  context.stroke(new Path2D(path));
  return canvas;
}

/**
 * A sample of a colour and its pattern, for legends and tables.
 * @param {string} ground
 * @param {Pattern | null} pattern
 * @returns {HTMLCanvasElement}
 */
export function swatch(ground, pattern) {
  const canvas = document.createElement("canvas");
  canvas.width = 22 * GRAIN;
  canvas.height = 16 * GRAIN;
  canvas.className = "swatch";
  canvas.setAttribute("aria-hidden", "true");
  const context = canvas.getContext("2d");
  if (context === null) return canvas;
  context.scale(GRAIN, GRAIN);
  context.fillStyle = ground;
  context.fillRect(0, 0, 22, 16);
  if (pattern !== null) {
    context.fillStyle = paint(context, pattern, "");
    context.fillRect(0, 0, 22, 16);
  }
  return canvas;
}
