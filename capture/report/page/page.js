"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
const nodes = report.nodes, buffers = report.buffers, live = report.live_bytes;
const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const count = (n) => Number(n).toLocaleString("en-US");
const bytes = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return (unit ? n.toFixed(n < 10 ? 2 : 1) : n) + " " + units[unit];
};
const moduleName = (m) => m === null ? "(outside any module)" : m || "(root module)";
const sourceText = (s) => s ? s.file.split("/").slice(-2).join("/") + ":" + s.line : "";
const sum = (list) => list.reduce((a, b) => a + b, 0);
const element = (tag, text, className) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};

// Time: one unit for each node.
const starts = nodes.map((_, index) => index).concat(nodes.length);
const total = starts[nodes.length] || 1;
let view = { from: 0, to: total };
let chosen = null;
const nodeAt = (time) => {
  let low = 0, high = nodes.length - 1;
  while (low < high) { const mid = (low + high + 1) >> 1; if (starts[mid] <= time) low = mid; else high = mid - 1; }
  return low;
};

function fillCards() {
  $("subtitle").textContent = `${report.backend} backend, scope ${report.scope}, phase ${report.phase}`;
  const calls = Object.entries(report.num_calls).map(([k, v]) => `${v} ${k}`).join(", ");
  const cards = [
    [count(report.num_nodes ?? nodes.length), `nodes from ${count(report.num_ops)} operator calls`],
    [report.capture_ms.toFixed(0) + " ms", "to capture"],
    [bytes(Math.max(...live)), "most memory at one time"],
    [bytes(report.gradient_bytes), "gradient buffers"],
    [bytes(report.static_input_bytes), "static inputs"],
    [count(report.baked_constants.length), "baked numbers"],
    [count(sum(Object.values(report.num_calls))), "calls: " + calls],
  ];
  if (report.pool_bytes) cards.splice(3, 0, [bytes(report.pool_bytes), "pool"]);
  for (const [value, label] of cards) {
    const card = element("div", undefined, "card");
    card.append(element("b", value), element("span", label));
    $("cards").append(card);
  }
}

// Rows of the timeline: phase, then one row for each level of module names, then the nodes.
const path = (node) => node.module ? node.module.split(".") : [];
const depth = Math.min(Math.max(0, ...nodes.map((n) => path(n).length)), 10);
const rows = [];
function collect(keyOf, level) {
  let first = 0;
  for (let i = 1; i <= nodes.length; i++) {
    if (i < nodes.length && keyOf(nodes[i]) === keyOf(nodes[first])) continue;
    const key = keyOf(nodes[first]);
    if (key !== null) rows.push({ level, first, end: i, key, phase: nodes[first].phase });
    first = i;
  }
}
collect((n) => n.phase, 0);
for (let level = 1; level <= depth; level++) {
  collect((n) => path(n).length >= level ? n.phase + "\u0000" + path(n).slice(0, level).join(".") : null, level);
}
const ROW = 20;

function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  const x = (time) => (time - view.from) / (view.to - view.from) * width;
  return { context, width, height, x };
}

function drawTimeline() {
  const { context, width, x } = prepare($("timeline"), ROW * (depth + 2) + 22);
  const box = (from, to, level, fill, label) => {
    const left = x(from), right = x(to);
    if (right < 0 || left > width) return;
    const size = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.5);
    context.fillStyle = fill;
    context.fillRect(left, level * ROW + 1, size, ROW - 2);
    const shown = Math.min(right, width) - Math.max(left, 0);
    if (label && shown > 28) {
      context.save();
      context.beginPath();
      context.rect(Math.max(left, 0), level * ROW, shown - 4, ROW);
      context.clip();
      context.fillStyle = color("back");
      context.fillText(label, Math.max(left, 0) + 4, level * ROW + ROW / 2);
      context.restore();
    }
  };
  for (const row of rows) {
    const name = row.key.split("\u0000").pop();
    const label = row.level < 2 ? name : name.split(".").pop();
    context.globalAlpha = row.level ? Math.max(1 - 0.12 * (row.level - 1), 0.5) : 1;
    box(starts[row.first], starts[row.end], row.level, color(row.phase), label);
  }
  context.globalAlpha = 1;
  const [low, high] = [nodeAt(view.from), nodeAt(view.to)];
  for (let i = low; i <= high; i++) {
    const short = nodes[i].op.split(".")[1] || nodes[i].op;
    box(starts[i], starts[i + 1], depth + 1, i === chosen ? color("mark") : color(nodes[i].kind), short);
  }
  context.fillStyle = color("soft");
  for (let tick = 0; tick <= 8; tick++) {
    const time = view.from + (view.to - view.from) * tick / 8;
    const label = "node " + Math.round(time);
    context.textAlign = tick === 0 ? "left" : tick === 8 ? "right" : "center";
    context.fillText(label, Math.min(Math.max(x(time), 2), width - 2), ROW * (depth + 2) + 11);
  }
  context.textAlign = "left";
}

