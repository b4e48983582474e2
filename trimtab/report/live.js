// SPDX-License-Identifier: Apache-2.0
// Draws runs while they go on. Asks each run for what is newer than the tick it has, keeps the columns it has been
// given, and draws them on two canvases. Everything from a run is put into the page as text, never as markup.
"use strict";

const EVERY = 2000, root = document.getElementById("runs"), main = document.querySelector("main");
const link = document.getElementById("link");
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const number = x => x.toLocaleString("en-US");
const digits = x => x === null || x === undefined ? "-" : Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(2)
  : x.toPrecision(4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
const runs = [];

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

class Run {
  constructor(index) {
    this.index = index;
    this.token = ""; this.tick = -1;
    this.box = document.getElementById("run").content.firstElementChild.cloneNode(true);
    root.append(this.box);
    this.clear();
    const heat = this.part(".heat");
    heat.addEventListener("mousemove", event => this.point(event.offsetX, event.offsetY));
    heat.addEventListener("click", event => this.point(event.offsetX, event.offsetY));
    heat.addEventListener("mouseleave", () => { this.part(".say").textContent = ""; });
  }

  part(selector) { return this.box.querySelector(selector); }

  clear() {
    this.curves = {}; this.units = []; this.ratio = []; this.high = []; this.used = 0;
  }

  take(data) {
    if (data.token !== this.token) this.clear();
    const n = data.used - data.from;
    for (const [name, part] of Object.entries(data.curves)) {
      const curve = this.curves[name] ??= { low: [], high: [], mean: [], bad: new Set() };
      for (const key of ["low", "high", "mean"]) {
        for (let i = curve[key].length; i < data.from; i++) curve[key][i] = null;
        curve[key].length = data.from;
        curve[key].push(...part[key]);
      }
      part.bad.forEach(i => curve.bad.add(data.from + i));
    }
    if (data.units) this.units = data.units;
    if (data.heat) {
      const rows = this.units.length, codes = bytes(data.heat.ratio), shares = bytes(data.heat.high);
      this.ratio.length = this.high.length = data.from;
      for (let c = 0; c < n; c++) {
        this.ratio.push(codes.subarray(c * rows, (c + 1) * rows));
        this.high.push(shares.subarray(c * rows, (c + 1) * rows));  // 255: in all of its steps
      }
    }
    this.used = data.used; this.token = data.token; this.tick = data.tick;
    if (data.events) { this.events = data.events; this.notable = data.notable; this.tell(); }
    this.data = data;
    this.describe();
  }

  describe() {
    const d = this.data, done = d.total && d.step >= d.total, alive = d.age !== null && d.age < 60 && !done;
    this.part("h2").textContent = d.name;
    this.part(".dot").classList.toggle("running", alive);
    const ago = d.age === null ? "" : d.age < 90 ? Math.round(d.age) + " s" : d.age < 5400 ? Math.round(d.age / 60) + " min" : Math.round(d.age / 3600) + " h";
    this.part(".how span").textContent = done ? "finished" : d.age === null ? "waiting" : alive ? "running" : "quiet for " + ago;
    this.part(".where").textContent = "step " + number(d.step) + (d.total ? " of " + number(d.total) : "");
    this.part(".speed").textContent = d.last.tokens_per_s ? number(Math.round(d.last.tokens_per_s)) + " tokens/s" : "";
    this.part(".bar").hidden = !d.total;
    this.part(".bar i").style.width = d.total ? 100 * d.step / d.total + "%" : 0;
    this.part(".notes").replaceChildren(...d.notes.map(note => element("p", note, "note")), ...(d.behind ? [element("p", "Reading the record ...", "note")] : []));
    const figures = [[digits(d.last.loss), "loss"], [digits(d.last.grad_norm), "gradient norm"]];
    if (d.now) figures.push([d.num_high + " of " + d.max_high, d.acted ? "seats taken" : "seats wanted"], [number(d.num_units), "units"]);
    if (d.last.lr !== null && !d.now) figures.push([digits(d.last.lr), "learning rate"]);
    this.part(".figures").replaceChildren(...figures.map(([value, name]) => {
      const box = element("div", undefined, "figure");
      box.append(element("b", value), element("span", name));
      return box;
    }));
    this.part(".warm").hidden = this.part(".who").hidden = this.part(".now").hidden = !d.now;
    this.part(".lossy").hidden = !this.curves.loss && !this.evals().length;
    if (d.now) this.list(d);
  }

  list(d) {
    this.part(".who").textContent = d.acted ? "High now and since when, then riskiest" : "Would be high and since when, then riskiest";
    const table = element("table"), head = element("tr"), body = element("tbody");
    for (const [name, kind] of [["unit", ""], ["ratio", "n"], ["risk", "n"], ["since", "n"]]) head.append(element("th", name, kind));
    for (const row of d.now) {
      const line = element("tr", undefined, (row.since !== null ? "high " : "") + (row.nonfinite || row.risk > 1 ? "over" : ""));
      const value = x => row.nonfinite ? "not finite" : x === null ? "-" : x.toPrecision(3);
      const unit = element("td", this.short(row.unit, 60), "unit");
      unit.title = row.unit;
      line.append(unit, element("td", value(row.ratio), "n"), element("td", row.nonfinite ? "" : value(row.risk), "n"),
        element("td", row.since === null ? "" : number(row.since), "n"));
      body.append(line);
    }
    table.append(head, body);
    this.part(".now").replaceChildren(table);
  }

  tell() {
    const key = event => JSON.stringify(event), first = this.notable.slice(-8), seen = new Set(first.map(key));
    const rest = this.events.filter(event => !seen.has(key(event)));
    const lines = [...first.reverse(), ...rest.reverse()].map(event => {  // what needs an eye stays on top
      const line = element("li", undefined, seen.has(key(event)) ? "notable " + event.kind : "");
      line.append(element("b", number(event.step)), document.createTextNode(event.message || event.kind));
      return line;
    });
    const list = element("ol");
    list.tabIndex = 0;
    list.append(...lines);
    this.part(".told").replaceChildren(lines.length ? list : element("p", "None yet.", "empty"));
  }

  evals() { return Object.keys(this.curves).filter(name => name.startsWith("eval_loss")); }

  // What all names begin with says nothing: cut it at a dot, then keep both ends of what is still too long.
  short(name, most) {
    if (this.cutFor !== this.units) {
      this.cutFor = this.units; this.cut = 0;
      if (this.units.length > 1) {
        const a = this.units.reduce((x, y) => x < y ? x : y), b = this.units.reduce((x, y) => x > y ? x : y);
        let i = 0;
        while (i < a.length && a[i] === b[i]) i++;
        this.cut = a.lastIndexOf(".", i - 1) + 1;
      }
    }
    const text = name.slice(this.cut) || name, head = Math.floor(most / 3);
    return text.length <= most ? text : text.slice(0, head) + "\u2026" + text.slice(text.length - (most - head - 1));
  }

  draw(range) {
    if (!this.data || this.data.first === null) return;
    const narrow = this.box.clientWidth < 520, most = narrow ? 13 : 26;
    const probe = this.part(".loss").getContext("2d");
    probe.font = font(11);
    const names = this.units.slice(0, 400).map(name => probe.measureText(this.short(name, most)).width);
    this.left = Math.ceil(Math.max(52, ...names.map(width => width + 22)));
    if (!this.part(".lossy").hidden) this.drawLoss(range);
    if (!this.part(".warm").hidden) this.drawHeat(most);
  }

  axis(ctx, box) {
    const { first, width } = this.data, last = first + this.used * width;
    ctx.fillStyle = css("soft"); ctx.font = font(11); ctx.textAlign = "center"; ctx.textBaseline = "top";
    for (const step of nice(first, last - 1, Math.max(3, Math.floor(box.w / 90)))) {
      if (step % 1) continue;
      const x = box.x + (step + .5 - first) / (last - first) * box.w;
      ctx.fillText(number(step), Math.min(Math.max(x, box.x + 4), box.x + box.w - 8), box.y + box.h + 5);
    }
  }

  drawLoss([low, high]) {
    const canvas = this.part(".loss"), [ctx, w, h] = sized(canvas, this.box.clientWidth < 520 ? 180 : 230);
    const box = { x: this.left, y: 8, w: w - this.left - 16, h: h - 32 }, log = low > 0 && high / low > 50;
    const fit = log ? Math.log : x => x, [a, b] = [fit(low), fit(high)], pad = (b - a || Math.abs(a) || 1) * .05;
    const y = v => box.y + box.h * (1 - (fit(v) - a + pad) / (b - a + 2 * pad)), x = c => box.x + (c + .5) / this.used * box.w;
    ctx.strokeStyle = css("grid"); ctx.fillStyle = css("soft"); ctx.font = font(11); ctx.textAlign = "right"; ctx.textBaseline = "middle";
    for (const v of log ? decades(low, high) : nice(low, high, 4)) {
      ctx.beginPath(); ctx.moveTo(box.x, y(v)); ctx.lineTo(box.x + box.w, y(v)); ctx.stroke();
      ctx.fillText(digits(v), box.x - 8, y(v));
    }
    const line = (values, colour, width, dots, dash = []) => {
      ctx.setLineDash(dash); ctx.strokeStyle = ctx.fillStyle = colour; ctx.lineWidth = width; ctx.beginPath();
      let open = false;
      values.forEach((v, c) => {
        if (v === null) { if (!dots) open = false; return; }
        if (open) ctx.lineTo(x(c), y(v)); else ctx.moveTo(x(c), y(v));
        open = true;
      });
      ctx.stroke(); ctx.setLineDash([]);
      const points = values.filter(v => v !== null).length;
      if (dots ? points <= 60 : points === 1) values.forEach((v, c) => { if (v !== null) { ctx.beginPath(); ctx.arc(x(c), y(v), 2.5, 0, 7); ctx.fill(); } });
    };
    const train = this.curves.loss;
    if (train) {
      if (this.data.width > 1) {
        ctx.fillStyle = css("loss"); ctx.globalAlpha = .35;
        train.low.forEach((v, c) => { if (v !== null) { const top = y(train.high[c]); ctx.fillRect(x(c) - .5 * box.w / this.used, top, Math.max(1, box.w / this.used), Math.max(1, y(v) - top)); } });
        ctx.globalAlpha = 1;
      }
      line(train.mean, this.data.width > 1 ? css("ink") : css("loss"), 1.4);
      ctx.strokeStyle = css("bad"); ctx.lineWidth = 1.6;
      for (const c of train.bad) { const m = x(c), t = box.y + 4; ctx.beginPath(); ctx.moveTo(m - 3, t - 3); ctx.lineTo(m + 3, t + 3); ctx.moveTo(m + 3, t - 3); ctx.lineTo(m - 3, t + 3); ctx.stroke(); }
    }
    this.evals().forEach((name, i) => line(this.curves[name].mean, css(i % 2 ? "eval-b" : "eval-a"), 1.5, true, i % 2 ? [5, 4] : []));
    this.axis(ctx, box);
    const legend = this.evals().map((name, i) => [name, css(i % 2 ? "eval-b" : "eval-a"), i % 2 ? "line dash" : "line"]);
    if (legend.length) legend.unshift(["loss", css(this.data.width > 1 ? "ink" : "loss"), "line"]);
    this.part(".lossy .legend").replaceChildren(...legend.map(([name, colour, kind]) => {
      const item = element("span"), mark = element("i", undefined, kind);
      mark.style.setProperty("--c", colour);
      item.append(mark, document.createTextNode(name));
      return item;
    }));
  }

  drawHeat(most) {
    const rows = this.units.length, canvas = this.part(".heat");
    const row = Math.max(Math.min(16, 460 / rows), 2), [ctx, w, h] = sized(canvas, Math.ceil(rows * row) + 30);
    const box = this.heatBox = { x: this.left, y: 6, w: w - this.left - 16, h: rows * row, row };
    // One small picture, a pixel a cell, stretched without smoothing: as quick for 200,000 cells as for 20.
    const picture = document.createElement("canvas"), scale = ramp(), columns = Math.max(this.used, 1);
    picture.width = columns; picture.height = rows;
    const image = new ImageData(columns, rows);
    let anyBad = false, anyHigh = false;
    for (let c = 0; c < this.used; c++) for (let r = 0; r < rows; r++) {
      const code = this.ratio[c] ? this.ratio[c][r] : 255, at = 4 * (r * columns + c);
      anyBad ||= code === 254;
      image.data.set(scale[code], at);
    }
    picture.getContext("2d").putImageData(image, 0, 0);
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(picture, box.x, box.y, box.w, box.h);
    const cell = box.w / columns, thick = Math.max(1.5, Math.min(row * .34, 4)), [high, bad] = [css("high"), css("bad")];
    for (let c = 0; c < this.used; c++) for (let r = 0; r < rows; r++) {
      if (this.high[c] && this.high[c][r]) {
        anyHigh = true;
        ctx.globalAlpha = Math.max(this.high[c][r] / 255, .12);
        ctx.fillStyle = high; ctx.fillRect(box.x + c * cell, box.y + (r + 1) * row - thick, Math.max(cell, 1.2), thick);
        ctx.globalAlpha = 1;
      }
      if (this.ratio[c] && this.ratio[c][r] === 254) {  // a cell may be less than a pixel
        ctx.fillStyle = bad; ctx.fillRect(box.x + (c + .5) * cell - Math.max(cell, 5) / 2, box.y + r * row, Math.max(cell, 5), Math.max(row - 1, 2));
      }
    }
    ctx.fillStyle = css("soft"); ctx.font = font(11); ctx.textAlign = "right"; ctx.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(13 / row));
    for (let r = 0; r < rows; r += every) ctx.fillText(this.short(this.units[r], most), box.x - 8, box.y + (r + .5) * row);
    this.axis(ctx, box);
    this.part(".ran").hidden = !anyHigh; this.part(".bad").hidden = !anyBad;
    this.part(".ran span").textContent = this.data.acted ? "ran high" : "would have run high";
    this.part(".ran i").style.setProperty("--c", css("high")); this.part(".bad i").style.setProperty("--c", css("bad"));
  }

  point(px, py) {
    const box = this.heatBox, say = this.part(".say");
    if (!box) return;
    const c = Math.floor((px - box.x) / box.w * this.used), r = Math.floor((py - box.y) / box.row);
    if (c < 0 || c >= this.used || r < 0 || r >= this.units.length || !this.ratio[c]) { say.textContent = ""; return; }
    const { first, width } = this.data, from = first + c * width, code = this.ratio[c][r];
    const steps = width > 1 ? `steps ${number(from)} to ${number(from + width - 1)}` : `step ${number(from)}`;
    const value = code === 255 ? "no gradient" : code === 254 ? "not finite"
      : (width > 1 ? "largest ratio " : "ratio ") + (code === 0 ? "at most " : code === 250 ? "at least " : "") + (2 ** (code * 6 / 250 - 3)).toPrecision(3);
    say.textContent = `${this.units[r]}, ${steps}: ${value}` + (this.high[c][r] ? (this.data.acted ? ", ran high" : ", would have run high") + (width > 1 ? ` in ${Math.max(1, Math.round(this.high[c][r] / 2.55))} % of them` : "") : "");
  }
}

