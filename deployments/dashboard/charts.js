// Drawings: bars of shares, lines and stacked areas. Each is made from its figures alone; where there are none, it is null.

import {make, svg} from "./dom.js";
import {colour, known, short} from "./words.js";

const WIDTH = 240,
  HEIGHT = 120,
  LEFT = 34,
  RIGHT = 6,
  TOP = 6,
  BOTTOM = 16;
const MOST_POINTS = 300;

/** parts: [name, count, colour] each. */
export function bar(parts, {legend = true} = {}) {
  const shown = parts.filter(part => part[1] > 0),
    total = shown.reduce((sum, part) => sum + part[1], 0);
  const said = shown.map(([name, count]) => `${name} ${short(count)}`);
  return make(
    "div",
    {},
    make(
      "div",
      {class: "bar", role: "img", "aria-label": said.join(", ") || "nothing"},
      ...shown.map(([name, count, c], place) =>
        make("i", {style: `width:${(100 * count) / total}%;${colour(c)}`, title: said[place]}),
      ),
    ),
    legend ? legendOf(shown.map(([, , c], place) => [said[place], c])) : null,
  );
}

/** series: {name, colour, points: [[x, y], ...]} each. levels: [name, y] each, drawn across. */
export function lines(title, series, {top = null, levels = [], unit = "step"} = {}) {
  const drawn = series
    .map(one => ({...one, points: thin(one.points.filter(([, y]) => known(y)))}))
    .filter(one => one.points.length);
  if (!drawn.length) return null;
  const xs = drawn.flatMap(one => one.points.map(([x]) => x)),
    ys = drawn.flatMap(one => one.points.map(([, y]) => y)).concat(levels.map(([, y]) => y));
  const place = scale(xs, ys, top),
    picture = frame(title, place, unit);
  for (const [name, y] of levels)
    picture.append(
      svg(
        "line",
        {class: "level", style: colour("green"), x1: LEFT, x2: WIDTH - RIGHT, y1: place.y(y), y2: place.y(y)},
        svg("title", {}, `${name} ${short(y)}`),
      ),
    );
  for (const {name, points, colour: c} of drawn) {
    picture.append(svg("polyline", {style: colour(c), points: points.map(([x, y]) => `${place.x(x)},${place.y(y)}`).join(" ")}));
    if (points.length <= 25)
      picture.append(
        ...points.map(([x, y]) =>
          svg(
            "circle",
            {style: colour(c), cx: place.x(x), cy: place.y(y), r: 2.2},
            svg("title", {}, `${name}, ${unit} ${short(x)}: ${short(y)}`),
          ),
        ),
      );
  }
  const names = drawn
    .map(one => [`${one.name} ${short(one.points.at(-1)[1])}`, one.colour])
    .concat(levels.map(([name, y]) => [`${name} ${short(y)}`, "green"]));
  return make(
    "figure",
    {style: "margin:0", "data-key": title},
    make("h3", {}, title, drawn.length === 1 ? make("b", {}, short(drawn[0].points.at(-1)[1])) : null),
    picture,
    names.length > 1 ? legendOf(names) : null,
  );
}

/** layers: {name, colour, values} each, values as many as xs; the first lies at the bottom. */
export function areas(title, xs, layers, {unit = "s"} = {}) {
  const drawn = layers.filter(layer => layer.values.some(value => value > 0));
  if (xs.length < 2 || !drawn.length) return null;
  const sums = [xs.map(() => 0)];
  for (const {values} of drawn) sums.push(sums.at(-1).map((sum, i) => sum + (values[i] ?? 0)));
  const place = scale(xs, sums.at(-1), null),
    picture = frame(title, place, unit);
  drawn.forEach((layer, i) => {
    const above = xs.map((x, k) => `${place.x(x)},${place.y(sums[i + 1][k])}`),
      below = xs.map((x, k) => `${place.x(x)},${place.y(sums[i][k])}`).reverse();
    picture.append(
      svg("polygon", {style: colour(layer.colour), points: [...above, ...below].join(" ")}, svg("title", {}, layer.name)),
    );
  });
  return make(
    "figure",
    {style: "margin:0", "data-key": title},
    make("h3", {}, title),
    picture,
    legendOf(drawn.map(layer => [layer.name, layer.colour])),
  );
}

function legendOf(names) {
  return make("div", {class: "legend"}, ...names.map(([name, c]) => make("span", {style: colour(c)}, make("b"), name)));
}

/** From figures to places in the drawing. Zero is always in it, so that heights compare. */
function scale(xs, ys, top) {
  const x0 = Math.min(...xs),
    x1 = Math.max(...xs),
    y0 = Math.min(0, ...ys),
    y1 = top ?? (Math.max(0, ...ys) || 1);
  const x = value => (LEFT + (x1 > x0 ? (value - x0) / (x1 - x0) : 0.5) * (WIDTH - LEFT - RIGHT)).toFixed(1);
  const y = value => (TOP + ((y1 - value) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM)).toFixed(1);
  return {x, y, x0, x1, y0, y1};
}

function frame(title, {y, x0, x1, y0, y1}, unit) {
  const picture = svg("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title});
  for (const value of [y0, (y0 + y1) / 2, y1])
    picture.append(
      svg("line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value)}),
      svg("text", {x: LEFT - 5, y: Number(y(value)) + 3, "text-anchor": "end"}, short(value)),
    );
  picture.append(
    svg("text", {x: LEFT, y: HEIGHT - 3}, short(x0)),
    svg(
      "text",
      {x: WIDTH - RIGHT, y: HEIGHT - 3, "text-anchor": "end"},
      unit === "s" ? `${short(x1)} s` : `${unit} ${short(x1)}`,
    ),
  );
  return picture;
}

function thin(points) {
  if (points.length <= MOST_POINTS) return points;
  const stride = (points.length - 1) / (MOST_POINTS - 1);
  return Array.from({length: MOST_POINTS}, (_, i) => points[Math.round(i * stride)]);
}
