// SPDX-License-Identifier: Apache-2.0
// Draws the report's figures from the JSON in #data. One x axis for all: zooming one zooms the others, and the
// hairline stands at the same step everywhere. Colours come from the style sheet, so light and dark both work.
"use strict";

const D = JSON.parse(document.getElementById("data").textContent);
const plots = document.querySelector(".plots");
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const narrow = () => window.innerWidth < 640;
const clean = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");  // plotly reads tags
const number = x => x.toLocaleString("en-US");
const margins = () => ({ l: leftMargin, r: narrow() ? 12 : 22, t: 8, b: 22 });
let leftMargin = 56;

// What all names begin with says nothing: cut it at a dot, then keep both ends of what is still too long.
const prefix = (names => {
  if (names.length < 2) return 0;
  const [a, b] = [names.reduce((x, y) => x < y ? x : y), names.reduce((x, y) => x > y ? x : y)];
  let i = 0;
  while (i < a.length && a[i] === b[i]) i++;
  return a.lastIndexOf(".", i - 1) + 1;
})(D.units || []);

function short(name, tagged = true) {
  const most = narrow() ? 15 : 28, head = Math.floor(most / 3);
  let text = name.slice(prefix) || name;
  if (text.length > most) text = text.slice(0, head) + "\u2026" + text.slice(text.length - (most - head - 1));
  return tagged ? clean(text) : text;
}

// All figures share the margin that the longest label needs, so that a step is at the same place in each.
function fitMargin() {
  const context = document.createElement("canvas").getContext("2d");
  context.font = "12px " + getComputedStyle(document.body).fontFamily;
  const shown = D.heat ? [...D.heat.units, ...D.time.units] : [];
  leftMargin = Math.ceil(Math.max(44, ...shown.map(i => context.measureText(short(D.units[i], false)).width + 16)));
}

// As many unit names as fit, evenly spaced; again after each zoom.
function unitTicks(rows, height, range) {
  const [a, b] = [Math.min(...range), Math.max(...range)];
  const every = Math.max(1, Math.ceil(14 * (b - a) / height));
  const shown = [];
  for (let i = 0; i < rows.length; i += every) shown.push(i);
  return { tickvals: shown, ticktext: shown.map(i => short(D.units[rows[i]])) };
}

function base(height, yaxis) {
  const axis = { gridcolor: css("grid"), zeroline: false, linecolor: css("line"), tickfont: { color: css("soft"), size: 12 }, automargin: false };
  const names = { ticks: "outside", ticklen: 4, tickcolor: "rgba(0,0,0,0)" };
  const shapes = (D.faults || []).map(f => ({
    type: "rect", xref: "x", yref: "paper", x0: f[0] - .5, x1: f[1] - .5, y0: 0, y1: 1, line: { width: 0 }, fillcolor: css("fault"), layer: "below",
  }));
  return {
    height, margin: margins(), showlegend: false, shapes, hovermode: "closest", dragmode: narrow() ? false : "zoom",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: getComputedStyle(document.body).fontFamily, color: css("ink") },
    hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: css("ink"), size: 13 } },
    xaxis: { ...axis, range: D.range, showgrid: false, ticks: "outside", tickcolor: css("line"), ticklen: 4, tickformat: ",~f", nticks: narrow() ? 5 : 9,
      ...(D.range[1] - D.range[0] < 6 ? { dtick: 1 } : {}) },
    yaxis: { ...axis, ...names, ...yaxis },
  };
}

