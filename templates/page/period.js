// Time of an update in the steady state of a stream: the critical cycle of its turn, as in chimera_ir/flow/engine.py.
// Each cycle of waits has a ratio: the lengths of its events, divided by the turns that it goes back.

/**
 * @typedef {Object} CriticalCycle
 * @property {Int32Array} events each waits for the one before it, and the first for the last
 * @property {number} turns that the cycle goes back
 * @property {number} ratio length of the cycle by turns; 0 where no cycle takes any time
 */

/**
 * Time of an update: the span with a flush, else the period.
 * @param {import("./engine.js").Plan} plan
 * @param {import("./engine.js").Run} run
 * @returns {number}
 */
export function updateTime(plan, run) {
  const { turn } = plan.schedule;
  if (turn === null) return run.span;
  return new PeriodicSystem(turn).longest(Float64Array.from(turn.events, (event) => run.length[event])).ratio / turn.updates;
}

/**
 * The critical cycle; of several equally long ones, that with the largest weight by turns.
 * @param {TurnOfStream} turn
 * @param {Float64Array} length of every event
 * @param {Float64Array} weight of every event
 * @returns {CriticalCycle}
 */
export function criticalCycle(turn, length, weight) {
  const times = Float64Array.from(turn.events, (event) => length[event]);
  const system = new PeriodicSystem(turn);
  const longest = system.longest(times);
  const tight = system.tight(times, longest.ratio);
  const most = tight.longest(Float64Array.from(turn.events, (event) => weight[event]));
  const { nodes, turns } = most.nodes.length > 0 ? most : longest;
  return { events: Int32Array.from(nodes, (node) => turn.events[node]), turns, ratio: longest.ratio };
}

/** Nodes that wait for one another, some of them for nodes of other turns. */
class PeriodicSystem {
  /** @param {{ events: Column; before: Column; before_from: Column; ago: Column }} turn */
  constructor(turn) {
    this.turn = turn;
    this.count = turn.events.length;
  }

  /**
   * A cycle of the largest ratio. The search replaces a cycle by one of a larger ratio until there is none.
   * @param {Float64Array} lengths
   * @returns {{ nodes: number[]; turns: number; ratio: number }}
   */
  longest(lengths) {
    let best = { nodes: /** @type {number[]} */ ([]), turns: 1, ratio: 0 };
    for (;;) {
      const { steps } = this.longestPaths(lengths, best.ratio);
      const better = this.cycles(steps, lengths).filter((cycle) => cycle.ratio > best.ratio);
      if (better.length === 0) return best;
      best = better.reduce((one, other) => (other.ratio > one.ratio ? other : one));
    }
  }

  /**
   * The system with only those waits that are on a longest path to their node.
   * @param {Float64Array} lengths
   * @param {number} ratio the largest one
   * @returns {PeriodicSystem}
   */
  tight(lengths, ratio) {
    const { before, before_from, ago, events } = this.turn;
    const { ends } = this.longestPaths(lengths, ratio);
    const rounding = roundingOf(lengths) * 16;
    const kept = { events, before: /** @type {number[]} */ ([]), before_from: [0], ago: /** @type {number[]} */ ([]) };
    for (let node = 0; node < this.count; node++) {
      for (let place = before_from[node]; place < before_from[node + 1]; place++) {
        if (ends[before[place]] - ago[place] * ratio + lengths[node] >= ends[node] - rounding) {
          kept.before.push(before[place]);
          kept.ago.push(ago[place]);
        }
      }
      kept.before_from.push(kept.before.length);
    }
    return new PeriodicSystem(kept);
  }

  /**
   * Length and last wait of the longest path to each node; ends once a path closes a cycle. `ratio` is subtracted for
   * every turn that a wait goes back.
   * @param {Float64Array} lengths
   * @param {number} ratio
   * @returns {{ ends: Float64Array; steps: Int32Array }} the steps are places among the waits, -1 where a path begins
   */
  longestPaths(lengths, ratio) {
    const { before, before_from, ago } = this.turn;
    const ends = new Float64Array(this.count);
    const steps = new Int32Array(this.count).fill(-1);
    const rounding = roundingOf(lengths);
    for (let longer = true; longer && this.cycles(steps, lengths).length === 0; ) {
      longer = false;
      for (let node = 0; node < this.count; node++) {
        for (let place = before_from[node]; place < before_from[node + 1]; place++) {
          const end = ends[before[place]] - ago[place] * ratio + lengths[node];
          if (end <= ends[node] + rounding) continue;
          ends[node] = end;
          steps[node] = place;
          longer = true;
        }
      }
    }
    return { ends, steps };
  }

  /**
   * The cycles that the steps close: a node has at most one step, so it is on at most one cycle.
   * @param {Int32Array} steps
   * @param {Float64Array} lengths
   * @returns {{ nodes: number[]; turns: number; ratio: number }[]}
   */
  cycles(steps, lengths) {
    const { before, ago } = this.turn;
    const walkOf = new Int32Array(this.count).fill(-1);
    const found = [];
    for (let first = 0; first < this.count; first++) {
      let node = first;
      while (steps[node] >= 0 && walkOf[node] < 0) {
        walkOf[node] = first;
        node = before[steps[node]];
      }
      if (steps[node] < 0 || walkOf[node] !== first) continue;
      const nodes = [];
      let [turns, length, next] = [0, 0, node];
      do {
        nodes.push(next);
        turns += ago[steps[next]];
        length += lengths[next];
        next = before[steps[next]];
      } while (next !== node);
      found.push({ nodes: nodes.reverse(), turns, ratio: length / turns });
    }
    return found;
  }
}

/**
 * @param {Float64Array} lengths
 * @returns {number}
 */
function roundingOf(lengths) {
  return lengths.reduce((most, length) => Math.max(most, length), 0) * 1e-10;
}
