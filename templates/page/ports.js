// Messages that share a worker's port, as in chimera_ir/predict/events.py: a port is one direction of a worker's link to
// the network. Messages in a port at the same time get equal shares of its bandwidth, except for a message to which the
// port at its other end allows less.

/**
 * Lengths of all events, in which messages take longer where several share a port.
 * @param {import("./engine.js").Plan} plan
 * @param {Float64Array} alone lengths that all events have if no message shares a port
 * @returns {Float64Array}
 */
export function sharedLengths(plan, alone) {
  const ports = plan.schedule.events.ports;
  if (!ports) return alone;
  const { before, after } = plan;
  const length = alone.slice();
  const wires = new Wires(ports, plan.events);
  const agenda = new Agenda();
  const missing = Int32Array.from({ length: plan.events }, (_, event) => before.from[event + 1] - before.from[event]);

  /** @param {number} event @param {number} now */
  function begin(event, now) {
    if (alone[event] > 0 && wires.shares(event)) wires.begin(event, now, alone[event]);
    else agenda.add(now + alone[event], event);
  }

  for (let event = 0; event < plan.events; event++) if (missing[event] === 0) begin(event, 0);
  // A simulation: the next end is that of an event of fixed length or of a message, and lets others begin.
  while (agenda.times.length > 0 || wires.underWay.size > 0) {
    let now = wires.nextTime;
    let ended = wires.nextWire;
    if (agenda.times.length > 0 && agenda.times[0] <= now) {
      now = agenda.times[0];
      ended = agenda.take();
    } else {
      length[ended] = wires.end();
    }
    for (let at = after.from[ended]; at < after.from[ended + 1]; at++) {
      if (--missing[after.rows[at]] === 0) begin(after.rows[at], now);
    }
  }
  return length;
}

/** Messages under way: of each the time that its rest would take alone, and its share of its ports' bandwidth. */
class Wires {
  /**
   * @param {Ports} ports
   * @param {number} events
   */
  constructor(ports, events) {
    /** @type {Map<number, { left: number; share: number; began: number }>} */
    this.underWay = new Map();
    this.nextTime = Infinity;
    this.nextWire = -1;
    this.now = 0;
    this.leaving = new Int32Array(events).fill(-1);
    this.arriving = new Int32Array(events).fill(-1);
    for (let row = 0; row < ports.wire.length; row++) {
      this.leaving[ports.wire[row]] = ports.leaving[row];
      this.arriving[ports.wire[row]] = ports.arriving[row];
    }
  }

  /** @param {number} event @returns {boolean} whether the event is a message on a shared link */
  shares(event) {
    return this.leaving[event] >= 0;
  }

  /** @param {number} wire @param {number} now @param {number} alone */
  begin(wire, now, alone) {
    this.flowUntil(now);
    this.underWay.set(wire, { left: alone, share: 0, began: now });
    this.divide();
  }

  /** Ends the next message; returns the time that it took. @returns {number} */
  end() {
    const [wire, now] = [this.nextWire, this.nextTime];
    this.flowUntil(now);
    const took = now - (this.underWay.get(wire)?.began ?? now);
    this.underWay.delete(wire);
    this.divide();
    return took;
  }

  /** @param {number} now */
  flowUntil(now) {
    for (const flow of this.underWay.values()) flow.left = Math.max(0, flow.left - (now - this.now) * flow.share);
    this.now = now;
  }

  /** Divides the ports among the messages under way, and finds the one that ends next. */
  divide() {
    this.giveShares();
    [this.nextTime, this.nextWire] = [Infinity, -1];
    for (const [wire, flow] of this.underWay) {
      const end = this.now + flow.left / flow.share;
      if (end < this.nextTime) [this.nextTime, this.nextWire] = [end, wire];
    }
  }

  /** Gives each message its max-min fair share, those at the fullest port first. */
  giveShares() {
    const waiting = new Set(this.underWay.keys());
    /** @type {Map<number, number>} */
    const left = new Map();
    while (waiting.size > 0) {
      /** @type {Map<number, number>} */
      const users = new Map();
      for (const wire of waiting) {
        for (const port of [this.leaving[wire], this.arriving[wire]]) users.set(port, (users.get(port) ?? 0) + 1);
      }
      let [fullest, share] = [-1, Infinity];
      for (const [port, count] of users) {
        const offer = (left.get(port) ?? 1) / count;
        if (offer < share) [fullest, share] = [port, offer];
      }
      for (const wire of waiting) {
        const ends = [this.leaving[wire], this.arriving[wire]];
        if (!ends.includes(fullest)) continue;
        for (const port of ends) left.set(port, (left.get(port) ?? 1) - share);
        const flow = this.underWay.get(wire);
        if (flow) flow.share = share;
        waiting.delete(wire);
      }
    }
  }
}

/** A heap of events by the times of their ends. */
class Agenda {
  constructor() {
    /** @type {number[]} */
    this.times = [];
    /** @type {number[]} */
    this.events = [];
  }

  /** @param {number} time @param {number} event */
  add(time, event) {
    let place = this.times.length;
    while (place > 0) {
      const parent = (place - 1) >> 1;
      if (this.times[parent] <= time) break;
      this.times[place] = this.times[parent];
      this.events[place] = this.events[parent];
      place = parent;
    }
    this.times[place] = time;
    this.events[place] = event;
  }

  /** Removes the event that ends first. @returns {number} */
  take() {
    const first = this.events[0];
    const time = /** @type {number} */ (this.times.pop());
    const event = /** @type {number} */ (this.events.pop());
    const size = this.times.length;
    let place = 0;
    while (size > 0) {
      let child = 2 * place + 1;
      if (child + 1 < size && this.times[child + 1] < this.times[child]) child++;
      if (child >= size || this.times[child] >= time) break;
      this.times[place] = this.times[child];
      this.events[place] = this.events[child];
      place = child;
    }
    if (size > 0) {
      this.times[place] = time;
      this.events[place] = event;
    }
    return first;
  }
}
