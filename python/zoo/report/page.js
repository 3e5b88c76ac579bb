"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, attributes, parent) => {
    const found = document.createElementNS(SVG, name);
    for (const key in attributes) found.setAttribute(key, attributes[key]);
    if (parent) parent.appendChild(found);
    return found;
  };
  const text = (parent, x, y, words, anchor, cls) => {
    const found = make("text", { x, y, "text-anchor": anchor || "start", class: cls || "" }, parent);
    found.textContent = words;
    return found;
  };

  // -- numbers ----------------------------------------------------------------------------------------------------
  const plain = (v, digits) => {
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size < 1e-3 || size >= 1e7) return Number(v.toPrecision(digits)).toExponential().replace("e+", "e");
    return v.toLocaleString("en-US", { maximumSignificantDigits: Math.max(digits, Math.floor(Math.log10(size)) + 1) });
  };
  const scaled = (units, base) => (v, digits) => {
    let i = 0;
    while (Math.abs(v) >= base && i < units.length - 1) { v /= base; i += 1; }
    return `${plain(v, digits)} ${units[i]}`;
  };
  const bytes = scaled(["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
  const large = (v, digits) => (Math.abs(v) < 1e4 ? plain(v, digits) : scaled(["", "k", "M", "G", "T"], 1000)(v, digits));
  const seconds = (v, digits) => {
    const size = Math.abs(v);
    if (v === 0) return "0 s";
    if (size < 1e-3) return `${plain(v * 1e6, digits)} µs`;
    if (size < 1) return `${plain(v * 1e3, digits)} ms`;
    return `${plain(v, digits)} s`;
  };
  const show = { bytes, seconds, large, plain };
  const span = (s) => {
    const h = Math.floor(s / 3600), m = Math.floor((s % 3600) / 60);
    return h ? `${h} h ${m} min` : m ? `${m} min ${Math.floor(s % 60)} s` : `${plain(s, 3)} s`;
  };
  const ticks = (low, high, most, base) => {
    const room = (high - low) / Math.max(1, most);
    if (!(room > 0)) return [low];
    let unit;
    if (base === 1024) {
      const power = Math.pow(1024, Math.max(0, Math.floor(Math.log(high) / Math.log(1024))));
      const inside = Math.pow(10, Math.floor(Math.log10(room / power)));
      unit = [1, 2, 5, 10].map((f) => f * inside).find((u) => u * power >= room) * power;
    } else {
      const power = Math.pow(10, Math.floor(Math.log10(room)));
      unit = [1, 2, 5, 10].map((f) => f * power).find((u) => u >= room * 0.999);
    }
    const found = [];
    for (let i = Math.ceil(low / unit - 1e-9); i * unit <= high * (1 + 1e-12); i += 1) found.push(i * unit);
    return found;
  };
  const powers = (low, high, most) => {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1)
      for (const f of high / low > 300 ? [1] : [1, 2, 5]) if (f * 10 ** e >= low * 0.999 && f * 10 ** e <= high * 1.001) found.push(f * 10 ** e);
    const every = Math.ceil(found.length / Math.max(2, most));
    return found.filter((_, i) => i % every === 0);
  };

  // -- curves over steps --------------------------------------------------------------------------------------------
  const WIDTH = data.width, COUNT = data.count, LAST = data.last;
  const from = (i) => i * WIDTH + 1, to = (i) => Math.min((i + 1) * WIDTH, LAST);
  const middle = (i) => (from(i) + to(i)) / 2;
  for (const one of Object.values(data.series)) { one.low = one.low || one.mean; one.high = one.high || one.mean; }
  const series = (name) => data.series[name];

  function extent(chart, log) {
    let low = Infinity, high = -Infinity;
    const see = (v) => { if (v !== null && v !== undefined && (!log || v > 0)) { low = Math.min(low, v); high = Math.max(high, v); } };
    for (const curve of chart.curves) { const s = series(curve.key); s.low.forEach(see); s.high.forEach(see); }
    for (const level of chart.levels) see(level.value);
    if (low > high) return log ? [0.1, 1] : [0, 1];
    if (log) return [low / 1.1, high * 1.1];
    if (chart.zero) low = Math.min(0, low);
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [chart.zero && low === 0 ? 0 : low - pad, high + pad];
  }

  function draw(figure, chart) {
    const plot = figure.querySelector(".plot"), read = figure.querySelector(".read");
    const width = Math.max(220, plot.clientWidth), height = figure.classList.contains("wide") ? (width < 560 ? 240 : 340) : 220;
    const log = figure.dataset.log === "1", form = show[chart.form];
    const [low, high] = extent(chart, log);
    const rows = log ? powers(low, high, height / 44) : ticks(low, high, height / 44, chart.form === "bytes" ? 1024 : 10);
    const labels = rows.map((v) => form(v, 3));
    const left = 14 + Math.max(...labels.map((t) => t.length), 2) * 6.9, right = 14, top = 10, bottom = 40;
    const x0 = COUNT > 1 || LAST > 1 ? 1 : 0.5, x1 = Math.max(LAST, 1.5);
    const x = (s) => left + ((s - x0) / (x1 - x0)) * (width - left - right);
    const f = log ? Math.log10 : (v) => v;
    const y = (v) => top + (1 - (f(v) - f(low)) / (f(high) - f(low))) * (height - top - bottom);
    const svg = make("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
    rows.forEach((v, i) => {
      make("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), class: "grid" }, svg);
      text(svg, left - 7, y(v) + 4, labels[i], "end");
    });
    for (const s of ticks(x0, x1, width / (width < 560 ? 64 : 95), 10)) {
      const at = Math.round(s) === 0 ? 1 : s;
      if (at !== Math.round(at)) continue;
      make("line", { x1: x(at), x2: x(at), y1: height - bottom, y2: height - bottom + 4, class: "axis" }, svg);
      text(svg, x(at), height - bottom + 17, large(at, 4), x(at) > width - 26 ? "end" : "middle");
    }
    text(svg, (left + width - right) / 2, height - 5, "optimizer step", "middle");
    make("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "axis" }, svg);
    for (const level of chart.levels) if (!log || level.value > 0)
      make("line", { x1: left, x2: width - right, y1: y(level.value), y2: y(level.value), class: `level s${level.colour}` }, svg);
    for (const curve of chart.curves) curves(svg, curve, x, y, log);
    const cursor = make("line", { y1: top, y2: height - bottom, class: "cursor", visibility: "hidden" }, svg);
    plot.replaceChildren(svg);
    point(plot, read, chart, { x, cursor, left, right, width, x0, x1, form });
  }

  function curves(svg, curve, x, y, log) {
    const s = series(curve.key), fine = (i) => s.mean[i] !== null && (!log || s.low[i] > 0);
    const known = [];
    for (let i = 0; i < COUNT; i += 1) if (fine(i)) known.push(i);
    const p = (i, v) => `${x(middle(i)).toFixed(1)},${y(v).toFixed(1)}`;
    if (curve.band && known.length > 1) {
      const there = known.map((i) => p(i, s.high[i])), back = known.map((i) => p(i, s.low[i])).reverse();
      make("path", { d: `M${there.join("L")}L${back.join("L")}Z`, class: `band f${curve.colour} s${curve.colour}` }, svg);
    }
    if (known.length > 1)
      make("path", { d: `M${known.map((i) => p(i, s.mean[i])).join("L")}`, class: `mean s${curve.colour}` }, svg);
    if (known.length < 30) for (const i of known)
      make("circle", { cx: x(middle(i)), cy: y(s.mean[i]), r: known.length === 1 ? 4 : 3, class: `dot f${curve.colour}` }, svg);
  }

  function point(plot, read, chart, at) {
    const say = (i, pointed = true) => {
      const parts = chart.curves.map((curve) => {
        const s = series(curve.key);
        let j = i;
        if (curve.sparse) for (; j > 0 && s.mean[j] === null; j -= 1);
        if (s.mean[j] === null || s.mean[j] === undefined) return null;
        const mean = at.form(s.mean[j], 4), low = at.form(s.low[j], 4), high = at.form(s.high[j], 4);
        return `${curve.name} ${mean}${low === high ? "" : ` (${low} to ${high})`}`;
      }).filter((part) => part !== null);
      const when = from(i) === to(i) ? `step ${from(i).toLocaleString("en-US")}` : `steps ${from(i).toLocaleString("en-US")} to ${to(i).toLocaleString("en-US")}`;
      const time = data.series.elapsed_s && data.series.elapsed_s.high[i];
      read.textContent = `${when}${time ? `, ${span(time)} after the start` : ""}: ${parts.join("; ") || "nothing was measured"}`;
      if (!pointed) return;
      at.cursor.setAttribute("visibility", "visible");
      at.cursor.setAttribute("x1", at.x(middle(i)));
      at.cursor.setAttribute("x2", at.x(middle(i)));
      plot.dataset.at = i;
    };
    const near = (event) => {
      const share = (event.clientX - plot.getBoundingClientRect().left - at.left) / (at.width - at.left - at.right);
      const step = at.x0 + share * (at.x1 - at.x0);
      say(Math.min(COUNT - 1, Math.max(0, Math.floor((step - 0.5) / WIDTH))));
    };
    plot.onpointermove = plot.onpointerdown = near;
    plot.onpointerleave = plot.onblur = () => { at.cursor.setAttribute("visibility", "hidden"); say(COUNT - 1, false); };
    say(COUNT - 1, false);
    plot.onkeydown = (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50, Home: -COUNT, End: COUNT }[event.key];
      if (!by) return;
      event.preventDefault();
      const now = plot.dataset.at === undefined ? (by > 0 ? -1 : COUNT) : Number(plot.dataset.at);
      say(Math.min(COUNT - 1, Math.max(0, now + by)));
    };
  }

  // -- one step in time ---------------------------------------------------------------------------------------------
  const line = data.timeline;
  let view = line ? [0, line.end] : [0, 1];

  function lanes(spans) {
    const ends = [], rows = spans.map((one) => {
      let row = ends.findIndex((end) => end <= one[2] + 1e-9);
      if (row < 0) row = ends.length < 5 ? ends.length : ends.indexOf(Math.min(...ends));
      ends[row] = one[2] + one[3];
      return row;
    });
    return [rows, Math.max(1, ends.length)];
  }

  function drawTimeline(figure) {
    const plot = figure.querySelector(".plot"), read = figure.querySelector(".read");
    const width = Math.max(220, plot.clientWidth), narrow = width < 560, left = narrow ? 8 : 130, right = 12;
    const x = (s) => left + ((s - view[0]) / (view[1] - view[0])) * (width - left - right);
    const svg = make("svg", { role: "img", "aria-label": "One step in time" });
    const hatch = make("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, make("defs", {}, svg));
    make("rect", { width: 6, height: 6, class: "f8" }, hatch);
    make("line", { x1: 0, x2: 0, y1: 0, y2: 6, class: "s5", "stroke-width": 3 }, hatch);
    const body = make("g", {}, svg), shapes = make("g", {}, svg);
    let y = 8;
    const block = (spans, height, row, title) => spans.forEach((one, i) => {
      const [kind, name, start, length, size] = one;
      if (start + length < view[0] || start > view[1]) return;
      const a = Math.max(left, x(start)), b = Math.min(width - right, x(start + length));
      const colour = data.timeline.kinds[kind].colour;
      const rect = make("rect", { x: a.toFixed(2), y: y + row[i] * (height + 1), width: Math.max(0.6, b - a - (b - a > 4 ? 0.7 : 0)).toFixed(2), height }, shapes);
      rect.setAttribute("class", colour === 5 ? "waits" : `f${colour}`);
      rect.said = `${title}: ${data.timeline.kinds[kind].name}${line.names[name] ? ` of ${line.names[name]}` : ""}, ${seconds(length, 3)} from ${seconds(start, 4)}${size ? `, ${bytes(size, 3)}` : ""}`;
    });
    for (const rank of line.ranks) {
      const title = `rank ${rank.rank}`;
      if (narrow) { text(body, left, y + 10, `${title}: computes above, communicates below`, "start", "lane"); y += 17; }
      else text(body, left - 10, y + 15, `${title} computes`, "end", "lane");
      block(rank.compute, 22, rank.compute.map(() => 0), title);
      y += 26;
      if (rank.communication.length) {
        const [rows, count] = lanes(rank.communication);
        if (!narrow) text(body, left - 10, y + 10, "communicates", "end");
        block(rank.communication, 10, rows, title);
        y += count * 11 + 4;
      }
      y += 9;
    }
    const height = y + 40;
    for (const t of ticks(view[0], view[1], (width - left) / (narrow ? 70 : 95), 10)) {
      make("line", { x1: x(t), x2: x(t), y1: 4, y2: y, class: "grid" }, body);
      text(body, x(t), y + 16, seconds(t, 4), x(t) > width - 30 ? "end" : x(t) < 20 ? "start" : "middle");
    }
    text(body, (left + width - right) / 2, height - 5, "time since the step began", "middle");
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const chosen = make("rect", { y: 0, height: y, width: 0, class: "select", visibility: "hidden" }, svg);
    plot.replaceChildren(svg);
    read.textContent = "Point at a span to read it.";
    zoom(figure, plot, read, chosen, { left, right, width });
  }

  function zoom(figure, plot, read, chosen, at) {
    let begun = null;
    const place = (event) => Math.min(at.width - at.right, Math.max(at.left, event.clientX - plot.getBoundingClientRect().left));
    const time = (px) => view[0] + ((px - at.left) / (at.width - at.left - at.right)) * (view[1] - view[0]);
    plot.onpointerdown = (event) => { if (event.pointerType === "mouse") begun = place(event); };
    plot.onpointermove = (event) => {
      const said = event.target.said;
      if (said) read.textContent = said;
      if (begun === null) return;
      const now = place(event);
      chosen.setAttribute("visibility", "visible");
      chosen.setAttribute("x", Math.min(begun, now));
      chosen.setAttribute("width", Math.abs(now - begun));
    };
    plot.onclick = (event) => { if (event.target.said) read.textContent = event.target.said; };
    plot.onpointerleave = () => { begun = null; chosen.setAttribute("visibility", "hidden"); };
    plot.onpointerup = (event) => {
      const now = place(event), first = begun;
      begun = null;
      if (first === null || Math.abs(now - first) < 6) { chosen.setAttribute("visibility", "hidden"); return; }
      view = [time(Math.min(first, now)), time(Math.max(first, now))];
      drawTimeline(figure);
    };
  }

  // -- all of it ----------------------------------------------------------------------------------------------------
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const drawAll = () => {
    for (const figure of figures) draw(figure, data.charts[figure.dataset.chart]);
    const figure = document.getElementById("timeline-figure");
    if (figure && line) drawTimeline(figure);
  };
  for (const button of document.querySelectorAll("button[data-act]")) button.addEventListener("click", () => {
    const figure = button.closest("figure"), table = document.getElementById("keys");
    const on = button.getAttribute("aria-pressed") !== "true";
    if (button.dataset.act === "log") { button.setAttribute("aria-pressed", on); figure.dataset.log = on ? "1" : ""; draw(figure, data.charts[figure.dataset.chart]); }
    if (button.dataset.act === "whole") { view = [0, line.end]; drawTimeline(figure); }
    if (button.dataset.act === "in" || button.dataset.act === "out") {
      const centre = (view[0] + view[1]) / 2, half = ((view[1] - view[0]) / 2) * (button.dataset.act === "in" ? 0.5 : 2);
      view = [Math.max(0, centre - half), Math.min(line.end, centre + half)];
      drawTimeline(figure);
    }
    if (button.dataset.act === "defaults") { button.setAttribute("aria-pressed", on); table.classList.toggle("hide", !on); }
  });
  const search = document.getElementById("search");
  if (search) search.addEventListener("input", () => {
    const words = search.value.toLowerCase();
    for (const row of document.querySelectorAll("#keys tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(words);
  });
  const begun = performance.now();
  const before = document.body.clientWidth;
  drawAll();
  if (document.body.clientWidth !== before) drawAll(); // a scrollbar has taken some of it
  document.documentElement.dataset.drawnMs = (performance.now() - begun).toFixed(0);
  let width = window.innerWidth, waiting = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(drawAll);
  });
})();