function loss() {
  const traces = [];
  if (D.loss.train) {
    traces.push({ type: "scatter", mode: D.loss.train.x.length > 1 ? "lines" : "markers", ...D.loss.train, line: { color: css("loss"), width: D.loss.mean ? 1 : 1.4 }, opacity: D.loss.mean ? .55 : 1, marker: { color: css("loss"), size: 7 },
      hovertemplate: "step %{x:,d}<br>loss %{y:.4g}<extra></extra>" });
  }
  if (D.loss.mean) {
    traces.push({ type: "scatter", mode: "lines", ...D.loss.mean, line: { color: css("ink"), width: 1.6 }, hovertemplate: "step %{x:,d}<br>mean %{y:.4g}<extra></extra>" });
  }
  D.loss.evals.forEach((e, i) => {
    const color = css(i % 2 ? "eval-b" : "eval-a");
    traces.push({ type: "scatter", mode: e.x.length > 60 ? "lines" : "lines+markers", x: e.x, y: e.y, line: { color, width: 1.6, dash: i % 2 ? "dot" : "solid" }, marker: { color, size: 6 },
      hovertemplate: "step %{x:,d}<br>" + clean(e.name) + " %{y:.4g}<extra></extra>" });
  });
  const layout = base(narrow() ? 210 : 250, { fixedrange: false, nticks: 6 });
  if (D.loss.nonfinite.length) {
    traces.push({ type: "scatter", mode: "markers", x: D.loss.nonfinite, y: D.loss.nonfinite.map(() => .985), yaxis: "y2",
      marker: { symbol: "x", size: 7, color: css("nonfinite") }, hovertemplate: "step %{x:,d}<br>loss not finite<extra></extra>" });
    layout.yaxis2 = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
  }
  if (D.loss.log) layout.yaxis.type = "log";
  return { traces, layout };
}

function heat() {
  const { units: rows, columns } = D.heat, bytes = atob(D.heat.data), z = [], bad = { x: [], y: [] };
  for (let r = 0; r < rows.length; r++) {
    const row = new Array(columns);
    for (let c = 0; c < columns; c++) {
      const code = bytes.charCodeAt(r * columns + c);
      row[c] = code > 250 ? null : code * 6 / 250 - 3;
      if (code === 254) { bad.x.push(D.first + c * D.width + (D.width - 1) / 2); bad.y.push(r); }
    }
    z.push(row);
  }
  const traces = [{ type: "heatmap", x0: D.first + (D.width - 1) / 2, dx: D.width, y0: 0, dy: 1, z, zmin: -2, zmax: 2, showscale: false,
    hoverongaps: true, hoverinfo: "none", colorscale: [[0, css("cool")], [.5, css("mid")], [1, css("warm")]] }];
  // One cell of a long run is less than a pixel, so what was not finite gets a mark of its own.
  if (bad.x.length) traces.push({ type: "scatter", mode: "markers", ...bad, hoverinfo: "skip", marker: { symbol: "square", size: 6, color: css("bad") } });
  const range = [rows.length - .5, -.5], height = Math.min(Math.max(rows.length * 15, 90), 560);
  const layout = base(height + 30, { range, showgrid: false, ...unitTicks(rows, height, range) });
  layout.plot_bgcolor = css("none");
  layout.shapes.forEach(f => Object.assign(f, { layer: "above", fillcolor: "rgba(0,0,0,0)", line: { color: css("soft"), width: 1, dash: "dot" } }));
  return { traces, layout, ticks: range => unitTicks(rows, height, range), say: p => {
    const [r, c] = p.pointNumber, code = bytes.charCodeAt(r * columns + c);
    const value = code === 255 ? "no gradient" : code === 254 ? "norm not finite"
      : "ratio " + (code === 0 ? "at most " : code === 250 ? "at least " : "") + (2 ** (code * 6 / 250 - 3)).toPrecision(3);
    return D.units[rows[r]] + ", " + stepsFrom(D.first + c * D.width, D.width) + ": " + (D.width > 1 && code < 251 ? "largest " : "") + value;
  } };
}

const stepsFrom = (a, count) => count > 1 ? `steps ${number(a)} to ${number(Math.min(a + count - 1, D.last))}` : `step ${number(a)}`;

function timeline() {
  const { units: rows, intervals } = D.time, height = Math.max(rows.length * 17, 60), traces = [];
  D.causes.forEach((cause, code) => {
    const mine = intervals.filter(i => i[3] === code);
    if (!mine.length) return;
    const color = css(code ? cause : "soft"), hollow = code === 0;
    traces.push({ type: "bar", orientation: "h", base: mine.map(i => i[1] - .5), x: mine.map(i => i[2]), y: mine.map(i => i[0]), width: hollow ? .5 : .72,
      marker: { color: hollow || !D.acted ? "rgba(0,0,0,0)" : color, line: { color, width: 1.5 } }, customdata: mine, hoverinfo: "none" });
  });
  const range = [rows.length - .5, -.5];
  const layout = base(height + 30, { range, gridcolor: css("grid"), ...unitTicks(rows, height, range) });
  layout.barmode = "overlay";
  return { traces, layout, ticks: range => unitTicks(rows, height, range), say: p => {
    const [row, start, count, code] = p.customdata;
    const what = code ? `${D.acted ? "ran high" : "would have run high"}: ${D.causes[code]}` : "wanted a seat, the budget was full";
    return `${D.units[rows[row]]}, ${stepsFrom(start, count)}, ${what}`;
  } };
}

