// SPDX-License-Identifier: Apache-2.0
// Draws a bench's figures for the cell that is picked, from the JSON in #data. An arm keeps its colour in all of them.
"use strict";

const D = JSON.parse(document.getElementById("data").textContent);
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const narrow = () => window.innerWidth < 640;
const dark = matchMedia("(prefers-color-scheme: dark)");
const clean = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");  // plotly reads tags
const pick = document.getElementById("pick");

const LIGHT = ["#2f7d4f", "#8a949e", "#1f6feb", "#dd9a1f", "#b4561f", "#7a1fa2", "#0f8b8d", "#c2451e", "#5b5bd6", "#99663d", "#3c6e71", "#ad1457"];
const DARK = ["#6fc391", "#9aa4ad", "#6cb0ff", "#f0bd52", "#f0945a", "#c678f0", "#4fd1c5", "#f2764a", "#9d9df5", "#d1a37c", "#86b8bb", "#f06292"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
function style(arm) {
  const i = D.arms.indexOf(arm), colors = dark.matches ? DARK : LIGHT;
  return { color: colors[i % colors.length], dash: DASHES[Math.floor(i / colors.length) % DASHES.length] };
}

function base(height, xaxis, yaxis) {
  const axis = { gridcolor: css("grid"), zeroline: false, linecolor: css("line"), tickfont: { color: css("soft"), size: 12 }, automargin: true };
  return {
    height, margin: { l: 56, r: narrow() ? 12 : 22, t: 8, b: 40 }, hovermode: "closest", dragmode: narrow() ? false : "zoom", shapes: [],
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: getComputedStyle(document.body).fontFamily, color: css("ink") },
    hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: css("ink"), size: 13 } },
    showlegend: false, legend: { orientation: "h", y: -0.2, font: { color: css("soft"), size: 12 } },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis },
  };
}
const titled = text => ({ title: { text, font: { size: 12, color: css("soft") } } });

function curves(cell) {
  const traces = Object.entries(cell.curves).map(([arm, c]) => ({
    type: "scatter", mode: "lines", name: clean(arm), x: c.x, y: c.y, line: { ...style(arm), width: 1.6 },
    customdata: c.x.map((_, i) => [c.low[i], c.high[i]]),
    hovertemplate: clean(arm) + "<br>step %{x:,.0f}<br>loss %{y:.4g}<br>seeds %{customdata[0]:.4g} to %{customdata[1]:.4g}<extra></extra>",
  }));
  const values = traces.flatMap(t => t.y).filter(y => y !== null && y > 0);
  const wide = values.length && Math.max(...values) / Math.min(...values) > 20;
  const layout = base(narrow() ? 320 : 380, { ...titled("step"), showgrid: false }, wide ? { type: "log" } : {});
  layout.showlegend = true;
  layout.shapes = cell.windows.map(w => ({ type: "rect", xref: "x", yref: "paper", x0: w[0] - .5, x1: w[1] - .5, y0: 0, y1: 1, line: { width: 0 }, fillcolor: css("fault"), layer: "below" }));
  return { traces, layout };
}

// One row per arm: a dot, its interval, and a line at what it is held against.
function dots(cell, key, says, lines, percent) {
  const arms = Object.keys(cell.arms).filter(arm => cell.arms[arm][key] && cell.arms[arm][key].mean !== null);
  const traces = arms.map(arm => {
    const s = cell.arms[arm][key], color = style(arm).color, high = cell.arms[arm].promotion;
    return { type: "scatter", mode: "markers", name: clean(arm), x: [s.mean], y: [clean(arm)], marker: { color, size: 9 },
      error_x: { type: "data", array: [s.half || 0], color, thickness: 1.6, width: 4 },
      hovertemplate: clean(arm) + "<br>%{x" + (percent ? ":.1%" : ":.4f") + "}" + (s.half === null ? "" : " \u00b1 " + (percent ? (100 * s.half).toFixed(1) + "%" : s.half.toFixed(4)))
        + `<br>${s.n} seeds` + (high === null ? "" : `<br>${(100 * high).toPrecision(2)}% of unit-steps high`) + "<extra></extra>" };
  });
  const layout = base(Math.max(arms.length * 26 + 70, 110), { ...titled(says), ...(percent ? { tickformat: ".0%" } : {}) },
    { type: "category", categoryarray: arms.map(clean).reverse(), categoryorder: "array", range: [-.6, arms.length - .4] });
  layout.shapes = lines.map(x => ({ type: "line", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: css("soft"), width: 1, dash: "dot" } }));
  return { traces, layout };
}

function sweep(cell) {
  const mine = D.sweeps.filter(s => cell.axis && s.group === cell.group && s.axis === cell.axis[0]);
  const rate = mine.length && mine[0].axis === "lr", key = rate ? "eval_high" : "gap";
  const traces = mine.map(s => ({
    type: "scatter", mode: "lines+markers", name: clean(s.arm), x: s.x, y: s[key], line: { ...style(s.arm), width: 1.6 }, marker: { size: 6 },
    error_y: { type: "data", array: s[key + "_half"].map(h => h || 0), color: style(s.arm).color, thickness: 1, width: 3 },
    hovertemplate: clean(s.arm) + "<br>" + clean(s.axis) + " %{x}<br>%{y" + (rate ? ":.4g" : ":.1%") + "}<extra></extra>",
  }));
  const layout = base(narrow() ? 320 : 380, { ...titled(mine.length ? clean(mine[0].axis) : ""), type: "log", tickvals: mine.length ? mine[0].x : [] , ticktext: mine.length ? mine[0].x.map(String) : [] },
    { ...titled(rate ? "held-out loss" : "gap closed"), ...(rate ? {} : { tickformat: ".0%" }) });
  layout.showlegend = true;
  return { traces, layout };
}

const drawers = {
  curves,
  versus: cell => dots(cell, "versus", "held-out loss minus that of low", [0], false),
  gap: cell => dots(cell, "gap", "share of the gap closed", [0, 1], true),
  sweep,
};
const EMPTY = { gap: "There is no gap in this cell: the paired interval of low minus the top of this cell includes zero.", sweep: "This cell is not part of a sweep." };
const words = {};

function draw() {
  const cell = D.cells[Number(pick.value) || 0];
  for (const [name, drawer] of Object.entries(drawers)) {
    const div = document.getElementById("plot-" + name), says = document.getElementById("say-" + name);
    if (!div) continue;
    words[name] ??= says.textContent;
    const { traces, layout } = drawer(cell);
    says.textContent = traces.length ? words[name] : EMPTY[name] || "There is nothing to draw.";
    div.hidden = !traces.length;
    if (traces.length) Plotly.react(div, traces, layout, { displayModeBar: false, responsive: true, displaylogo: false });
  }
}

draw();
pick.addEventListener("change", draw);
dark.addEventListener("change", draw);
let was = narrow();
addEventListener("resize", () => { if (narrow() !== was) { was = narrow(); draw(); } });
document.documentElement.dataset.ready = "1";
