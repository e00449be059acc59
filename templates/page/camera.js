// The part of time that is shown.

/** Pixels that the shortest operation has at the closest look. */
const CLOSEST = 400;

export class Camera {
  constructor() {
    this.from = 0;
    this.span = 1; // of time, from the left edge of the plot to the right one
    this.end = 1; // of what can be shown
    this.shortest = 1;
    this.width = 1; // of the plot, in pixels
  }

  /** Pixels per unit of time. */
  get scale() {
    return this.width / this.span;
  }

  /** Whether all of the time is shown. */
  get isWhole() {
    return this.span >= this.end * 0.999;
  }

  /**
   * Sets what can be shown, and keeps what is shown if that is possible; what was shown whole stays whole.
   * @param {number} end
   * @param {number} shortest length of an operation
   */
  limit(end, shortest) {
    const whole = this.isWhole;
    this.end = end > 0 ? end * 1.005 : 1;
    this.shortest = shortest > 0 ? shortest : this.end;
    if (whole) this.showAll();
    else this.keepInside();
  }

  showAll() {
    this.from = 0;
    this.span = this.end;
  }

  /**
   * Shows less of the time (a factor below 1) or more; what is at `time` stays where it is.
   * @param {number} factor
   * @param {number} time
   */
  zoom(factor, time = this.from + this.span / 2) {
    const least = Math.min(this.end, (this.shortest * this.width) / CLOSEST);
    const span = Math.min(this.end, Math.max(least, this.span * factor));
    this.from = time - ((time - this.from) * span) / this.span;
    this.span = span;
    this.keepInside();
  }

  /** @param {number} pixels that what is shown moves to the left */
  pan(pixels) {
    this.from += pixels / this.scale;
    this.keepInside();
  }

  /**
   * Moves as little as it takes to show a stretch of time; one that is longer than the plot from its start.
   * @param {number} start
   * @param {number} end
   */
  reveal(start, end) {
    const margin = Math.min(this.span * 0.1, Math.max(0, (this.span - (end - start)) / 2));
    if (end + margin > this.from + this.span) this.from = end + margin - this.span;
    if (start - margin < this.from) this.from = start - margin;
    this.keepInside();
  }

  /**
   * Shows a stretch of time with some of what is around it.
   * @param {number} start
   * @param {number} end
   */
  frame(start, end) {
    this.span = (end - start) * 1.4;
    this.from = start - this.span / 7;
    this.keepInside();
  }

  keepInside() {
    this.span = Math.min(this.span, this.end);
    this.from = Math.min(Math.max(this.from, 0), this.end - this.span);
  }
}
