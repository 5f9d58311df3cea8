// Evaluations: one that was asked for over HTTP, or one of a run; both down to what was said in each sample.

import {bar} from "./charts.js";
import {make} from "./dom.js";
import {FAILURE_CLASSES, badge, colour, known, percent, section, short, table} from "./words.js";

const MOST_ROWS = 100;

/** job: of /v1/evals/ID. samples: its lines. choice: {filter, opened}, what a person has chosen to see. */
export function jobView(job, samples, choice) {
  const rows = Object.entries(job.results).map(([name, found]) => [
    name,
    percent(found.accuracy),
    percent(found.accuracy_all),
    short(found.solved),
    short(found.scored),
    short(found.done),
    short(found.total),
    Object.entries(found["pass@k"])
      .map(([k, share]) => `pass@${k} ${percent(share)}`)
      .join("   "),
  ]);
  return [
    standing(
      [
        make("h2", {}, job.id),
        badge(job.status),
        make(
          "span",
          {class: "dim"},
          `${job.progress.done} of ${job.progress.total} samples; model ${job.model}, weight version ${short(job.weight_version)}`,
        ),
      ],
      make("progress", {max: Math.max(1, job.progress.total), value: job.progress.done, "aria-label": "samples"}),
      ...[job.error, ...job.why_invalid].filter(Boolean).map(text => make("pre", {class: "bad"}, text)),
      rows.length
        ? table(
            ["data set", {num: "accuracy"}, {num: "of all"}, {num: "solved"}, {num: "scored"}, {num: "done"}, {num: "total"}, "pass@k"],
            rows,
          )
        : null,
    ),
    ...samplesView(samples, choice),
  ];
}

/** item: an evaluation in `evaluations` or `teachers` of /v1/runs/ID. */
export function runEvaluationView(run, item, samples, choice) {
  return [
    standing(
      [
        make("h2", {}, make("a", {href: `#run/${encodeURIComponent(run.id)}`}, run.id)),
        make("span", {}, item.step === null ? `teacher ${item.alias}` : `student at step ${item.step}`),
        make("span", {class: "dim"}, `${item.scored} of ${item.total} samples scored`),
      ],
      ...item.why_invalid.map(text => make("pre", {class: "bad"}, text)),
      table(
        ["data set", {num: "accuracy"}],
        Object.entries(item.by_dataset).map(([name, share]) => [name, percent(share)]),
      ),
    ),
    ...samplesView(samples, choice),
  ];
}

/** What is known of an evaluation as a whole. */
function standing(title, ...parts) {
  return make("section", {"data-key": "standing"}, make("div", {class: "title"}, ...title), ...parts);
}

function samplesView(samples, choice) {
  if (!samples.length) return [];
  const counts = Object.entries(FAILURE_CLASSES).map(([name, c]) => [
    name,
    samples.filter(line => line.class === name).length,
    c,
  ]);
  const shown = samples.filter(line => !choice.filter || line.class === choice.filter);
  const option = (value, text) => make("option", {value, selected: value === choice.filter}, text);
  return [
    section("classes", "Failure classes", bar(counts)),
    section(
      "samples",
      "Samples",
      make(
        "select",
        {name: "filter", "aria-label": "failure class"},
        option("", `all ${samples.length}`),
        ...counts.filter(([, count]) => count).map(([name, count]) => option(name, `${name} ${count}`)),
      ),
      make("div", {class: "samples"}, ...shown.slice(0, MOST_ROWS).map(line => sample(line, choice.opened.has(line.sample_id)))),
      shown.length > MOST_ROWS
        ? make("p", {class: "dim"}, `and ${shown.length - MOST_ROWS} more: choose a class, or read samples.jsonl`)
        : null,
    ),
  ];
}

function sample(line, open) {
  const summary = make(
    "summary",
    {},
    make("span", {class: "dim"}, line.sample_id),
    make("span", {}, make("span", {class: "state", style: colour(FAILURE_CLASSES[line.class] ?? "grey")}, line.class)),
    make("span", {}, (line.text || line.error || "(nothing)").slice(0, 200)),
    make("span", {class: "num"}, known(line.reward) ? short(line.reward) : "–"),
  );
  return make("details", {"data-key": line.sample_id, open}, summary, open ? conversation(line) : null);
}

/** The prompt's messages, what was done in each turn, and how it ended. */
function conversation(line) {
  const messages = line.messages ?? [["user", line.prompt]],
    turns = Array.isArray(line.turns) ? line.turns : [];
  return make(
    "div",
    {class: "talk"},
    ...messages.flatMap(([role, content]) => said(role, content)),
    ...turns
      .filter(turn => "action" in turn)
      .flatMap(turn => [
        ...said(`${turn.executor ?? "student"}, turn ${turn.turn}`, turn.action ?? "(no command)"),
        ...("output" in turn ? said(`sandbox, exit code ${turn.exit_code}`, turn.output) : []),
      ]),
    ...said(`result, ${line.finish_reason}, weight version ${short(line.weight_version)}`, line.text || "(nothing)"),
    ...(known(line.answer) ? said("reference answer", String(line.answer)) : []),
    ...(line.error ? said(`error in ${line.phase}`, line.error, "bad") : []),
    make(
      "span",
      {class: "dim"},
      `${line.task_id}; ${line.tokens} tokens, ${line.response_tokens} of them generated, in ${short(line.seconds)} s${line.node ? ` on ${line.node}` : ""}`,
    ),
  );
}

const said = (who, what, tone = null) => [make("span", {class: "dim"}, who), make("pre", {class: tone}, what)];
