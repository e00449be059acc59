/**
 * What a page shows. Python writes it (`chimera_ir/page/contents.py`), the scripts in this folder read it. Every
 * string is plain text, never markup.
 *
 * A table is stored by columns: element i of each column belongs to row i of the table, and `-1` stands for no row.
 * Several rows that belong to one row are in two columns: those of row i are `rows[rows_from[i]]` up to, not including,
 * `rows[rows_from[i + 1]]`; `rows_from` is one longer than the table.
 */

/** Numbers of a column: an array in the file, and perhaps a typed array in the page. Use no more than its interface. */
type Column = ArrayLike<number>;

interface PageDocument {
  format: 1;
  title: string; // "chimera D=4 N=4 f=1"
  notes: string[]; // the lines that chimera compile prints about it
  mistake: Mistake | null; // of a text that is not proven
  schedules: Schedule[]; // one; with --against a second one; none where a mistake is above all schedules
  matches: Column | null; // of each operation of the first schedule: the operation of the second one that does the same, or -1;
  // a half of a backward has the whole one, which has its first half
  matched_by: Column | null; // of each operation of the second schedule, likewise
  texts: SourceText[]; // of the first schedule: the scheme, the program, each rank's script
  trace: Trace | null; // what ranks recorded: page of a run, of a hang
}

interface Schedule {
  name: string; // "chimera D=4 N=4 f=1"
  workers: number;
  unit: "" | "s"; // of lengths: that of the costs (F = 1), or seconds
  updates: number; // 1 with a flush; of a stream the updates that are shown, warm-up and drain included
  kinds: OperationKind[];
  looks: Look[];
  sliders: Slider[];
  operations: Operations;
  clocks: Column | null; // per operation, of a text that is not proven; null where they have none, or times
  events: Events;
  messages: Messages;
  sums: Sums;
  moves: Moves;
  turn: TurnOfStream | null; // null with a flush
  memory: Memory[]; // one per unit: M_a; with a profile also bytes
  facts: Facts;
  remarks: string[]; // what the sliders hold fixed, in sentences
}

/** `preference` decides between critical paths of equal length: the path with the most micro-batches of preference 3
 *  is taken; of those, with the most pairs (two operations of one event); of those, with the most of preference 1; of
 *  those, where memory moves, with the most operations other than moves. */
interface OperationKind {
  letter: string; // "F"
  name: string; // "forward"
  preference: 0 | 1 | 3;
}

/** Of the report, to compare with: `makespan` is the time of an update, `critical` has C_f and so on by letter. */
interface Facts {
  makespan: number;
  bubble_ratio: number;
  critical: Record<string, number>;
}

/** Operations of one colour: of a pipe (in a stream of its even or odd updates), a chunk, a slice and a shade of kinds. */
interface Look {
  name: string; // "down, forward, second stage"
  light: { fill: string; ink: string };
  dark: { fill: string; ink: string };
  pattern: number; // 0 plain; others tell chunks and slices apart without colour
}

/** A cost that can be changed: "F", "B", "I", "W", "pair", "recompute", "message", "sum", "step". `value` is where it
 *  stands at first: a cost per micro-batch where the unit is "", a factor on the profile's seconds where it is "s". */
interface Slider {
  name: string;
  label: string;
  value: number;
  max: number;
}

/** Compute operations, lane by lane, in the order of each lane. Both parts of a pair are rows with the same event. */
interface Operations {
  worker: Column;
  kind: Column; // into kinds
  size: Column; // how many whole micro-batches, as 0.5
  stage: Column;
  look: Column; // into looks
  row: Column; // 0 whole height, 1 upper half, 2 lower half (parts of a pair)
  event: Column; // into events; -1 in a schedule that is not proven
  label: string[]; // "3", "4-5", "3a": what stands in the box
  words: string[]; // "F m3 s1", as texts say it
}

/**
 * Events of `chimera_ir/predict/events.py`, whose docstring says how each role behaves. An event starts when the last
 * of those that it waits for ends, or at 0. First come the events of the lanes, lane by lane, each lane in order (an
 * event waits for the one before it on its lane, which is among `before`), then all others. A schedule that is not
 * proven has no events.
 *
 * A wait begins when the event before it on its lane ends, although what it waits for may end much later.
 */
interface Events {
  role: Column; // 0 begin, 1 compute, 2 step, 3 post, 4 notice, 5 wire, 6 flight, 7 sum, 8 wait, 9 move
  verb: Column; // into verbs
  verbs: string[]; // "", "send", "recv", "wait send", "wait recv", "all_reduce", "wait all_reduce", "step"; if memory moves, "wait move"
  subject: Column; // a row: of operations (compute: the first of its operations), messages, sums, or moves; a begin has none
  worker: Column; // of its lane; of a wire, flight, notice: where it begins; of a sum: the first member
  form: Column; // into forms
  forms: Form[];
  before: Column; // events that each one waits for
  before_from: Column;
  lane_from: Column; // the events of worker w are lane_from[w] up to, not including, lane_from[w + 1]
  ports: Ports | null; // null where no link is shared
}