function drawMemory() {
  const { context, width, height, x } = prepare($("memory"), 140);
  const peak = Math.max(1, ...live), y = (value) => height - 4 - value / peak * (height - 22);
  context.beginPath();
  context.moveTo(x(0), y(0));
  live.forEach((value, i) => { context.lineTo(x(starts[i]), y(value)); context.lineTo(x(starts[i + 1]), y(value)); });
  context.lineTo(x(total), y(0));
  context.fillStyle = color("live");
  context.globalAlpha = 0.75;
  context.fill();
  context.globalAlpha = 1;
  context.strokeStyle = context.fillStyle = color("mark");
  context.beginPath();
  context.moveTo(0, y(peak)); context.lineTo(width, y(peak));
  context.stroke();
  context.fillText("peak " + bytes(peak), 4, y(peak) - 8);
  drawCursor(context, x, height);
}

// Where buffers lie. Without a planned pool: placed here, lowest free place first.
const own = buffers.filter((b) => ["intermediate", "result", "kept by the model"].includes(b.role) && b.bytes > 0);
const isPlanned = own.some((b) => b.offset !== null);
const placed = [];
if (isPlanned) {
  for (const b of own) if (b.offset !== null) placed.push({ ...b, at: b.offset });
} else if (own.length <= 6000) {
  let active = [];
  for (const b of [...own].sort((p, q) => p.first - q.first || q.bytes - p.bytes)) {
    active = active.filter((a) => a.last >= b.first).sort((p, q) => p.at - q.at);
    let at = 0;
    for (const a of active) { if (a.at - at >= b.bytes) break; at = Math.max(at, a.at + a.bytes); }
    const item = { ...b, at };
    active.push(item);
    placed.push(item);
  }
}
const poolTop = Math.max(1, ...placed.map((b) => b.at + b.bytes));
let shownBuffers = [];

function drawPool() {
  const { context, width, height, x } = prepare($("pool"), placed.length ? 260 : 1);
  shownBuffers = [];
  for (const b of placed) {
    const left = x(starts[b.first]), right = x(starts[Math.min(b.last + 1, nodes.length)]);
    if (right < 0 || left > width) continue;
    const top = height - (b.at + b.bytes) / poolTop * height, tall = b.bytes / poolTop * height;
    context.fillStyle = color((nodes[b.first] || {}).phase || "live");
    context.globalAlpha = b.index % 2 ? 0.85 : 0.6;
    context.fillRect(left, top, Math.max(right - left, 0.5), Math.max(tall - 0.5, 0.5));
    shownBuffers.push([left, right, top, top + tall, b]);
  }
  context.globalAlpha = 1;
  drawCursor(context, x, height);
}

function drawCursor(context, x, height) {
  if (chosen === null) return;
  context.fillStyle = color("mark");
  context.fillRect(x(starts[chosen]), 0, 1.5, height);
}

let pending = false;
function draw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; drawTimeline(); drawMemory(); drawPool(); });
}

function nodeText(i) {
  const n = nodes[i];
  return `${i}: ${n.op}\n${n.phase}, ${moduleName(n.module)}\n${n.results}\n${sourceText(n.source)}\n${bytes(live[i])} live`;
}

function tip(event, text) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const left = Math.min(event.clientX + 12, window.innerWidth - box.offsetWidth - 8);
  box.style.left = left + "px";
  box.style.top = Math.min(event.clientY + 14, window.innerHeight - box.offsetHeight - 8) + "px";
}

function timeOf(event, canvas) {
  const area = canvas.getBoundingClientRect();
  return view.from + (event.clientX - area.left) / area.width * (view.to - view.from);
}

function listen(canvas, textAt) {
  let drag = null, moved = false;
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY) && !event.shiftKey && event.target !== document.activeElement) return;
    event.preventDefault();
    const time = timeOf(event, canvas), factor = Math.exp(event.deltaY * 0.0015);
    zoom(time, factor);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, ...view }; moved = false; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const shift = (drag.x - event.clientX) / canvas.clientWidth * (drag.to - drag.from);
      moved = moved || Math.abs(drag.x - event.clientX) > 3;
      const from = Math.min(Math.max(drag.from + shift, 0), total - (drag.to - drag.from));
      view = { from, to: from + drag.to - drag.from };
      draw();
    } else tip(event, textAt(event));
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !moved) choose(nodeAt(timeOf(event, canvas)), true);
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => tip(null, ""));
  canvas.addEventListener("dblclick", () => { view = { from: 0, to: total }; draw(); });
}

