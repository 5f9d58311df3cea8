// The page: asks the service every two seconds and draws what has changed. The address says what is looked at:
// #run/ID, #run/ID/EVALUATION or #eval/ID.

import {Refused, get, linesFrom, use} from "./api.js";
import {fill, make} from "./dom.js";
import {jobView, runEvaluationView} from "./evaluation.js";
import {runView} from "./run.js";
import {badge, percent, section, short} from "./words.js";

const POLL_MS = 2000,
  TIMELINE_MS = 8000;
const $ = id => document.getElementById(id);
const choice = {filter: "", opened: new Set()};
let held = {address: null}; // what is known of the thing that is looked at
let wanted = false,
  running = null;

/** One at a time: whoever asks while one is under way gets another behind it. */
function refresh() {
  wanted = true;
  running ??= (async () => {
    while (wanted) {
      wanted = false;
      await once();
    }
    running = null;
  })();
  return running;
}

async function once() {
  try {
    const [health, runs, evals] = await Promise.all([get("/healthz").catch(() => null), get("/v1/runs"), get("/v1/evals")]);
    $("model").textContent = health ? `live: weight version ${health.weight_version}` : "the live model does not answer";
    const looked = address(runs.data, evals.data);
    list($("runs"), "run", looked, runs.data, run => `step ${short(run.step)} of ${short(run.steps)}`);
    list($("evals"), "eval", looked, evals.data, standingOf);
    if (looked !== held.address) {
      fill($("detail"), []);
      held = {address: looked, samples: [], offset: 0, metrics: [], timeline: []};
      Object.assign(choice, {filter: "", opened: new Set()});
    }
    await load().catch(missing);
    draw();
    say(null);
    $("clock").textContent = new Date().toLocaleTimeString();
  } catch (error) {
    say(error);
  }
}

/** What the address names; without one the newest run, else the newest evaluation. */
function address(runs, evals) {
  if (location.hash.length > 1) return location.hash.slice(1);
  const [kind, newest] = runs.length ? ["run", runs[0]] : ["eval", evals[0]];
  return newest ? `${kind}/${encodeURIComponent(newest.id)}` : null;
}

function list(parent, kind, looked, items, standing) {
  const entries = items.map(item => {
    const here = `${kind}/${encodeURIComponent(item.id)}`,
      current = looked === here || looked?.startsWith(`${here}/`);
    return make(
      "a",
      {href: `#${here}`, "data-key": item.id, "aria-current": current ? "true" : null},
      badge(item.status),
      " ",
      item.id,
      make("div", {class: "dim"}, standing(item)),
    );
  });
  fill(parent, entries.length ? entries : [make("span", {class: "dim"}, "none yet")]);
}

function standingOf(job) {
  const found = Object.entries(job.results).map(([name, figures]) => `${name} ${percent(figures.accuracy)}`);
  return [`${job.progress.done} of ${job.progress.total}`, ...found].join(", ");
}

async function load() {
  if (held.address === null) return;
  const [kind, id, evaluation] = held.address.split("/"),
    path = `/v1/${kind}s/${id}`;
  if (!["run", "eval"].includes(kind) || !id) throw new Refused(`#${held.address}`, 404, "neither a run nor an evaluation");
  held.item = await get(path);
  if (kind === "eval") await loadSamples();
  else if (evaluation) {
    if (!held.samples.length) held.samples = (await get(`${path}/evaluations/${evaluation}/samples`)).data;
  } else await loadCurves(path);
}

/** Only the lines that are new. */
async function loadSamples() {
  const file = held.item.artefacts["samples.jsonl"];
  if (!file || held.samples.length >= held.item.progress.done) return;
  const [more, offset] = await linesFrom(file, held.offset);
  held.samples = held.samples.concat(more);
  held.offset = offset;
}

/** Metrics after a step (they are written a moment behind it), the timeline every few seconds: both are long. */
async function loadCurves(path) {
  const {step, status} = held.item;
  const live = status === "running",
    lacks = (held.metrics.at(-1)?.step ?? 0) < step;
  if (held.step !== step || held.status !== status || (live && lacks)) held.metrics = (await get(`${path}/metrics`)).data;
  if (held.status !== status || (live && Date.now() - held.timelineAt > TIMELINE_MS)) {
    held.timeline = (await get(`${path}/timeline`)).data;
    held.timelineAt = Date.now();
  }
  Object.assign(held, {step, status});
}

/** What the address names may not be there, or not yet. */
function missing(error) {
  if (!(error instanceof Refused && error.status === 404)) throw error;
  Object.assign(held, {item: null, missing: error.message});
}

function draw() {
  if (held.item) fill($("detail"), view());
  else if (held.missing) fill($("detail"), [section("missing", "There is no such thing", make("p", {}, held.missing), make("a", {href: "#"}, "what is newest"))]);
}

function view() {
  const [kind, , name] = held.address.split("/");
  if (kind === "eval") return jobView(held.item, held.samples, choice);
  if (!name) return runView(held.item, held.metrics, held.timeline);
  const evaluation = [...held.item.evaluations, ...held.item.teachers].find(item => item.id === decodeURIComponent(name));
  return runEvaluationView(held.item, evaluation, held.samples, choice);
}

function say(error) {
  const asksForToken = error instanceof Refused && error.status === 401;
  $("token").hidden = !asksForToken;
  $("error").hidden = error === null || asksForToken;
  $("error").textContent = error?.message ?? "";
}

document.addEventListener(
  "toggle",
  ({target}) => {
    const name = target.dataset?.key;
    if (target.nodeName !== "DETAILS" || target.open === choice.opened.has(name)) return;
    if (target.open) choice.opened.add(name);
    else choice.opened.delete(name);
    draw();
  },
  true,
);
document.addEventListener("change", ({target}) => {
  if (target.name !== "filter") return;
  choice.filter = target.value;
  draw();
});
$("token").addEventListener("submit", event => {
  event.preventDefault();
  use(new FormData(event.target).get("token"));
  refresh();
});
addEventListener("hashchange", refresh);
document.addEventListener("visibilitychange", refresh);
(async () => {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise(done => setTimeout(done, POLL_MS));
  }
})();