function budget() {
  const x = D.high.map((_, i) => D.first + i * D.width - .5), top = Math.max(D.max_high, ...D.high, 1), traces = [];
  const customdata = x.map(edge => edge + .5);
  x.push(D.last + .5);  // so that the last column has a width
  const extend = y => [...y, y[y.length - 1]], step = { type: "scatter", mode: "lines", x, customdata };
  if (D.asked.some((n, i) => n > D.high[i])) {
    traces.push({ ...step, y: extend(D.asked), line: { shape: "hv", width: 1, color: css("jump") }, hovertemplate: "from step %{customdata:,d}<br>%{y} asked<extra></extra>" });
  }
  traces.push({ ...step, y: extend(D.high), fill: "tozeroy", fillcolor: css("locked"), line: { shape: "hv", width: 1, color: css("locked") }, hovertemplate: "from step %{customdata:,d}<br>%{y} high<extra></extra>" });
  const layout = base(narrow() ? 120 : 130, { range: [0, top * 1.35 + .2], fixedrange: true, nticks: 4, tickformat: ",d" });
  if (D.max_high) layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: D.max_high, y1: D.max_high, line: { color: css("mark"), width: 1.3, dash: "dash" } });
  return { traces, layout };
}

const drawers = { loss, heat, timeline, budget };
const figures = Object.keys(drawers).filter(name => document.getElementById("plot-" + name));
let view = null, busy = false;  // the x range that all figures share

function draw() {
  fitMargin();
  for (const name of figures) {
    const div = document.getElementById("plot-" + name), figure = drawers[name]();
    if (name === figures[figures.length - 1]) {
      figure.layout.xaxis.title = { text: "step", standoff: 4, font: { size: 12, color: css("soft") } };
      figure.layout.margin.b += 18;
      figure.layout.height += 18;
    }
    if (view) figure.layout.xaxis.range = view;
    Plotly.react(div, figure.traces, figure.layout, { displayModeBar: false, responsive: true, displaylogo: false, doubleClick: "reset" });
    div.figure = figure;
  }
}

function join(name) {
  const div = document.getElementById("plot-" + name), readout = document.getElementById("say-" + name);
  div.on("plotly_relayout", change => {
    if (busy) return;
    busy = true;
    const range = div.layout.xaxis.range, jobs = [];
    if ("xaxis.range[0]" in change || "xaxis.autorange" in change || "xaxis.range" in change) {
      view = range.slice();
      for (const other of figures) if (other !== name) jobs.push(Plotly.relayout("plot-" + other, { "xaxis.range": view.slice() }));
    }
    if (div.figure.ticks && ("yaxis.range[0]" in change || "yaxis.range" in change)) {
      const ticks = div.figure.ticks(div.layout.yaxis.range);
      jobs.push(Plotly.relayout(div, { "yaxis.tickvals": ticks.tickvals, "yaxis.ticktext": ticks.ticktext }));
    }
    Promise.all(jobs).then(() => { busy = false; });
  });
  if (readout) div.on("plotly_hover", event => { readout.textContent = div.figure.say(event.points[0]); });
  div.addEventListener("mousemove", event => {
    const x = event.clientX - div.getBoundingClientRect().left, m = margins();
    const inside = x >= m.l && x <= div.clientWidth - m.r;
    plots.classList.toggle("hovering", inside);
    if (inside) plots.style.setProperty("--x", x + "px");
  });
  div.addEventListener("mouseleave", () => plots.classList.remove("hovering"));
}

if (figures.length) {
  draw();
  figures.forEach(join);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let was = narrow();
  addEventListener("resize", () => { if (narrow() !== was) { was = narrow(); draw(); } });
}

const button = document.getElementById("copy");
if (button) button.addEventListener("click", async () => {
  const list = document.getElementById("keep-list");
  try {
    await navigator.clipboard.writeText(list.textContent);
    button.textContent = "Copied";
  } catch {  // a page opened from a file may not reach the clipboard: select the text instead
    getSelection().selectAllChildren(list);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});
document.documentElement.dataset.ready = "1";