function zoom(time, factor) {
  const size = Math.min(Math.max((view.to - view.from) * factor, total / nodes.length * 4), total);
  const share = (time - view.from) / (view.to - view.from);
  const from = Math.min(Math.max(time - share * size, 0), total - size);
  view = { from, to: from + size };
  draw();
}

$("timeline").addEventListener("keydown", (event) => {
  const middle = (view.from + view.to) / 2, step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "+") zoom(middle, 0.7);
  else if (event.key === "-") zoom(middle, 1 / 0.7);
  else if (step) choose(Math.min(Math.max((chosen ?? -1) + step, 0), nodes.length - 1), true);
  else return;
  event.preventDefault();
});

// The table of nodes: only the rows in sight are in the document.
const columns = [
  { name: "#", key: (n) => n.index, number: true, width: "4rem" },
  { name: "operator", key: (n) => n.op },
  { name: "kind", key: (n) => n.kind, width: "7rem" },
  { name: "phase", key: (n) => n.phase, width: "7rem" },
  { name: "module", key: (n) => moduleName(n.module) },
  { name: "results", key: (n) => n.results },
  { name: "live", key: (n) => live[n.index], show: bytes, number: true, width: "6rem" },
  { name: "source", key: (n) => sourceText(n.source) },
  { name: "arguments", key: (n) => n.arguments },
];
if (nodes.some((n) => n.kernels)) columns.push({ name: "kernels", key: (n) => (n.kernels || []).join(", ") });
const haystack = nodes.map((n) => [n.op, n.kind, n.phase, moduleName(n.module), n.results, n.arguments, sourceText(n.source), n.called ? "" : "made once", (n.kernels || []).join(" "), ...n.writes.concat(n.reads).map((b) => buffers[b].role === "intermediate" ? "" : buffers[b].name)].join(" ").toLowerCase());
let order = [0, 1], shown = nodes.slice();
const HEIGHT = 26;

function refilter() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const phase = $("phase").value, kind = $("kind").value;
  shown = nodes.filter((n) => (!phase || n.phase === phase) && (!kind || n.kind === kind) && words.every((w) => haystack[n.index].includes(w)));
  const key = columns[order[0]].key;
  shown.sort((a, b) => { const p = key(a), q = key(b); return (p < q ? -1 : p > q ? 1 : a.index - b.index) * order[1]; });
  $("count").textContent = `${count(shown.length)} of ${count(nodes.length)} nodes`;
  [...document.querySelectorAll("#nodes th")].forEach((th, i) => th.setAttribute("aria-sort", i !== order[0] ? "none" : order[1] > 0 ? "ascending" : "descending"));
  renderRows();
}

function renderRows() {
  const body = document.querySelector("#nodes tbody"), scroll = $("scroll");
  const first = Math.max(Math.floor(scroll.scrollTop / HEIGHT) - 10, 0);
  const last = Math.min(first + Math.ceil(scroll.clientHeight / HEIGHT) + 20, shown.length);
  const space = (amount) => { const row = element("tr"), cell = element("td"); cell.colSpan = columns.length; cell.style.cssText = `height:${amount * HEIGHT}px;padding:0;border:0`; row.append(cell); return row; };
  body.replaceChildren();
  if (first) body.append(space(first));
  for (const node of shown.slice(first, last)) {
    const row = element("tr", undefined, "node" + (node.index === chosen ? " chosen" : "") + (node.called ? "" : " once"));
    for (const column of columns) {
      const value = column.key(node), cell = element("td", column.show ? column.show(value) : value, column.number ? "number" : "");
      if (column.name === "kind" || column.name === "phase") {
        const badge = element("span", "", "badge");
        badge.style.background = `var(--${value})`;
        cell.prepend(badge);
      }
      if (typeof value === "string") cell.title = value;
      row.append(cell);
    }
    row.addEventListener("click", () => choose(node.index, false));
    body.append(row);
  }
  if (last < shown.length) body.append(space(shown.length - last));
}

