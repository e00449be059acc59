/** What the modules that draw share: what is shown now, and where. Times are in the unit of their schedule. */

/** A schedule played with the values of its sliders. */
interface Played {
  schedule: Schedule;
  plan: import("./engine.js").Plan;
  values: number[]; // one per slider
  run: import("./engine.js").Run;
  proven: boolean; // false: there are no events, and operations stand in the order of their lanes
  start: Float64Array; // per operation
  end: Float64Array;
  first: Int32Array; // the operations of worker w are first[w] .. first[w + 1] - 1
  update: number; // the time of an update: the span or, without a flush, the period
  bubbleRatio: number;
  critical: Int32Array; // events, in order
  isCritical: Uint8Array; // per event
  slack: Float64Array; // per event
  idle: import("./idle.js").Idle;
  kept: Memory | null; // what is shown below the lanes
  memory: import("./curves.js").Curve[]; // per worker, of what is kept
  links: import("./curves.js").Curve[];
  needs: import("./paths.js").Need[];
}

/** What of a schedule is drawn as boxes on lanes, and as idle time between them. */
interface Boxes {
  schedule: Schedule;
  start: Float64Array; // per box
  end: Float64Array;
  first: Int32Array; // the boxes of worker w are first[w] .. first[w + 1] - 1
  idle: { worker: number[]; start: number[]; end: number[]; cause: number[]; names?: string[] }; // names of the causes
}

/** An activity of a worker. */
interface Chosen {
  worker: number;
  activity: number;
}

/** An operation of one of the schedules. */
interface Place {
  schedule: number;
  operation: number;
}

/** A stretch of idle time of one of the schedules: a row of its table. */
interface Stretch {
  schedule: number;
  row: number;
}

/** All that can change while a page is open. */
interface State {
  selected: Place | null;
  hovered: Place | null;
  idle: Stretch | null; // that is selected
  line: { text: number; line: number } | null; // its operations stand out
  text: number; // shown beside the lanes
  unit: number; // of memory: index into the memory of the first schedule
  shows: { critical: boolean; messages: boolean; memory: boolean; links: boolean; differences: boolean; measured: boolean; overview: boolean };
  update: number; // the recorded update that is shown
  activity: Chosen | null; // whose stretches of time are outlined
  dark: boolean;
}

/** Horizontal stripe of the lanes: of a worker, a link, or a heading above a schedule. */
interface Row {
  kind: "heading" | "lane" | "sums" | "host" | "memory" | "link" | "measured";
  schedule: number;
  index: number; // the worker, or the link
  top: number;
  height: number;
  name: string;
}

/** What a function that draws needs: where times and rows are on the canvas, in CSS pixels. */
interface Sight {
  context: CanvasRenderingContext2D;
  theme: Theme;
  left: number; // of the plot; names of lanes are before it
  top: number; // of the plot; the axis is above it
  width: number; // of the whole canvas
  height: number;
  ratio: number; // device pixels per CSS pixel
  from: number; // the time at the left edge of the plot
  scale: number; // pixels per unit of time
  scrolled: number; // pixels of rows above the plot
}

/** Colours of one mode. */
interface Theme {
  dark: boolean;
  mode: "light" | "dark";
  paper: string;
  ink: string;
  muted: string;
  line: string;
  stripe: string;
  critical: string;
  waits: string;
  awaited: string;
  memory: string;
  memoryFill: string;
  link: string;
  linkFill: string;
  sum: string;
  difference: string;
  select: string;
}
