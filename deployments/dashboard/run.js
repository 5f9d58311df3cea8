// One training run: where it stands, its stages as they are now and as they were, what it learned, and its evaluations.

import {areas, bar, lines} from "./charts.js";
import {make} from "./dom.js";
import {FAILURE_CLASSES, GROUP_STATES, badge, colour, known, percent, seconds, section, short, table, tiles} from "./words.js";

const IN_FLIGHT = ["ready", "written", "running", "pending"];
const STAGE_COLOURS = ["grey", "pink", "amber", "violet", "teal", "blue", "green", "red"];
const LEARNING = [
  ["Reward of rollouts", "reward_mean", {top: 1}],
  ["Loss", "loss"],
  ["KL to the teacher", "teacher_kl"],
  ["KL to behaviour policy", "kl_behaviour"],
  ["Entropy", "entropy"],
  ["Gradient norm", "grad_norm"],
  ["Response length (tokens)", "response_tokens_mean"],
];

/** run: of /v1/runs/ID. metrics: a record a step. timeline: of /v1/runs/ID/timeline. */
export function runView(run, metrics, timeline) {
  return [
    standing(run, metrics, timeline),
    stages(run, timeline),
    overTime(metrics, timeline),
    learning(run, metrics),
    evaluations(run),
    dropped(run),
  ];
}

function standing(run, metrics, timeline) {
  const groups = run.ordinals ?? {},
    attempts = run.attempts ?? {},
    newest = metrics.at(-1) ?? {},
    scored = run.evaluations.filter(item => item.valid).at(-1);
  return make(
    "section",
    {"data-key": "standing"},
    make(
      "div",
      {class: "title"},
      make("h2", {}, run.id),
      badge(run.status),
      make("span", {class: "dim"}, `step ${short(run.step)} of ${short(run.steps)}`),
    ),
    make("progress", {max: run.steps ?? 1, value: run.step ?? 0, "aria-label": "steps"}),
    run.error ? make("pre", {class: "bad"}, run.error) : null,
    tiles([
      ["held-out accuracy", percent(scored?.accuracy)],
      [
        "staleness (versions)",
        known(newest.staleness_mean) ? `mean ${short(newest.staleness_mean)}, max ${short(newest.staleness_max)}` : "–",
      ],
      ["weight version", short(run.weight_version)],
      ["checkpoint", run.checkpoint_step ? `step ${run.checkpoint_step}` : "none yet"],
      ["attempts", `${short(attempts.started)} started, ${short(attempts.lost)} lost, ${short(attempts.regenerated)} again`],
      ["ran for", seconds(timeline.at(-1)?.seconds)],
    ]),
    make(
      "h3",
      {style: "margin-top:14px"},
      "Groups by state",
      make("span", {}, `${short(groups.fetched)} fetched; buffer ${short(run.capacity?.used)} of ${short(run.capacity?.total)}`),
    ),
    bar(Object.entries(GROUP_STATES).map(([name, c]) => [name, groups[name] ?? 0, c])),
  );
}

function stages(run, timeline) {
  const found = Object.entries(run.stages);
  if (!found.length) return null;
  const live = run.status === "running",
    now = timeline.at(-1)?.stages ?? {},
    most = Math.max(1, ...found.map(([, stage]) => stage.backlog));
  const rows = found.map(([name, stage], place) => [
    make(
      "span",
      {class: "legend", style: `margin:0;${colour(STAGE_COLOURS[place % STAGE_COLOURS.length])}`},
      make("span", {}, make("b"), name.replaceAll("_", " ")),
    ),
    short(stage.backlog),
    meter(stage.backlog / most),
    seconds(stage.oldest_s),
    live && known(now[name]?.busy) ? percent(now[name].busy) : "–",
    short(stage.in),
    short(stage.out),
    `${stage.node} ${stage.pid}`,
  ]);
  return section(
    "stages",
    "Stages",
    table(
      ["stage", {num: "backlog"}, {wide: ""}, {num: "oldest"}, {num: "busy"}, {num: "in"}, {num: "out"}, {num: "process"}],
      rows,
    ),
    pool(run.stages.evaluator_pool?.detail),
  );
}

function meter(share) {
  return make("div", {class: "bar"}, make("i", {style: `width:${100 * share}%;${colour("blue")}`}));
}