function choose(index, scrolls) {
  chosen = index;
  if (scrolls) {
    const place = shown.findIndex((n) => n.index === index);
    if (place >= 0) $("scroll").scrollTop = Math.max(place * HEIGHT - 120, 0);
  }
  const n = nodes[index], list = element("dl"), use = (b) => {
    const m = buffers[b];
    return `${m.role}${m.name ? " " + m.name : ""} (${bytes(m.bytes)}, nodes ${m.first} to ${m.last >= nodes.length ? "the end" : m.last})`;
  };
  const lines = [["node", `${n.index}: ${n.op}`], ["module", `${moduleName(n.module)}, ${n.phase}`], ["source", n.source ? `${n.source.file}:${n.source.line} in ${n.source.function}` : ""], ["replays", n.called ? "" : "do not call it: it was made once, with the program"], ["results", n.results], ["arguments", n.arguments], ["kernels", (n.kernels || []).join(", ")], ["reads", n.reads.map(use).join("; ")], ["writes", n.writes.map(use).join("; ")]];
  for (const [name, text] of lines) if (text) list.append(element("dt", name), element("dd", text));
  $("detail").replaceChildren(list);
  $("detail").hidden = false;
  renderRows();
  draw();
}

function simpleTable(table, names, lines) {
  const head = element("tr");
  names.forEach((name) => head.append(element("th", name)));
  table.append(element("thead"), element("tbody"));
  table.tHead.append(head);
  for (const line of lines) {
    const row = element("tr");
    line.forEach((value) => { const cell = element("td", value, typeof value === "number" ? "number" : ""); cell.title = value; row.append(cell); });
    table.tBodies[0].append(row);
  }
  if (!lines.length) table.tBodies[0].append(element("tr")).append(element("td", "none"));
}

function fillTables() {
  columns.forEach((column, i) => {
    const cell = element("th", undefined, column.number ? "number" : ""), button = element("button", column.name);
    button.type = "button";
    button.addEventListener("click", () => { order = [i, order[0] === i ? -order[1] : 1]; refilter(); });
    cell.style.width = column.width || "auto";
    cell.append(button);
    document.querySelector("#nodes thead tr").append(cell);
  });
  for (const [id, key] of [["phase", "phase"], ["kind", "kind"]]) {
    for (const value of new Set(nodes.map((n) => n[key]))) $(id).append(new Option(value, value));
    $(id).addEventListener("change", refilter);
  }
  $("search").addEventListener("input", refilter);
  $("scroll").addEventListener("scroll", renderRows);
  const rank = (table) => Object.entries(table).map(([k, v]) => [k, sum(Object.values(v)), Object.entries(v).sort((a, b) => b[1] - a[1]).map(([o, c]) => `${c} ${o}`).join(", ")]);
  simpleTable($("modules"), ["module", "count", "operators or kernels"], rank(report.by_module).sort((a, b) => b[1] - a[1]));
  simpleTable($("operators"), ["operator", "nodes"], Object.entries(report.op_counts).sort((a, b) => b[1] - a[1]));
  simpleTable($("baked"), ["value", "argument", "operator", "module", "source", "nodes"], report.baked_constants.map((c) => [c.value, c.argument, c.op, moduleName(c.module), sourceText(c.source), c.num_nodes]));
  simpleTable($("inputs"), ["leaf", "what"], Object.entries(report.inputs));
  $("without").textContent = report.without_gradient.join(", ") || "none: every trainable parameter got one";
}

$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  draw();
});
$("timeline-hint").textContent = "Each node has the same width. Rows: phase, modules, nodes. Click to choose a node; drag to move; ctrl + wheel, or + and -, to zoom; double click for all of it.";
$("memory-hint").textContent = "Bytes that the iteration has made and still needs, node by node; weights, gradients and states are not in it.";
$("pool-hint").textContent = isPlanned ? `Place (upwards) and lifetime of each buffer in the planned pool of ${bytes(report.pool_bytes || poolTop)}; ${count(own.length - placed.length)} of ${count(own.length)} buffers are allocated on the way and not shown.` : "Lifetimes of the buffers, drawn at the lowest free place: memory is allocated on the way, there is no planned pool.";
fillCards();
fillTables();
refilter();
listen($("timeline"), (event) => nodes.length ? nodeText(nodeAt(timeOf(event, $("timeline")))) : "");
listen($("memory"), (event) => nodes.length ? nodeText(nodeAt(timeOf(event, $("memory")))) : "");
listen($("pool"), (event) => {
  const area = $("pool").getBoundingClientRect(), x = event.clientX - area.left, y = event.clientY - area.top;
  const hit = shownBuffers.find(([left, right, top, bottom]) => left <= x && x <= Math.max(right, left + 1) && top <= y && y <= bottom);
  return hit ? `${hit[4].name}\n${bytes(hit[4].bytes)}, nodes ${hit[4].first} to ${hit[4].last >= nodes.length ? "the end" : hit[4].last}` : "";
});
window.addEventListener("resize", () => { draw(); renderRows(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