/** Wires on a shared link (`chimera_ir/predict/events.py`): each has a port where it leaves and one where it arrives,
 *  and messages in a port at the same time share its bandwidth. The form of such a wire is its length alone. */
interface Ports {
  wire: Column; // an event
  leaving: Column; // a port: any number from 0 on
  arriving: Column;
}

/** A length: the sum over pairs of the value of a slider (by its index) times a coefficient. */
interface Form {
  of: [number, number][];
}

interface Messages {
  words: string[]; // "m0 s1->s2"
  link: Column; // into links
  bytes: Column; // 0 where no profile is given
  maker: Column; // the operation that makes what is sent
  taker: Column; // the operation that takes it
  send: Column; // the event at whose end it is sent
  recv: Column; // the event at whose end its receive is posted
  wire: Column; // the event that sends it
  flight: Column; // the event at whose end it has arrived
  wait: Column; // the event of the receiver's lane that waits for it
  links: { from: number; to: number; name: string }[]; // from a worker to a worker: "P0 to P1"
}

/** Sums of gradients: a weight group in an update. A row has no event where a single rank holds the group. */
interface Sums {
  words: string[]; // "s1", "s0+s3", "s1 v2"
  event: Column;
  launches: Column; // the events at whose ends its members launch it
  launches_from: Column;
}

/** Moves of memory between workers and their hosts; a wait for one has its row. */
interface Moves {
  words: string[]; // "offload m0 s1"
  event: Column;
}

/** The turn that a stream repeats, a periodic system. Node i is event `events[i]`. It waits for the nodes `before`,
 *  each `ago` turns earlier (0: in the same turn; less: in a later one). The time of an update in the steady state is
 *  the largest ratio of a cycle's length to the turns that it goes back, divided by `updates`. */
interface TurnOfStream {
  events: Column;
  before: Column;
  before_from: Column;
  ago: Column; // beside before
  updates: number; // per turn
}

/** What is kept on each worker: `start` from the beginning, then changes, in the order of each lane. */
interface Memory {
  unit: string; // "M_a", "inputs", "bytes"
  name: string; // "activations"
  start: Column; // per worker
  bound: Column | null; // per worker
  peak: Column; // per worker, as the compiler counts it
  changes: {
    worker: Column;
    operation: Column;
    of: Column; // an operation on the micro-batch and the stage of which it is kept
    at_end: Column; // 1 at the end of the operation, 0 at its start
    amount: Column;
  };
}

/** A text beside the lanes; `line` has for each operation its line, counted from 1, or 0 for none. */
interface SourceText {
  name: string; // "chimera.chim", "schedule.sir", "rank_0.py"
  language: "chim" | "sir" | "python" | "csv";
  text: string;
  line: Column;
  rank: number; // of a script; -1 of other texts
}

/** A text that is not proven. Without proof there are no times: operations stand in lane order, one after another. */
interface Mistake {
  code: string; // "CH302"
  title: string; // its sentence
  text: string; // what chimera compile prints
  operations: Column; // that take part
  arrows: { from: number; to: number; words: string }[]; // between operations: each waits for the one before
  missing: string[]; // what is missing, in words
  lines: Column; // of the first text, those that are wrong: the first mistake's first
}

/** What ranks recorded, beside what was promised. Times of spans are whole nanoseconds from the start of the update. */
interface Trace {
  updates: TracedUpdate[]; // any can be chosen
  typical: number; // the update that is shown first
  start: number; // seconds from the start of the schedule to where a recorded update begins beside it
  activities: Activity[];
  lines: string[]; // "F m3 s1", "wait recv m0 s0->s1"
  notes: string[];
  residuals: { worker: number; activity: number; predicted: number; measured: number }[]; // seconds of an update
  measured: { seconds: number; bubble_ratio: number; updates: number } | null; // of an update, the mean of so many
  hang: StoppedRank[] | null; // where every rank stopped, of a run that ended early
}

/** What takes a rank's time: an operation of some kind, or something that computes nothing. */
interface Activity {
  name: string; // "forward", "wait for messages from worker 2"
  wait: "" | "bubble" | "message" | "sum" | "send" | "post"; // whose pattern it has; "" for operations and steps
}

interface TracedUpdate {
  name: string; // "update 3 of 20"
  seconds: number; // its length, the mean of all workers
  spans: {
    worker: Column;
    start: Column;
    end: Column;
    operation: Column; // of the schedule; -1: nothing is computed
    activity: Column; // into activities
    line: Column; // into lines
  };
}

/** Where a rank stopped: in the wait or the operation `line`, which is at `event` of the first schedule, or nowhere. */
interface StoppedRank {
  rank: number;
  worker: number;
  event: number; // or the next one of its lane; -1: behind its last one, or unknown
  line: string; // "wait recv m0 s0->s1"; "" if its record is missing
  update: number; // from 0, as in the record; -1 if it is not known
  begun: boolean; // whether it was in the update; otherwise it was before `line`, not in it
  awaited: number; // the worker whose message it waited for, or that was to take one; -1: none
  seconds: number; // how long it had been there; 0 if that is not known
  message: string; // with which it ended
}