/** What the placement pool has given out: tokens (the right of a sample to run), and by them resources of its nodes. */
function pool(detail) {
  if (!detail) return null;
  const held = detail.tokens_held ?? 0,
    running = detail.samples_running ?? 0;
  const nodes = Object.entries(detail.nodes ?? {}).flatMap(([node, has]) =>
    Object.entries(has).map(([name, [taken, whole]]) => [
      `${node}: ${name.replaceAll("_", " ")}`,
      `${short(taken)} of ${short(whole)}`,
      meter(taken / whole),
    ]),
  );
  return make(
    "div",
    {"data-key": "pool", style: "margin-top:14px"},
    make("h3", {}, "Placement pool"),
    tiles([
      ["samples running", short(running)],
      ["tokens held", short(held)],
      ["batches waiting", short(detail.batches_waiting)],
      ["workers", `${short(detail.workers_alive)} alive, ${short(detail.worker_deaths)} died`],
    ]),
    nodes.length ? table(["resource", {num: "given out"}, {wide: ""}], nodes) : null,
  );
}

function overTime(metrics, timeline) {
  const at = timeline.map(row => row.seconds),
    names = Object.keys(timeline.at(-1)?.stages ?? {});
  const ofStages = figure =>
    names.map((name, place) => ({
      name: name.replaceAll("_", " "),
      colour: STAGE_COLOURS[place % STAGE_COLOURS.length],
      points: timeline.map(row => [row.seconds, row.stages[name]?.[figure]]),
    }));
  const charts = [
    areas(
      "Groups in the pipeline",
      at,
      IN_FLIGHT.map(name => ({name, colour: GROUP_STATES[name], values: timeline.map(row => row.states[name] ?? 0)})),
    ),
    lines("Backlog (items)", ofStages("backlog"), {unit: "s"}),
    lines("Occupancy (busy share)", ofStages("busy"), {unit: "s"}),
    lines("Staleness (versions)", [
      curve("mean", "blue", metrics, "staleness_mean"),
      curve("max", "amber", metrics, "staleness_max"),
    ]),
  ].filter(known);
  return charts.length ? section("time", "Over time", make("div", {class: "charts"}, ...charts)) : null;
}

function learning(run, metrics) {
  const valid = run.evaluations.filter(item => item.valid),
    datasets = Object.keys(valid.at(-1)?.by_dataset ?? {});
  const series = [{name: "student", colour: "blue", points: valid.map(item => [item.step, item.accuracy])}];
  if (datasets.length > 1)
    series.push(
      ...datasets.map((name, place) => ({
        name,
        colour: STAGE_COLOURS[(place + 1) % STAGE_COLOURS.length],
        points: valid.map(item => [item.step, item.by_dataset[name]]),
      })),
    );
  const levels = run.teachers
    .filter(item => item.valid && known(item.accuracy))
    .map(item => [`teacher ${item.alias}`, item.accuracy]);
  const charts = [
    lines("Held-out accuracy", series, {top: 1, levels}),
    ...LEARNING.map(([title, name, options]) => lines(title, [curve(title, "blue", metrics, name)], options)),
  ].filter(known);
  return charts.length ? section("learning", "Learning", make("div", {class: "charts"}, ...charts)) : null;
}

const curve = (name, c, metrics, figure) => ({name, colour: c, points: metrics.map(line => [line.step, line[figure]])});

function evaluations(run) {
  const found = [...run.evaluations].reverse().concat(run.teachers);
  if (!found.length) return null;
  const rows = found.map(item => [
    make(
      "a",
      {href: `#run/${encodeURIComponent(run.id)}/${encodeURIComponent(item.id)}`},
      item.step === null ? `teacher ${item.alias}` : `step ${item.step}`,
    ),
    percent(item.accuracy),
    `${item.scored} of ${item.total}`,
    item.valid ? "" : make("span", {class: "state", style: colour("red"), title: item.why_invalid.join("; ")}, "not valid"),
    bar(classParts(item.failure_classes), {legend: false}),
  ]);
  return section(
    "evaluations",
    "Held-out evaluations, and what the samples came to",
    classLegend(found),
    table(["evaluation", {num: "accuracy"}, {num: "scored"}, "", {wide: "failure classes"}], rows),
  );
}

const classParts = counts => Object.entries(FAILURE_CLASSES).map(([name, c]) => [name, counts[name] ?? 0, c]);

function classLegend(found) {
  const there = Object.entries(FAILURE_CLASSES).filter(([name]) => found.some(item => item.failure_classes[name]));
  return make(
    "div",
    {class: "legend", style: "margin:0 0 6px"},
    ...there.map(([name, c]) => make("span", {style: colour(c)}, make("b"), name.replaceAll("_", " "))),
  );
}

function dropped(run) {
  const reasons = Object.entries(run.dropped_by_reason ?? {});
  return reasons.length
    ? section(
        "dropped",
        "Dropped groups",
        table(
          ["reason", {num: "groups"}],
          reasons.map(([name, count]) => [name, short(count)]),
        ),
      )
    : null;
}
