// How figures and states are said and coloured, everywhere on the page.

import {make} from "./dom.js";

export const GROUP_STATES = {
  pending: "grey",
  running: "amber",
  written: "violet",
  ready: "blue",
  consumed: "teal",
  trained: "green",
  dropped: "red",
};
export const FAILURE_CLASSES = {
  solved: "green",
  finish_unresolved: "amber",
  loop: "violet",
  ctx_overflow: "blue",
  budget: "teal",
  timeout: "pink",
  infra: "red",
  other: "grey",
};
const STATUSES = {
  finished: "green",
  done: "green",
  running: "blue",
  starting: "blue",
  stopped: "amber",
  failed: "red",
  queued: "grey",
  cancelled: "grey",
};

export const colour = name => `--c:var(--${name})`;
export const known = value => value !== null && value !== undefined;
export const percent = share => (known(share) ? `${(100 * share).toFixed(1)}\u00a0%` : "–");

/** A number in at most four characters or so: 4.7e-6, 0.0132, 4.52, 87, 13k. */
export function short(value) {
  if (!known(value)) return "–";
  if (Math.abs(value) >= 10000) return `${(value / 1000).toFixed(0)}k`;
  if (Number.isInteger(value)) return String(value);
  if (Math.abs(value) < 0.0001) return value.toExponential(1);
  return Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

export function seconds(value) {
  if (!known(value)) return "–";
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

export const badge = status => make("span", {class: "state", style: colour(STATUSES[status] ?? "grey")}, status);
export const section = (key, title, ...children) => make("section", {"data-key": key}, make("h2", {}, title), ...children);

/** Figures side by side: [name, value] each. */
export const tiles = pairs =>
  make("dl", {class: "tiles"}, ...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));

/** heads: texts. rows: cells are texts, numbers, or elements; a column is of numbers when its head says {num: text}. */
export function table(heads, rows) {
  const classes = heads.map(head => (head.num !== undefined ? "num" : head.wide !== undefined ? "wide" : null));
  const line = (tag, cells) => make("tr", {}, ...cells.map((cell, place) => make(tag, {class: classes[place]}, cell ?? "–")));
  return make(
    "table",
    {},
    make(
      "thead",
      {},
      line(
        "th",
        heads.map(head => head.num ?? head.wide ?? head),
      ),
    ),
    make("tbody", {}, ...rows.map(row => line("td", row))),
  );
}
