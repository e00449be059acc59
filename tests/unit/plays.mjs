// Plays the schedules of documents with the scripts of a page, and writes what they compute.
//
//   node plays.mjs SCRIPTS_FOLDER CASES.json RESULTS.json
//
// A case has a schedule, a list of settings of its sliders, and the names of QUESTIONS that are asked of each.

import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, input, output] = process.argv.slice(2);
const script = (name) => import(pathToFileURL(`${folder}/${name}.js`).href);
const { listOf, played, play, prepare, ROLE } = await script("engine");
const { criticalPath, needs, slacks } = await script("paths");
const { criticalCycle, updateTime } = await script("period");
const { linkCurves, memoryCurves, underWay } = await script("curves");
const { CAUSES, idleTimes } = await script("idle");
const { differences } = await script("differences");

const QUESTIONS = {
  update: (plan, run) => updateTime(plan, run),
  span: (plan, run) => run.span,
  starts: (plan, run) => Array.from(plan.schedule.operations.event, (event) => run.start[event]),
  ends: (plan, run) => Array.from(plan.schedule.operations.event, (event) => run.end[event]),
  path: (plan, run) =>
    Array.from(criticalPath(plan, run), (event) => ({
      operations: [...listOf(plan.operations, event)],
      move: plan.role[event] === ROLE.MOVE ? plan.schedule.moves.words[plan.schedule.events.subject[event]] : "",
      start: run.end[event] - run.length[event],
      end: run.end[event],
    })),
  turns: (plan, run) => (plan.schedule.turn ? criticalCycle(plan.schedule.turn, run.length, plan.preference).turns : 1),
  slack: (plan, run) => {
    const slack = slacks(plan, run);
    const spanWith = (event, more) => played(plan, run.length.map((length, row) => (row === event ? length + more : length))).span;
    return Array.from(plan.schedule.operations.event, (event) => ({
      slack: slack[event],
      spent: spanWith(event, slack[event]),
      beyond: spanWith(event, slack[event] + 0.125),
    }));
  },
  needs: (plan, run) => needs(plan, run).map((need) => ({ ...need, from: rowsOf(plan, need.from), to: rowsOf(plan, need.to) })),
  memory: (plan, run) => plan.schedule.memory.map((memory) => memoryCurves(plan, run, memory).map(plain)),
  links: (plan, run) =>
    linkCurves(plan, run).map((curve, link) => ({
      ...plain(curve),
      found: Array.from(curve.times, (time) => underWay(plan, run, link, time).length),
    })),
  messages: (plan, run) => {
    const { wire, flight } = plan.schedule.messages;
    return Array.from(wire, (event, row) => [run.start[event], run.end[flight[row]]]);
  },
  busy: busyTimes,
  idle: (plan, run) => {
    const idle = idleTimes(plan, run);
    return { ...idle, cause: idle.cause.map((cause) => CAUSES[cause]), totals: idle.totals.map((row) => named(row)) };
  },
};

// Time of each worker in which it computes, steps or posts.
function busyTimes({ laneFrom, role, schedule }, { length }) {
  const timeOf = (worker) => [...length.keys()].slice(laneFrom[worker], laneFrom[worker + 1]).filter((event) => role[event] !== ROLE.WAIT);
  return Array.from({ length: schedule.workers }, (_, worker) => timeOf(worker).reduce((sum, event) => sum + length[event], 0));
}

function totals(plan, run) {
  const whole = run.span * plan.schedule.workers;
  const idle = whole - busyTimes(plan, run).reduce((sum, time) => sum + time, 0);
  return { span: run.span, idle, idleShare: idle / whole };
}

const named = (row) => Object.fromEntries(CAUSES.map((cause, number) => [cause, row[number]]));
const plain = (curve) => ({ ...curve, times: [...curve.times], amounts: [...curve.amounts] });
const rowsOf = (plan, event) => (plan.role[event] === ROLE.COMPUTE ? [...listOf(plan.operations, event)] : []);

function answers({ schedule, settings, asked }) {
  const plan = prepare(schedule);
  return settings.map((values) => {
    const run = play(plan, values);
    return Object.fromEntries(asked.map((question) => [question, QUESTIONS[question](plan, run)]));
  });
}

function compared({ matches, back, schedules }) {
  const plans = schedules.map(prepare);
  const runs = plans.map((plan) => play(plan, plan.values));
  const found = differences(matches, back, plans[0], runs[0], plans[1], runs[1]);
  const columns = Object.entries(found).map(([name, column]) => [name, [...column]]);
  return { ...Object.fromEntries(columns), totals: plans.map((plan, number) => totals(plan, runs[number])) };
}

const results = JSON.parse(readFileSync(input, "utf8")).map((one) => ("matches" in one ? compared(one) : answers(one)));
writeFileSync(output, JSON.stringify(results));
