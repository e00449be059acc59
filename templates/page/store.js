// What is shown now. Parts of the page listen to it; each change is told once, with the names of what changed.

import { differences } from "./differences.js";
import { prepare } from "./engine.js";
import { measuredOf } from "./measured.js";
import { playedWith } from "./playing.js";

/** @typedef {keyof State | "played"} Changed */

/** Workers from which on there is an overview. */
const MANY = 14;

export class Store {
  /**
   * @param {PageDocument} page
   * @param {boolean} dark
   */
  constructor(page, dark) {
    this.page = page;
    this.plans = page.schedules.map(prepare);
    /** @type {State} */
    this.state = {
      ...{ selected: null, hovered: null, idle: null, line: null, text: 0, unit: 0, dark, activity: null },
      update: page.trace?.typical ?? 0,
      shows: {
        critical: false,
        messages: false,
        memory: page.schedules.some((schedule) => schedule.memory.length > 0 && schedule.events.role.length > 0),
        links: false,
        differences: false,
        measured: page.trace !== null && page.trace.updates.length > 0,
        overview: false,
      },
    };
    this.values = new Map(this.sliders().map(({ name, value }) => [name, value]));
    /** @type {((changed: Set<Changed>) => void)[]} */
    this.listeners = [];
    /** @type {Played[]} */
    this.all = [];
    /** @type {import("./differences.js").Differences | null} */
    this.differences = null;
    /** @type {import("./measured.js").Measured | null} */
    this.measured = null;
    this.measure();
    this.playAll();
  }

  /** @param {(changed: Set<Changed>) => void} listener */
  listen(listener) {
    this.listeners.push(listener);
  }

  /** @param {Partial<State>} change */
  change(change) {
    // An operation, a line, or a stretch of idle time is selected.
    if (this.state.idle !== null && ("selected" in change || "line" in change)) change = { idle: null, ...change };
    /** @type {Set<Changed>} */
    const changed = new Set();
    for (const name of /** @type {(keyof State)[]} */ (Object.keys(change))) {
      if (JSON.stringify(this.state[name]) !== JSON.stringify(change[name])) changed.add(name);
    }
    if (changed.size === 0) return;
    Object.assign(this.state, change);
    if (changed.has("update")) this.measure();
    if (changed.has("unit")) {
      this.playAll();
      changed.add("played");
    }
    this.tell(changed);
  }

  /** Takes the recorded update that is shown. */
  measure() {
    const { trace, schedules } = this.page;
    this.measured = trace === null || trace.updates.length === 0 ? null : measuredOf(trace, this.state.update, schedules[0]);
  }

  /** The layers that the page has, which can be turned on and off. */
  get has() {
    const links = this.page.schedules.some(({ messages }) => messages.links.length > 0);
    return {
      critical: this.all.some(({ proven }) => proven),
      messages: links,
      memory: this.all.some(({ memory }) => memory.length > 0),
      links,
      differences: this.differences !== null,
      measured: this.measured !== null,
      overview: this.all.reduce((count, { schedule }) => count + schedule.workers, 0) > MANY,
    };
  }

  /** Whether the update is shown in which the run ended early. */
  get hung() {
    const { trace } = this.page;
    return trace !== null && trace.hang !== null && this.state.update === trace.updates.length - 1;
  }

  /**
   * Sliders of all schedules, each name once.
   * @returns {Slider[]}
   */
  sliders() {
    const all = this.page.schedules.flatMap(({ sliders }) => sliders);
    return all.filter(({ name }, place) => all.findIndex((other) => other.name === name) === place);
  }

  /** @param {Iterable<[string, number]>} values by the names of sliders */
  setValues(values) {
    for (const [name, value] of values) this.values.set(name, value);
    this.playAll();
    this.change({ idle: null });
    this.tell(new Set(["played"]));
  }

  playAll() {
    const { schedules, matches, matched_by: matchedBy } = this.page;
    this.all = schedules.map((schedule, number) => {
      const values = schedule.sliders.map(({ name, value }) => this.values.get(name) ?? value);
      return playedWith(schedule, values, this.keptIn(schedule), this.plans[number]);
    });
    const [first, second] = this.all;
    const compared = matches !== null && matchedBy !== null && second !== undefined && first.proven && second.proven;
    this.differences = compared ? differences(matches, matchedBy, first.plan, first.run, second.plan, second.run) : null;
  }

  /**
   * The memory of a schedule in the unit that is shown; null if it is not known.
   * @param {Schedule} schedule
   * @returns {Memory | null}
   */
  keptIn(schedule) {
    const chosen = this.page.schedules[0].memory[this.state.unit];
    return schedule.memory.find(({ unit, name }) => unit === chosen?.unit && name === chosen.name) ?? null;
  }

  /** Whether a slider stands elsewhere than at first. */
  get isChanged() {
    return this.all.some(({ plan, values }) => isChanged(plan, values));
  }

  /** @param {Set<Changed>} changed */
  tell(changed) {
    for (const listener of this.listeners) listener(changed);
  }

  /**
   * The operation of the other schedule that does the same, or null.
   * @param {Place} place
   * @returns {Place | null}
   */
  matchOf({ schedule, operation }) {
    const { matches, matched_by: matchedBy } = this.page;
    const other = (schedule === 0 ? matches : matchedBy)?.[operation] ?? -1;
    return other < 0 ? null : { schedule: 1 - schedule, operation: other };
  }

  /**
   * Operations that stand back: those that are not of the line that is chosen; null if all stand equal.
   * @param {number} schedule
   * @returns {Uint8Array | null}
   */
  dimmed(schedule) {
    const { line } = this.state;
    if (line === null || schedule !== 0) return null;
    const lines = this.page.texts[line.text].line;
    return Uint8Array.from({ length: lines.length }, (_, operation) => Number(lines[operation] !== line.line));
  }
}

/**
 * Whether these are other values than those with which the schedule was compiled.
 * @param {import("./engine.js").Plan} plan
 * @param {number[]} values one per slider
 * @returns {boolean}
 */
export function isChanged(plan, values) {
  return values.some((value, slider) => value !== plan.values[slider]);
}