const font = size => size + "px " + getComputedStyle(document.body).fontFamily;

// A canvas in the screen's own pixels, cleared.
function sized(canvas, height) {
  const scale = devicePixelRatio || 1, width = canvas.parentElement.clientWidth;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  return [ctx, width, height];
}

function nice(low, high, count) {
  const raw = (high - low) / Math.max(count, 1) || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw), out = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) out.push(+v.toPrecision(12));
  return out;
}

function decades(low, high) {
  const out = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++) for (const m of [1, 3]) if (m * 10 ** p >= low && m * 10 ** p <= high) out.push(+(m * 10 ** p).toPrecision(3));
  return out;
}

function ramp() {
  const rgb = name => { const v = css(name), n = parseInt(v.slice(1), 16); return [n >> 16, n >> 8 & 255, n & 255]; };
  const [cool, mid, warm] = [rgb("cool"), rgb("mid"), rgb("warm")], out = [];
  for (let code = 0; code < 256; code++) {
    const t = Math.max(-1, Math.min(1, (code * 6 / 250 - 3) / 2)), other = t < 0 ? cool : warm, s = Math.abs(t);
    out.push([...mid.map((m, i) => Math.round(m + (other[i] - m) * s)), 255]);
  }
  out[254] = [...rgb("bad"), 255]; out[255] = [...rgb("none"), 255];
  return out;
}

