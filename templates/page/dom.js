// Elements of the page. Text that comes from a scheme only ever becomes a text node or the value of an attribute.

/**
 * Makes an element. A function among the attributes listens to the event of that name.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string | number | boolean | ((event: any) => void)>} attributes false leaves one out
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children);
  return made;
}

/**
 * The element of the page with an id.
 * @template {HTMLElement} E
 * @param {string} id
 * @param {new () => E} type
 * @returns {E}
 */
export function part(id, type) {
  const known = document.getElementById(id);
  if (!(known instanceof type)) throw new Error(`the page has no ${id}`);
  return known;
}

/**
 * A table with a caption, whose first column names the rows.
 * @param {string} caption
 * @param {(Node | string)[]} heads
 * @param {(Node | string)[][]} rows
 * @returns {HTMLTableElement}
 */
export function table(caption, heads, rows) {
  const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col" }, name)));
  const lines = rows.map(([name, ...cells]) => {
    const named = element("th", { scope: "row" }, name);
    return element("tr", {}, named, ...cells.map((cell) => element("td", {}, cell)));
  });
  const made = element("table", {}, element("caption", {}, caption), element("thead", {}, head));
  made.append(element("tbody", {}, ...lines));
  return made;
}

/**
 * A table that scrolls where it is too large.
 * @param {HTMLTableElement} made
 * @param {string} name
 * @returns {HTMLElement}
 */
export function scrolled(made, name) {
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, made);
}
