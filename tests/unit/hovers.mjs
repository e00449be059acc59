// Hovers over every mark on the lanes of documents, with the scripts of a page, and writes all that is said.
//
//   node hovers.mjs SCRIPTS_FOLDER CASES.json RESULTS.json
//
// A case has a document, and values of sliders by their names. A text is written once, with how many marks have it.

import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, input, output] = process.argv.slice(2);
const script = (name) => import(pathToFileURL(`${folder}/${name}.js`).href);
const { rowsOf } = await script("layout");
const { Store } = await script("store");
const { markAt } = await script("tips");
const { needText, sentence, slackText } = await script("words");

function said({ page, values }) {
  const store = new Store(page, false);
  store.setValues(Object.entries(values));
  store.change({ shows: { ...store.state.shows, links: true, memory: true } });
  const texts = {};
  const add = (kind, text) => {
    texts[kind] ??= {};
    texts[kind][text] = (texts[kind][text] ?? 0) + 1;
  };
  for (const row of rowsOf(store.all, store.state, 500).rows) {
    const { run } = store.all[row.schedule];
    const ends = [...new Set([...run.start, ...run.end])].sort((one, other) => one - other);
    const middles = ends.slice(1).map((end, place) => (ends[place] + end) / 2);
    for (const time of [...ends, ...middles]) {
      for (const lower of [false, true]) add(row.kind, markAt(store, row, time, run.span / 1000, lower).text);
    }
  }
  for (const played of store.all) {
    for (let operation = 0; operation < played.start.length; operation++) {
      add("operations", `${sentence(played, operation)} ${slackText(played, operation)}`);
    }
    for (const need of played.needs) for (const after of [false, true]) add("needs", needText(played, need, after));
  }
  return texts;
}

writeFileSync(output, JSON.stringify(JSON.parse(readFileSync(input, "utf8")).map(said)));
