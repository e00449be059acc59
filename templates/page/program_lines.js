// Lines of a program that are no operations, and the operations that they lead to.

const VERB = /^(wait send|wait recv|wait all_reduce|send|recv|all_reduce|step|stash|drop)\b/;

/**
 * What the lines of a program lead to that are no operations: those of messages to the operation that makes the message,
 * where it is sent, or takes it; all others, and those of a turn, whose micro-batches have no numbers, to the line of the
 * operation before or, where something is awaited, after them on the lane.
 * @param {string[]} lines
 * @param {ReadonlyMap<number, number[]>} own operations of lines, which are counted from 1
 * @param {Messages} messages
 * @returns {Map<number, { operation: number, line: number }>} a line, or an operation where the line is 0
 */
export function ledTo(lines, own, messages) {
  /** @type {Map<string, number>} */
  const rows = new Map();
  messages.words.forEach((words, row) => rows.set(words, row));
  /** @type {Map<number, { operation: number, line: number }>} */
  const found = new Map();
  lines.forEach((words, index) => {
    const verb = VERB.exec(words.trim())?.[1];
    if (verb === undefined || own.has(index + 1)) return;
    const row = rows.get(words.trim().slice(verb.length).trim().split(" ", 2).join(" "));
    const operation = row === undefined ? -1 : (verb.endsWith("recv") ? messages.taker : messages.maker)[row];
    const ahead = verb === "recv" || verb.startsWith("wait ");
    const line = operation >= 0 ? 0 : nearest(lines, own, index, ahead ? 1 : -1) || nearest(lines, own, index, ahead ? -1 : 1);
    if (operation >= 0 || line > 0) found.set(index + 1, { operation, line });
  });
  return found;
}

/**
 * The next line of an operation, in one direction on the same lane; 0 for none.
 * @param {string[]} lines
 * @param {ReadonlyMap<number, number[]>} own
 * @param {number} index
 * @param {1 | -1} by
 * @returns {number}
 */
function nearest(lines, own, index, by) {
  for (let at = index + by; at >= 0 && at < lines.length && lines[at].startsWith(" "); at += by) if (own.has(at + 1)) return at + 1;
  return 0;
}
