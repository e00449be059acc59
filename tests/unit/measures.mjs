// The lanes of recorded updates: [[document, update], ..] -> [{ label, operation, start, idle }, ..].

import { readFileSync, writeFileSync } from "node:fs";
import { measuredOf } from "./measured.js";

const [cases, results] = process.argv.slice(3);
const lanes = JSON.parse(readFileSync(cases, "utf-8")).map(([{ schedules, trace }, update]) => {
  const { boxes, operation } = measuredOf(trace, update, schedules[0]);
  return { label: boxes.schedule.operations.label, operation, start: [...boxes.start], idle: boxes.idle.worker.length };
});
writeFileSync(results, JSON.stringify(lanes));