// One scale for the losses of all runs, so that they can be compared.
function lossRange() {
  const all = runs.flatMap(run => [run.curves.loss, ...run.evals().map(name => run.curves[name])]).filter(Boolean);
  const finite = list => list.filter(v => v !== null);
  const lows = all.flatMap(curve => finite(curve.low)), highs = all.flatMap(curve => finite(curve.high));
  return lows.length ? [lows.reduce((a, b) => Math.min(a, b)), highs.reduce((a, b) => Math.max(a, b))] : [0, 1];
}

function drawAll() {
  const range = lossRange();
  for (const run of runs) run.draw(range);
}

async function poll() {
  let behind = false, many = Math.max(runs.length, 1);
  try {
    for (let i = 0; i < many; i++) {
      const run = runs[i] || (runs[i] = new Run(i)), was = run.data;
      const answer = await fetch(`/data?run=${i}&token=${encodeURIComponent(run.token)}&tick=${run.tick}`);
      if (!answer.ok) throw new Error(String(answer.status));
      const data = await answer.json();
      many = data.runs;
      run.take(data);
      behind ||= data.behind;
      if (!was) main.classList.toggle("many", many > 1);
    }
    drawAll();
    link.textContent = "live";
    document.documentElement.dataset.ready = "1";
    document.title = runs.map(run => run.data.name).join(", ") + " - trimtab watch";
  } catch {
    link.textContent = "no answer from trimtab watch; trying again";
  }
  setTimeout(() => document.hidden ? addEventListener("visibilitychange", poll, { once: true }) : poll(), behind ? 50 : EVERY);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let resized = 0;
addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(drawAll); });
poll();
