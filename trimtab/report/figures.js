// SPDX-License-Identifier: Apache-2.0
// Draws the figures that #data lists, each with its traces, in the page's own colours. A trace names a colour of the
// style sheet, or a place in the palette; names and words are text, never markup.
"use strict";

const D = JSON.parse(document.getElementById("data").textContent);
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const narrow = () => window.innerWidth < 640;
const dark = matchMedia("(prefers-color-scheme: dark)");
const clean = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "% {");  // plotly reads tags
const LIGHT = ["#1f6feb", "#b4561f", "#2f7d4f", "#7a1fa2", "#dd9a1f", "#0f8b8d", "#c2451e", "#5b5bd6", "#99663d", "#ad1457"];
const DARK = ["#6cb0ff", "#f0945a", "#6fc391", "#c678f0", "#f0bd52", "#4fd1c5", "#f2764a", "#9d9df5", "#d1a37c", "#f06292"];
const DASHES = ["solid", "dash", "dot", "dashdot"];

const color = c => typeof c === "number" ? (dark.matches ? DARK : LIGHT)[c % LIGHT.length] : css(c);
const dash = c => typeof c === "number" ? DASHES[Math.floor(c / LIGHT.length) % DASHES.length] : "solid";
const short = text => narrow() && text.length > 24 ? text.slice(0, 11) + "\u2026" + text.slice(-12) : text;

function trace(t, figure) {
  const drawn = { type: t.type, mode: t.mode, x: t.x, y: t.y, name: clean(short(t.name || "")), opacity: t.opacity || 1, showlegend: Boolean(t.name) && !t.quiet };
  const shade = t.colors ? t.colors.map(color) : color(t.color);
  if (t.type === "bar") {
    return { ...drawn, x: t.x.map(name => clean(short(name))), marker: { color: shade }, hovertemplate: "%{x}<br>" + clean(t.name) + " %{y:,}<extra></extra>" };
  }
  drawn.line = { color: shade, width: t.width || 1.6, dash: dash(t.color), shape: t.shape || "linear" };
  drawn.marker = { color: shade, size: t.sizes || t.size || 7, symbol: t.symbol || "circle", line: { color: shade, width: 1.5 } };
  if (t.under) drawn.yaxis = "y2";
  if (t.words) {
    drawn.text = t.words.map((lines, i) => [t.names[i], ...lines].map(clean).join("<br>"));
    drawn.hovertemplate = "%{text}<extra></extra>";
  } else {
    drawn.hovertemplate = (t.name ? clean(t.name) + "<br>" : "") + "step %{x:,.0f}" + (t.under ? "" : "<br>%{y:" + (figure.percent ? ".2%" : ".4g") + "}") + "<extra></extra>";
  }
  return drawn;
}

function layout(f) {
  const axis = { gridcolor: css("grid"), zeroline: false, linecolor: css("line"), tickfont: { color: css("soft"), size: 12 }, automargin: true };
  const titled = text => ({ title: { text: clean(text || ""), font: { size: 12, color: css("soft") } } });
  const made = {
    height: narrow() ? 300 : 340, margin: { l: 56, r: narrow() ? 12 : 22, t: 8, b: 44 }, hovermode: "closest", dragmode: narrow() ? false : "zoom", barmode: "stack",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: getComputedStyle(document.body).fontFamily, color: css("ink") },
    hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: css("ink"), size: 13 }, align: "left" },
    showlegend: f.traces.some(t => t.name && !t.quiet), legend: { orientation: "h", y: -0.22, font: { color: css("soft"), size: 12 } },
    xaxis: { ...axis, ...titled(f.x), showgrid: false, ...(f.xlog ? { type: "log" } : {}) },
    yaxis: { ...axis, ...titled(f.y), ...(f.ylog ? { type: "log" } : {}), ...(f.percent ? { tickformat: ".1~%", rangemode: "tozero" } : {}) },
    shapes: (f.windows || []).map(w => ({ type: "rect", xref: "x", yref: "paper", x0: w[0] - .5, x1: w[1] + .5, y0: 0, y1: 1, line: { width: 0 }, fillcolor: css("fault"), layer: "below" })),
  };
  if (f.traces.some(t => t.under)) made.yaxis2 = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
  return made;
}

function draw() {
  for (const f of D.figures) {
    Plotly.react(document.getElementById("plot-" + f.id), f.traces.map(t => trace(t, f)), layout(f), { displayModeBar: false, responsive: true, displaylogo: false });
  }
}

draw();
dark.addEventListener("change", draw);
let was = narrow();
addEventListener("resize", () => { if (narrow() !== was) { was = narrow(); draw(); } });
document.documentElement.dataset.ready = "1";
