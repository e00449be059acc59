// The texts beside the lanes. Only the lines that are seen are elements, so that a long text costs no more than a short
// one. A click on a line selects its operation; lines of several operations let them stand out.

import { element } from "./dom.js";
import { select } from "./keys.js";
import { ledTo } from "./program_lines.js";

const HEIGHT = 18;

export class Texts {
  /**
   * @param {import("./chart.js").Chart} chart
   * @param {HTMLElement} section
   */
  constructor(chart, section) {
    this.chart = chart;
    this.store = chart.store;
    this.current = 1; // line that the keyboard is at
    this.chooser = element("select", { "aria-label": "Text", change: () => this.choose() });
    this.store.page.texts.forEach(({ name }, text) => this.chooser.append(element("option", { value: text }, name)));
    this.sheet = element("div", { class: "sheet", role: "presentation" });
    this.pane = element("div", { class: "code", tabindex: 0, role: "listbox", "aria-label": "Lines of the text" }, this.sheet);
    section.append(element("div", { class: "head" }, this.chooser), this.pane);
    section.hidden = this.store.page.texts.length === 0;
    this.pane.addEventListener("scroll", () => this.fill());
    this.pane.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.fill()).observe(this.pane);
    this.store.listen((changed) => {
      if (changed.has("text")) this.load();
      if (changed.has("selected")) this.follow();
      if (changed.has("line")) this.fill();
    });
    if (!section.hidden) this.load();
  }

  choose() {
    this.store.change({ text: Number(this.chooser.value) });
  }

  /**
   * Shows a text, at the line of the selected operation if there is one.
   * @param {number} text
   */
  open(text) {
    this.store.change({ text });
    this.toSelected();
  }

  load() {
    const { text } = this.store.state;
    const { text: content, line, language } = this.store.page.texts[text];
    this.chooser.value = String(text);
    this.lines = content.split("\n");
    if (this.lines[this.lines.length - 1] === "") this.lines.pop();
    /** @type {Map<number, number[]>} */
    this.operations = new Map();
    for (let operation = 0; operation < line.length; operation++) {
      if (line[operation] <= 0) continue;
      const known = this.operations.get(line[operation]);
      if (known === undefined) this.operations.set(line[operation], [operation]);
      else known.push(operation);
    }
    if (language === "sir" && this.store.page.schedules.length > 0) {
      const { messages } = this.store.page.schedules[0];
      this.leads = ledTo(this.lines, this.operations, messages);
    } else this.leads = new Map();
    const longest = this.lines.reduce((most, words) => Math.max(most, words.length), 0);
    this.sheet.style.height = `${this.lines.length * HEIGHT}px`;
    this.sheet.style.width = `calc(6em + ${longest}ch)`;
    this.wrong = new Set(text === 0 ? Array.from(this.store.page.mistake?.lines ?? []) : []);
    this.current = 1;
    this.pane.scrollTop = 0;
    const [mistaken = 0] = this.wrong;
    this.to(this.selectedLine() || mistaken);
    this.fill();
  }

  /** Shows the line of what is now selected; of a script that of the worker. */
  follow() {
    const { selected, text } = this.store.state;
    const { texts } = this.store.page;
    if (selected === null || selected.schedule !== 0 || texts.length === 0) return this.fill();
    const { operation } = selected;
    if (texts[text].rank >= 0 && !(texts[text].line[operation] > 0)) {
      const other = texts.findIndex(({ rank, line }) => rank >= 0 && line[operation] > 0);
      if (other >= 0) this.store.change({ text: other });
    }
    this.toSelected();
    this.fill();
  }

  toSelected() {
    this.to(this.selectedLine());
  }

  /**
   * Scrolls to a line; 0 is none.
   * @param {number} line
   */
  to(line) {
    if (line === 0) return;
    this.current = line;
    const top = (line - 1) * HEIGHT;
    const { scrollTop, clientHeight } = this.pane;
    if (top < scrollTop + HEIGHT || top > scrollTop + clientHeight - 2 * HEIGHT) this.pane.scrollTop = top - clientHeight / 3;
  }

  /** @returns {number} line of the selected operation or line in the text that is shown, 0 for none */
  selectedLine() {
    const { selected, line, text } = this.store.state;
    if (line !== null && line.text === text) return line.line;
    if (selected === null || selected.schedule !== 0) return 0;
    return this.store.page.texts[text].line[selected.operation] ?? 0;
  }

  /** Makes elements of the lines that are seen. */
  fill() {
    if (this.lines === undefined || this.operations === undefined) return;
    const first = Math.max(0, Math.floor(this.pane.scrollTop / HEIGHT) - 4);
    const last = Math.min(this.lines.length, first + Math.ceil(this.pane.clientHeight / HEIGHT) + 8);
    const chosen = this.selectedLine();
    const made = [];
    for (let number = first + 1; number <= last; number++) made.push(this.lineOf(number, this.lines[number - 1], number === chosen));
    this.sheet.replaceChildren(...made);
    this.pane.setAttribute("aria-activedescendant", `line-${Math.min(Math.max(this.current, first + 1), last)}`);
  }

  /**
   * @param {number} number
   * @param {string} words
   * @param {boolean} chosen
   * @returns {HTMLElement}
   */
  lineOf(number, words, chosen) {
    const known = this.operations?.has(number) === true || this.leads?.has(number) === true;
    const line = element("div", {
      id: `line-${number}`,
      class: `line${known ? " known" : ""}${this.wrong?.has(number) ? " wrong" : ""}${number === this.current ? " at" : ""}`,
      role: "option",
      "aria-selected": String(chosen),
      "aria-posinset": number,
      "aria-setsize": this.lines?.length ?? 0,
      click: () => this.take(number),
    });
    line.style.top = `${(number - 1) * HEIGHT}px`;
    if (this.wrong?.has(number)) line.title = "named by the error";
    const remark = words.indexOf("#");
    const [code, comment] = remark < 0 ? [words, ""] : [words.slice(0, remark), words.slice(remark)];
    line.append(element("i", {}, String(number)), code, element("span", { class: "remark" }, comment));
    return line;
  }

  /**
   * Selects the operation of a line; of several, lets them stand out, and at the second time selects the first.
   * @param {number} number
   */
  take(number) {
    const lead = this.leads?.get(number);
    if (lead !== undefined && lead.line > 0) number = lead.line;
    this.current = number;
    if (lead !== undefined && lead.line === 0) return select(this.chart, { schedule: 0, operation: lead.operation });
    const operations = this.operations?.get(number) ?? [];
    const { text, line } = this.store.state;
    const again = line !== null && line.text === text && line.line === number;
    if (operations.length === 1 || (again && operations.length > 0)) select(this.chart, { schedule: 0, operation: operations[0] });
    else if (operations.length > 1) this.store.change({ selected: null, line: { text, line: number } });
    this.fill();
  }

  /** @param {KeyboardEvent} event */
  press(event) {
    const page = Math.max(1, Math.floor(this.pane.clientHeight / HEIGHT) - 1);
    const count = this.lines?.length ?? 1;
    /** @type {Record<string, number>} */
    const moves = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -count, End: count };
    if (event.key === "Enter" || event.key === " ") this.take(this.current);
    else if (event.key in moves) {
      this.current = Math.min(count, Math.max(1, this.current + moves[event.key]));
      const top = (this.current - 1) * HEIGHT;
      if (top < this.pane.scrollTop) this.pane.scrollTop = top;
      if (top + HEIGHT > this.pane.scrollTop + this.pane.clientHeight) this.pane.scrollTop = top + HEIGHT - this.pane.clientHeight;
      this.fill();
    } else return;
    event.preventDefault();
  }
}
