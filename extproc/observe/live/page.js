// Shows a frame of the live page's feed (extproc/observe/livefeed.py says what is in one); feed.js gets them.
// Names and paths come from clients: they are only ever set as text.
"use strict";

const REORDER_MS = 2000;    // rows keep their place that long, so that they can be read
const BUSY_LIST_MS = 1000;  // between two looks at the decisions when they come faster than shown
const NUM_ROWS = 25;        // of the heatmap at first, and more with each click
const NUM_PODS = matchMedia("(max-width: 720px)").matches ? 8 : 24;
const NUM_DECISIONS = 12;
const NUM_POINTS = 120;     // of a sparkline, one each half second
const POINT_MS = 500;

const $ = (id) => document.getElementById(id);

function make(tag, text = "", className = "", attributes = {}) {
  const element = document.createElement(tag);
  if (text !== "") element.textContent = text;
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setBadge(element, text, kind) {
  setText(element, text);
  element.className = kind ? `badge ${kind}` : "badge";
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

function bar(share) {
  const outer = make("span", "", "bar", { "aria-hidden": "true" });
  outer.append(make("i"));
  outer.firstChild.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return outer;
}

let frame = null; // the last one

// --- all of it ---------------------------------------------------------------------------------

function show() {
  document.querySelector("main").hidden = false;
  const { about, health } = frame;
  setBadge($("health"), health.length ? `not ready: ${health.join("; ")}` : "ready", health.length ? "bad" : "good");
  const up = duration(Math.max(0, (frame.wall_ms - about.started_wall_ms) / 1000));
  setText($("about"), `version ${about.version}, policy ${frame.policy}, router ${about.router}, up ${up}`);
  showWarnings();
  showTiles();
  showSlo();
  showQueue();
  showPods();
  showHeat();
  showShadow();
  showDecisions();
}

function showWarnings() {
  const { warnings, num_warnings: num } = frame;
  const lines = num > warnings.length ? [...warnings, `${num - warnings.length} more: /healthz`] : warnings;
  const list = $("warnings");
  list.hidden = !lines.length;
  if (lines.join("\n") === list.innerText) return; // a list that stays can be selected
  list.replaceChildren(...lines.map((line) => make("li", line)));
}

// --- now ---------------------------------------------------------------------------------------

const tiles = new Map();
let lastPointMs = 0;

function showTiles() {
  const sum = (key) => frame.pods.reduce((total, pod) => total + (pod.known ? pod[key] : 0), 0);
  const rates = frame.rates || {};
  const isPoint = performance.now() - lastPointMs >= POINT_MS;
  if (isPoint) lastPointMs = performance.now();
  const rate = (value) => (value === undefined ? undefined : value < 10 ? value.toFixed(1) : value.toFixed(0));
  tile("Decisions", rates.decisions_per_s, rate(rates.decisions_per_s), "/s", isPoint);
  tile("Rejections", rates.rejections_per_s, rate(rates.rejections_per_s), "/s", isPoint);
  const us = rates.decision_us === null ? undefined : rates.decision_us;
  tile("Time to decide, mean", us, us === undefined ? undefined : us.toFixed(0), "µs", isPoint);
  tile("In flight, from this router", frame.num_in_flight, String(frame.num_in_flight), "", isPoint);
  tile("Held by this router", frame.queue.num_held, String(frame.queue.num_held), "", isPoint);
  tile("Running on pods", sum("running"), String(sum("running")), "", isPoint);
  const deferred = sum("deferred");
  tile("Waiting on pods", sum("waiting"), String(sum("waiting")), deferred ? `${deferred} for a slot` : "", isPoint);
  const [held, most] = [frame.queue.oldest_s || 0, frame.queue.num_held];
  tile("Longest held now", held, most ? duration(held) : "–", "", isPoint);
}

function tile(name, value, text, unit, isPoint) {
  let it = tiles.get(name);
  if (!it) {
    it = { value: make("span"), unit: make("span", "", "unit"), points: [], line: sparkline() };
    const box = make("div");
    const dd = make("dd");
    dd.append(it.value, " ", it.unit);
    box.append(make("dt", name), dd, it.line.parentNode);
    $("tiles").append(box);
    tiles.set(name, it);
  }
  setText(it.value, text === undefined ? "–" : text);
  setText(it.unit, text === undefined ? "" : unit);
  if (!isPoint || value === undefined) return;
  it.points.push(value);
  if (it.points.length > NUM_POINTS) it.points.shift();
  const top = Math.max(1, ...it.points);
  const places = it.points.map((point, index) => {
    const x = NUM_POINTS - it.points.length + index;
    return `${x},${(20 - (point / top) * 18).toFixed(1)}`;
  });
  it.line.setAttribute("points", places.join(" "));
}

function sparkline() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  svg.setAttribute("viewBox", `0 0 ${NUM_POINTS} 21`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.append(line);
  return line;
}

// --- answered in time --------------------------------------------------------------------------

function showSlo() {
  const { slo } = frame;
  const what = `of the last ${duration(slo.window_s)}: answered, the first byte of the body within ${duration(slo.ttft_s)}`;
  const isShown = slo.known && slo.paths.length > 0;
  $("slo").parentNode.hidden = !isShown;
  if (!slo.known) {
    setText($("slo-note"), "Not known: no access log reports how long answers took.");
  } else {
    setText($("slo-note"), `${slo.paths.length ? "Requests" : "None yet. Requests"} ${what}. A response that is not streamed begins at its end.`);
  }
  if (!isShown) return;
  const rows = slo.paths.map(([path, attained, total]) => {
    const row = make("tr");
    const share = make("td", percent(attained, total));
    share.append(bar(attained / total));
    const head = make("th", "", "", { scope: "row" });
    head.append(...path.split(/(?<=\/)/).flatMap((part) => [part, make("wbr")]));
    row.append(head, share, make("td", String(total), "number"));
    return row;
  });
  $("slo").tBodies[0].replaceChildren(...rows);
}

function percent(part, total) {
  const value = (100 * part) / total;
  // Never rounded up to 100: one miss in a thousand is a miss.
  return part === total ? "100 %" : `${Math.min(value, 99.9).toFixed(1)} %`;
}

// --- held ---------------------------------------------------------------------------------------

function showQueue() {
  const { queue } = frame;
  setText($("num-held"), `${queue.num_held} of at most ${queue.max_held}`);
  setText($("queue-note"), queueNote(queue));
  $("queue").parentNode.hidden = !queue.num_held;
  const rows = queue.routes.map(([route, priority, count]) => {
    const row = make("tr");
    const numbers = [priority, count].map((number) => make("td", String(number), "number"));
    row.append(make("th", route || "no route", "", { scope: "row" }), ...numbers);
    return row;
  });
  $("queue").tBodies[0].replaceChildren(...rows);
}

function queueNote(queue) {
  if (!queue.num_held) return "No request is held: there is room for all.";
  const pace = queue.per_s === null ? "" : `, about ${Number(queue.per_s.toPrecision(2))} leave a second`;
  const next = queue.adapters.length ? ` Adapters needed next: ${queue.adapters.join(", ")}.` : "";
  return `The oldest for ${duration(queue.oldest_s)}${pace}.${next}`;
}

// --- pods --------------------------------------------------------------------------------------

const POD_COLUMNS = ["State", "In flight", "Running", "Waiting", "KV cache", "Active adapters", "Time per token", "Report age"];
let maxPods = NUM_PODS;

function podState(pod) {
  if (pod.unreachable) return ["✕ unreachable", "bad"];
  if (pod.ejected) return ["✕ ejected: it fails", "bad"];
  if (pod.dead) return ["✕ engine stopped, by its /health", "bad"];
  if (pod.asleep) return ["◦ asleep", "warn"];
  if (pod.silent) return pod.age_s === null ? ["✕ never answered", "bad"] : ["✕ silent", "bad"];
  if (!pod.known) return ["! no report, answers", "warn"];
  if (pod.slow) return ["! slower than its peers", "warn"];
  return pod.ready ? ["✓ up", "good"] : ["◦ draining", "warn"];
}

function showPods() {
  const table = $("pods");
  if (!table.tHead.rows.length) {
    const row = make("tr", "", "", { role: "row" });
    for (const name of ["Pod", ...POD_COLUMNS]) {
      row.append(make("th", name, "", { scope: "col", role: "columnheader" }));
    }
    table.tHead.append(row);
  }
  const rank = (pod) => (podState(pod)[1] === "good" ? 1 : 0);
  const pods = [...frame.pods].sort((a, b) => rank(a) - rank(b)).slice(0, maxPods);
  setText($("num-pods"), String(frame.num_pods));
  table.tBodies[0].replaceChildren(...pods.map(podRow));
  const more = frame.pods.length - pods.length;
  const unseen = frame.num_pods - frame.pods.length;
  $("more-pods").hidden = more <= 0;
  setText($("more-pods"), `and ${more} more${unseen ? ` (of ${frame.num_pods})` : ""}`);
}

function podRow(pod) {
  const [words, kind] = podState(pod);
  const row = make("tr", "", kind === "bad" ? "bad" : "", { role: "row" });
  const head = make("th", pod.name, "", { scope: "row", role: "rowheader" });
  if (pod.address !== pod.name) head.append(" ", make("span", pod.address, "sub"));
  row.append(head);
  const now = (text) => (pod.known ? text : "–");
  const waiting = pod.deferred ? `${pod.waiting} (${pod.deferred} for a slot)` : String(pod.waiting);
  const others = pod.pending - pod.in_flight;
  const values = [
    words,
    others > 0 ? `${pod.in_flight} (+${others} of other routers)` : String(pod.in_flight),
    now(String(pod.running)),
    now(waiting),
    now(`${Math.round(pod.kv * 100)} %`),
    pod.slots === null ? String(pod.active) : `${pod.active} on ${plural(pod.slots, "slot")}`,
    tokenTime(pod),
    pod.age_s === null ? "–" : duration(pod.age_s),
  ];
  values.forEach((text, index) => {
    const cell = make("td", text, "", { role: "cell", "data-label": POD_COLUMNS[index] });
    if (index === 0) cell.className = `state ${kind}`;
    if (index === 4 && pod.known) cell.append(bar(pod.kv));
    row.append(cell);
  });
  return row;
}

// Beside it how many times that of its peers it is; 1 × is alike.
function tokenTime(pod) {
  if (pod.token_ms === null) return "–";
  const time = `${Number(pod.token_ms.toPrecision(3))} ms`;
  return pod.slowness === null ? time : `${time} (${pod.slowness.toFixed(1)}\u00a0×)`;
}

$("more-pods").addEventListener("click", () => {
  maxPods = Infinity;
  showPods();
});

// --- adapters x pods ---------------------------------------------------------------------------

const CELLS = {
  ".": ["", "", "not registered"],
  "?": ["?", "unknown", "not known"],
  r: ["·", "registered", "registered"],
  c: ["○", "cpu", "in the CPU cache"],
  g: ["●", "gpu", "in a GPU slot"],
};
const heatRows = new Map(); // by adapter: {element, cells: [{element, code}], total}
const scores = new Map(); // by adapter: how active it has been of late
let order = [];
let orderedMs = -Infinity;
let maxRows = NUM_ROWS;
let columns = "";

function showHeat() {
  showFirst();
  const names = frame.pods.map((pod) => pod.name);
  if (columns !== JSON.stringify(names)) {
    columns = JSON.stringify(names);
    heatRows.clear();
    makeHeatHead();
  }
  [...$("heat").tHead.rows[0].cells].slice(1, 1 + names.length).forEach((cell, index) => {
    const pod = frame.pods[index];
    const [words, kind] = podState(pod);
    cell.className = kind === "bad" ? "bad" : "";
    cell.title = `${pod.name}: ${words.slice(2)}, ${pod.in_flight} in flight`;
  });
  const found = rank();
  const shown = found.slice(0, maxRows);
  const body = $("heat").tBodies[0];
  const elements = shown.map(heatRow);
  if (elements.length !== body.rows.length || elements.some((row, index) => row !== body.rows[index])) {
    body.replaceChildren(...elements);
  }
  tellHeat(found.length, shown.length);
}

function makeHeatHead() {
  const row = make("tr");
  row.append(make("td"));
  for (const pod of frame.pods) {
    const head = make("th", "", "", { scope: "col" });
    head.append(make("span", pod.name));
    row.append(head);
  }
  row.append(make("th", "all", "total", { scope: "col" }));
  $("heat").tHead.replaceChildren(row);
}

// The adapters that the filter lets through, most active first.
function rank() {
  const rows = new Map();
  for (const row of frame.adapters) {
    const total = row[2].reduce((sum, [, count]) => sum + count, 0);
    rows.set(row[0], row);
    scores.set(row[0], 0.9 * (scores.get(row[0]) || 0) + 0.1 * total);
  }
  for (const name of [...scores.keys()]) if (!rows.has(name)) scores.delete(name);
  for (const name of [...heatRows.keys()]) if (!rows.has(name)) heatRows.delete(name);
  if (performance.now() - orderedMs > REORDER_MS || order.some((name) => !rows.has(name))) {
    orderedMs = performance.now();
    const score = (name) => Math.round(scores.get(name) * 4);
    order = [...rows.keys()].sort((a, b) => score(b) - score(a) || (a < b ? -1 : 1));
  } else if (order.length < rows.size) {
    const known = new Set(order);
    order.push(...[...rows.keys()].filter((name) => !known.has(name)));
  }
  return order.filter(isWanted).map((name) => rows.get(name));
}

function isWanted(name) {
  return (name || "").toLowerCase().includes($("filter").value.trim().toLowerCase());
}

function heatRow([name, codes, counts]) {
  let row = heatRows.get(name);
  if (!row) {
    row = { element: make("tr"), cells: [], total: make("td", "", "total") };
    row.element.append(make("th", name, "", { scope: "row", title: name }));
    for (let index = 0; index < codes.length; index += 1) {
      const element = make("td", "", "cell");
      row.cells.push({ element, code: "" });
      row.element.append(element);
    }
    row.element.append(row.total);
    heatRows.set(name, row);
  }
  const active = new Map(counts);
  row.cells.forEach((cell, index) => {
    const count = active.get(index) || 0;
    const code = codes[index] + count;
    if (cell.code !== code) {
      cell.code = code;
      fillCell(cell.element, codes[index], count, `${name} on ${frame.pods[index].name}`);
    }
  });
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  setText(row.total, total ? String(total) : "");
  return row.element;
}

function fillCell(element, code, count, where) {
  const [glyph, kind, words] = CELLS[code];
  const level = Math.min(4, 1 + Math.floor(Math.log2(count || 1)));
  const activity = count ? ` active a${level}${code === "g" ? "" : " away"}` : "";
  const said = count ? `${plural(count, "request")}, ${words}` : words;
  element.textContent = count ? String(count) : glyph;
  element.className = `cell ${kind}${activity}`;
  element.title = `${where}: ${said}`;
  element.setAttribute("aria-label", said);
}

function tellHeat(numFound, numShown) {
  setText($("num-adapters"), String(frame.num_adapters));
  const more = numFound - numShown;
  $("more-adapters").hidden = more <= 0;
  setText($("more-adapters"), `and ${more} more`);
  const notes = [];
  if (frame.num_adapters > frame.adapters.length) {
    notes.push(`Only the ${frame.adapters.length} most active of ${frame.num_adapters} adapters are shown. The filter searches only these.`);
  }
  if (frame.num_pods > frame.pods.length) {
    notes.push(`${frame.pods.length} of ${frame.num_pods} pods are shown.`);
  }
  if (!frame.adapters.length) notes.push("No adapter is registered on any pod.");
  else if (!numFound) notes.push("No adapter's name contains that.");
  setText($("adapters-note"), notes.join(" "));
}

$("filter").addEventListener("input", () => {
  maxRows = NUM_ROWS;
  listedMs = 0;
  if (frame) show();
});
$("more-adapters").addEventListener("click", () => {
  maxRows += 4 * NUM_ROWS;
  showHeat();
});

// --- first tokens by adapter -------------------------------------------------------------------

function showFirst() {
  const rows = frame.first.filter(([name]) => isWanted(name)).map(([name, num, p50, p99]) => {
    const row = make("tr");
    const times = [p50, p99].map((seconds) => make("td", duration(seconds), "number"));
    row.append(make("th", name, "", { scope: "row" }), make("td", String(num), "number"), ...times);
    return row;
  });
  $("first").parentNode.hidden = !rows.length;
  setText($("first-note"), rows.length ? "Of the last decisions kept, the slowest first." : "None: no streamed response has been reported by an access log.");
  $("first").tBodies[0].replaceChildren(...rows);
}

// --- in shadow ---------------------------------------------------------------------------------

function showShadow() {
  const { shadow } = frame;
  document.querySelector("section.shadow").hidden = !shadow;
  if (!shadow) return;
  setText($("shadow-policy"), shadow.policy);
  setText($("shadow-note"), shadowNote(shadow));
  const rows = shadow.models.filter(([name]) => isWanted(name)).map(([name, num, agreed, harm]) => {
    const row = make("tr");
    const numbers = [String(num), num ? percent(agreed, num) : "–", harmText(harm)];
    row.append(make("th", name, "", { scope: "row" }), ...numbers.map((text) => make("td", text, "number")));
    return row;
  });
  $("shadow").parentNode.hidden = !rows.length;
  $("shadow").tBodies[0].replaceChildren(...rows);
}

function shadowNote(shadow) {
  const { num, num_agreed: agreed, num_failed: failed, skipped } = shadow;
  const parts = [
    num ? `${percent(agreed, num)} of ${plural(num, "answer")} agree with the policy in force` : "No answer yet",
    `harm by its prices ${harmText(shadow.harm_s)}`,
    `${failed} failed`,
    `${skipped.budget + skipped.behind} skipped`,
    `${duration(shadow.cpu_s)} of CPU`,
  ];
  if (num + failed) parts.push(`${Number((1000 * shadow.choose_s / (num + failed)).toPrecision(2))} ms for a choice`);
  return `${parts.join(", ")}.${shadow.error ? ` The last error: ${shadow.error}` : ""}`;
}

function harmText(seconds) {
  return seconds === null ? "–" : `${Number((1000 * seconds).toPrecision(2))} ms`;
}

// --- decisions ---------------------------------------------------------------------------------

const items = new Map(); // by sequence number
let isHeld = false;
let listedMs = 0;
let router = "";
let numLeftOut = 0;
let maxDecisions = NUM_DECISIONS;

function showDecisions() {
  setText($("num-decisions"), frame.decisions.length ? `up to number ${frame.decisions[0].n}` : "");
  if (router !== frame.about.router) {
    router = frame.about.router; // it has restarted and counts from 1 again
    items.clear();
  }
  numLeftOut += frame.num_decisions_left_out;
  if (isHeld) return;
  if (numLeftOut && performance.now() - listedMs < BUSY_LIST_MS) return;
  listedMs = performance.now();
  const found = frame.decisions.filter((decision) => isWanted(decision.model));
  const shown = found.slice(0, maxDecisions);
  const wanted = new Set(shown.map((decision) => decision.n));
  for (const number of [...items.keys()]) if (!wanted.has(number)) items.delete(number);
  const elements = shown.map((decision) => {
    if (!items.has(decision.n)) items.set(decision.n, item(decision));
    const element = items.get(decision.n);
    setText(element.querySelector(".end"), decision.end);
    return element;
  });
  $("decisions").replaceChildren(...elements);
  const more = found.length - shown.length;
  $("more-decisions").hidden = more <= 0;
  setText($("more-decisions"), `and ${more} more`);
  setText($("decisions-note"), decisionsNote());
  numLeftOut = 0;
}

$("more-decisions").addEventListener("click", () => {
  maxDecisions = Infinity;
  listedMs = 0;
  showDecisions();
});

function decisionsNote() {
  if (!frame.decisions.length) return "None yet, or none are kept (admin.max_decisions).";
  if (!frame.decisions.some((decision) => isWanted(decision.model))) return "None of the last has a model whose name contains that.";
  if (!numLeftOut) return "";
  return `Decisions come faster than the page can show them: ${numLeftOut} more since the last update.`;
}

function item(decision) {
  const isRejected = decision.status !== undefined;
  const element = make("li", "", isRejected ? "rejected" : "picked");
  const [all, head] = [make("details"), make("summary", "", "head")];
  const model = decision.model || (isRejected ? "no model" : "base");
  const target = isRejected ? `✕ ${decision.status}` : decision.pod;
  const clock = new Date(decision.wall_ms);
  const time = clock.toLocaleTimeString([], { hour12: false });
  const millis = String(clock.getMilliseconds()).padStart(3, "0");
  head.append(
    make("span", time, "time"),
    make("span", `${model} → ${target}`, "what"),
    make("span", decision.reason, "reason"),
  );
  const cost = isRejected ? "" : `, decided in ${decision.us} µs`;
  const about = make("div", `${decision.path} at ${time}.${millis}${cost}`, "text");
  all.append(head, make("div", decision.text, "text"), make("div", "", "text end"), about);
  element.append(all);
  return element;
}

$("hold").addEventListener("click", () => {
  isHeld = !isHeld;
  $("hold").setAttribute("aria-pressed", String(isHeld));
  setText($("hold"), isHeld ? "Paused: resume" : "Pause");
  if (!isHeld && frame) showDecisions();
});
