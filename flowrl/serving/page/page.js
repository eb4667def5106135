"use strict";
// Every text of a graph becomes a text node: nothing here makes HTML of it.
const at = (id) => document.getElementById(id);
const make = (tag, text = "", kind = "") => {
  const node = document.createElement(tag);
  node.textContent = text;
  if (kind) node.className = kind;
  return node;
};
const number = (value) => (value === null || value === undefined ? "" : Math.round(value).toLocaleString("en-GB"));
const percent = (share) => (share === null || share === undefined ? "" : `${Math.floor(Math.round(share * 1e7) / 1e4) / 10} %`);
const clock = (seconds) => {
  if (seconds === null || seconds === undefined) return "";
  const whole = Math.max(0, Math.floor(seconds)), [h, m, s] = [whole / 3600, (whole / 60) % 60, whole % 60].map(Math.floor);
  return `${h}:${String(m).padStart(2, "0")}:${String(s).padStart(2, "0")}`;
};
const KINDS = { completed: "done", running: "run", preparing: "run", merging: "run", failed: "bad", blocked: "bad", held: "warn" };
const word = (row) => (row.below_goal ? "below goal" : row.status === "failed" && row.why.startsWith("cancelled") ? "cancelled" : row.status === "running" && row.phase ? row.phase : row.status);
const kind = (row) => (row.below_goal ? "warn" : KINDS[row.status] || "rest");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const reasons = (row) => [row.waits_for.join(", "), row.waits, row.why].filter(Boolean).join("; ");
const SHOWN = new Set(["graph", "ended", "scheduler", "stopping", "notices", "skills", "problem", "whole"]);
const LINES = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8a8a00", "#888888"];

// The picture's library asks for frames without end: a tenth of a core. A page at rest gets four a second.
const nextFrame = window.requestAnimationFrame.bind(window);
let busyUntil = 0;
const wake = (milliseconds) => { busyUntil = Math.max(busyUntil, performance.now() + milliseconds); };
window.requestAnimationFrame = (draw) => (performance.now() < busyUntil ? nextFrame(draw) : setTimeout(() => nextFrame(draw), 250));
for (const kind of ["pointerdown", "pointermove", "wheel", "keydown", "resize"]) addEventListener(kind, () => wake(1000), { capture: true, passive: true });

let token = location.hash.slice(1) || sessionStorage.getItem("token") || "";
if (location.hash) history.replaceState(null, "", location.pathname);
sessionStorage.setItem("token", token);
let control = false, graph = 0, source = null, state = null, rows = new Map(), chosen = null, picture = null;
let shownOf = new Map(), reading = null, readAt = 0, readTook = 0, charts = [];

const url = (name, skill) => `/graphs/${graph}/${name}${skill === undefined ? "" : `?skill=${encodeURIComponent(skill)}`}`;
async function read(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function listen() {
  if (source) source.close();
  source = new EventSource(url("events"));
  source.onopen = () => say("live", "on");
  source.onerror = () => {
    const ended = source.readyState === EventSource.CLOSED;
    say(ended ? "not live: the server refuses; tries again" : "not live: no server; tries again", "off");
    if (ended) setTimeout(listen, 5000);
  };
  source.onmessage = (event) => take(JSON.parse(event.data));
}
function say(text, how) {
  at("live").textContent = text;
  at("live").className = how;
}
function take(news) {
  wake(300);
  if (news.whole) {
    state = news;
    rows = new Map(news.skills.map((row) => [row.skill, row]));
    if (picture) picture.destroy();
    picture = null;
    drawTable();
    requestAnimationFrame(() => setTimeout(drawPicture, 30)); // words first: a large picture takes a second
  } else {
    for (const [key, value] of Object.entries(news)) if (key !== "skills") state[key] = value;
    for (const row of news.skills) rows.set(row.skill, row);
    if (picture && news.skills.length) picture.batch(() => news.skills.forEach(drawNode));
    news.skills.forEach(drawRow);
    filter();
  }
  drawHead();
  if (chosen !== null && !rows.has(chosen)) choose(null);
  if (chosen !== null && (news.whole || news.skills.some((row) => row.skill === chosen))) drawSkill();
  if (at("merges").open && "skills" in news && news.skills.some((row) => row.status === "completed")) drawMerges();
}
document.addEventListener("visibilitychange", () => {
  // A browser has six connections to a server: a page that nobody sees gives its one back.
  if (document.hidden && source) source.close();
  else if (!document.hidden && source) listen();
});

function drawHead() {
  at("title").textContent = state.graph;
  document.title = `${state.graph} · flowrl`;
  at("problem").hidden = !state.problem;
  at("problem").textContent = state.problem && `This graph cannot be read now, so its last known state is shown. ${state.problem}`;
  const counts = new Map();
  for (const row of rows.values()) counts.set(row.below_goal ? "below goal" : row.status, (counts.get(row.below_goal ? "below goal" : row.status) || 0) + 1);
  at("tally").replaceChildren(...[...counts].flatMap(([status, count], place) => [
    place ? " · " : "", make("strong", String(count)), " ", make("span", status, status === "below goal" ? "warn" : KINDS[status] || "rest"),
  ]));
  if (!rows.size) at("tally").textContent = state.problem ? "" : "No skills yet.";
  const all = [...rows.values()];
  const scheduler = state.scheduler;
  const facts = [
    ["scheduler", scheduler ? `process ${scheduler.pid ?? "?"} since ${String(scheduler.since ?? "?").replace("T", " ").replace("+00:00", " UTC")}` : state.ended ? "none, all has ended" : "none: nothing is started or merged"],
    ["slots in use", number(all.filter((row) => row.status === "running" || row.status === "preparing").length)],
    ["frames merged", number(all.reduce((sum, row) => sum + (row.expert_frames || 0), 0))],
    ["steps/s", number(all.reduce((sum, row) => sum + (row.steps_per_second || 0), 0))],
    ...Object.entries(state).filter(([key]) => !SHOWN.has(key)).flatMap(([key, value]) => flat(key.replaceAll("_", " "), value)),
  ];
  define(at("facts"), facts);
  at("notices").replaceChildren(...[state.stopping, ...Object.values(state.notices || {})].filter(Boolean).map((text) => make("li", text)));
}
function flat(key, value) {
  if (value === null || value === "" || value === undefined) return [];
  if (typeof value !== "object") return [[key, typeof value === "number" ? value.toLocaleString("en-GB", { maximumFractionDigits: 2 }) : String(value)]];
  if ("total" in value) return value.total ? [[key, `${value.used} of ${value.total}`]] : [];
  return Object.entries(value).flatMap(([inner, one]) => flat(Array.isArray(value) ? key : `${key} ${inner.replaceAll("_", " ")}`, one));
}
function define(list, facts) {
  list.replaceChildren(...facts.filter(([, value]) => value !== "").map(([name, value]) => {
    const pair = make("div");
    pair.append(make("dt", name), make("dd", value));
    return pair;
  }));
}

// The picture of the graph. Nodes are named by their number, and colours repeat what the text says.
const nodeText = (row) => `${row.skill.length > 44 ? `${row.skill.slice(0, 43)}…` : row.skill}\n${word(row)}${row.success_rate === null ? "" : ` ${percent(row.success_rate)}`}`;
const nodeData = (row) => ({ text: nodeText(row), colour: colour(kind(row)), line: row.status === "waiting" || row.status === "blocked" ? "dashed" : "solid" });
function drawPicture() {
  const ids = new Map([...rows.keys()].map((name, place) => [name, `n${place}`]));
  const elements = [...rows.values()].map((row) => ({ data: { id: ids.get(row.skill), skill: row.skill, ...nodeData(row) }, position: { x: row.x, y: row.y } }));
  for (const row of rows.values()) for (const need of row.needs) elements.push({ data: { source: ids.get(need), target: ids.get(row.skill) } });
  if (picture) picture.destroy();
  const font = getComputedStyle(document.body).fontFamily, large = rows.size > 200;
  picture = cytoscape({
    container: at("graph"), elements, layout: { name: "preset", fit: false }, autoungrabify: true, boxSelectionEnabled: false,
    minZoom: 0.05, maxZoom: 2, hideEdgesOnViewport: large, textureOnViewport: large, pixelRatio: 1,
    style: [
      { selector: "node", style: { shape: large ? "rectangle" : "round-rectangle", width: 184, height: 42, "background-color": large ? "data(colour)" : colour("card"), "background-opacity": large ? 0.5 : 1, "border-width": 2, "border-color": "data(colour)", "border-style": "data(line)",
        label: "data(text)", color: colour("ink"), "font-family": font, "font-size": 13, "text-wrap": "wrap", "text-max-width": 176, "text-overflow-wrap": "anywhere", "text-valign": "center", "min-zoomed-font-size": 5 } },
      { selector: "edge", style: { width: 1.2, "line-color": colour("soft"), "target-arrow-color": colour("soft"), opacity: large ? 1 : 0.55, "target-arrow-shape": large ? "none" : "triangle", "arrow-scale": 0.8,
        "curve-style": large ? "haystack" : "straight", "source-endpoint": "92 0", "target-endpoint": "-92 0" } },
      { selector: "node.chosen", style: { "border-width": 5 } },
      { selector: "edge.near", style: { width: 2.5, opacity: 1, "line-color": colour("accent"), "target-arrow-color": colour("accent") } },
    ],
  });
  shownOf = ids;
  picture.on("tap", "node", (event) => choose(event.target.data("skill")));
  mark();
  place();
}
// All of a graph, but no smaller than can be read: then what is chosen, or under way, is in the middle.
function place(whole) {
  const box = at("graph"), all = [...rows.values()];
  const sizes = ["x", "y"].map((axis) => all.reduce(([low, high], row) => [Math.min(low, row[axis]), Math.max(high, row[axis])], [Infinity, -Infinity]));
  const least = whole || (rows.size > 100 && chosen === null) ? 0 : chosen === null ? 0.55 : 0.75, [wide, high] = sizes.map(([from, to]) => to - from);
  const across = Math.min(1.2, (box.clientWidth - 24) / (wide + 190));
  box.style.height = `${Math.round(Math.min(innerHeight / 2, Math.max(200, Math.max(least, across) * (high + 48) + 56)))}px`;
  const fit = Math.min(across, (box.clientHeight - 24) / (high + 48)), zoom = Math.max(least, fit);
  const middle = fit < least ? rows.get(chosen) || all.find((row) => row.status === "running") : null;
  const [x, y] = sizes.map(([from, to], axis) => (middle && (axis === 0 || (high + 48) * zoom > box.clientHeight) ? [middle.x, middle.y][axis] : (from + to) / 2));
  picture.resize();
  if (all.length) picture.viewport({ zoom, pan: { x: box.clientWidth / 2 - x * zoom, y: box.clientHeight / 2 - y * zoom } });
}
function drawNode(row) {
  picture.getElementById(shownOf.get(row.skill)).data(nodeData(row));
}
function mark() {
  picture.batch(() => {
    picture.elements(".chosen, .near").removeClass("chosen near");
    if (chosen === null) return;
    const node = picture.getElementById(shownOf.get(chosen));
    node.addClass("chosen").connectedEdges().addClass("near");
  });
}
at("fit").onclick = () => picture && place(true);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state && (drawPicture(), chosen !== null && drawSkill()));

// The table of skills.
let lines = new Map();
function drawTable() {
  lines = new Map();
  const body = document.createDocumentFragment();
  for (const row of rows.values()) {
    const line = make("tr"), name = make("button", row.skill, "name"), first = make("td");
    name.type = "button";
    name.onclick = () => choose(row.skill);
    first.append(name);
    line.append(first, make("td"), ...Array.from({ length: 5 }, () => make("td", "", "number")), make("td"));
    lines.set(row.skill, line);
    drawRow(row);
    body.append(line);
  }
  at("rows").replaceChildren(body);
  for (const place of [3, 4, 5, 6, 7]) document.querySelector(`thead th:nth-child(${place})`).className = "number";
  filter();
}
function drawRow(row) {
  const cells = lines.get(row.skill).children;
  const texts = [word(row), percent(row.success_rate), number(row.frames), number(row.steps_per_second), clock(row.seconds), clock(row.eta_seconds), reasons(row)];
  texts.forEach((text, place) => { if (cells[place + 1].textContent !== text) cells[place + 1].textContent = text; });
  cells[1].className = kind(row);
}
function filter() {
  const wanted = at("search").value.trim().toLowerCase(), show = at("show").value;
  const fits = { "": () => true, queue: (row) => !["completed", "failed", "held"].includes(row.status), trouble: (row) => ["failed", "held", "blocked"].includes(row.status) }[show];
  let count = 0;
  for (const [skill, line] of lines) {
    const seen = fits(rows.get(skill)) && skill.toLowerCase().includes(wanted);
    if (line.hidden === seen) line.hidden = !seen;
    count += seen;
  }
  at("count").textContent = `${number(count)} of ${number(lines.size)}`;
}
at("search").oninput = at("show").onchange = filter;

// One skill.
function choose(skill) {
  const before = lines.get(chosen);
  if (before) before.className = "";
  chosen = skill;
  at("skill").hidden = skill === null;
  document.querySelector("main").className = skill === null ? "" : "open";
  at("answer").textContent = "";
  if (picture) { mark(); place(); }
  if (skill === null) { if (before) before.querySelector("button").focus({ preventScroll: true }); return; }
  lines.get(skill).className = "chosen";
  at("skill-body").replaceChildren();
  readAt = readTook = 0;
  drawSkill();
  at("skill").focus({ preventScroll: innerWidth >= 1000 });
  at("skill").scrollTop = 0;
}
at("close").onclick = () => choose(null);
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && chosen !== null) choose(null); });
function drawSkill() {
  const row = rows.get(chosen);
  at("skill-name").textContent = row.skill;
  at("skill-status").replaceChildren(make("strong", word(row), kind(row)), ...[
    row.success_rate === null ? "" : `, ${percent(row.success_rate)} success`, row.goal ? ` of ${percent(row.goal)} wanted` : "",
    row.expert === null ? "" : `, expert ${row.expert}`, row.attempt === null ? "" : `, attempt ${row.attempt}`, reasons(row) ? `; ${row.waits_for.length ? "waits for " : ""}${reasons(row)}` : "",
  ]);
  const asks = { pause: ["waiting", "blocked", "preparing", "running"], resume: ["held"], retry: ["failed", "held"] };
  const verbs = control && token ? Object.keys(asks).filter((verb) => asks[verb].includes(row.status)) : [];
  at("buttons").replaceChildren(...verbs.map((verb) => {
    const button = make("button", verb[0].toUpperCase() + verb.slice(1));
    button.type = "button";
    button.onclick = () => ask(verb, row.skill);
    return button;
  }));
  // Curves of long runs are many: reading them takes a twentieth of the time at most.
  const due = Math.max(3000, 20 * readTook) - (performance.now() - readAt);
  clearTimeout(reading);
  reading = setTimeout(readSkill, readAt ? Math.max(0, due) : 0);
}
async function readSkill() {
  const skill = chosen, began = performance.now();
  try {
    const found = await read(url("skill", skill));
    if (skill !== chosen) return;
    readAt = performance.now();
    readTook = readAt - began;
    drawBody(rows.get(skill), found);
  } catch (error) {
    if (skill === chosen) at("answer").textContent = `its files cannot be read now: ${error.message}`;
  }
}
async function ask(verb, skill) {
  at("answer").textContent = `${verb}: asking …`;
  const answer = await fetch(url("requests"), { method: "POST", headers: { Authorization: `Bearer ${token}` }, body: JSON.stringify({ verb, skill }) }).catch((error) => error);
  if (skill === chosen) at("answer").textContent = answer.ok ? `${verb}: asked${state.scheduler ? "" : "; done when a scheduler starts"}` : `${verb}: refused: ${answer.text ? await answer.text() : "no server"}`;
}
function drawBody(row, found) {
  const body = document.createDocumentFragment(), why = found.why;
  const part = (title, ...nodes) => body.append(make("h3", title), ...nodes);
  const facts = make("dl", "", "facts");
  define(facts, [
    ["frames of its run", row.frames === null ? "" : number(row.frames) + (row.total_frames ? ` of ${number(row.total_frames)}` : "")],
    ["frames of its expert", number(row.expert_frames)], ["steps/s", number(row.steps_per_second)], ["time", clock(row.seconds)],
    ["left at most", clock(row.eta_seconds)], ["GPUs", row.devices.join(", ")], ["ended (UTC)", (row.ended_at || "").slice(0, 19).replace("T", " ")], ["needs", row.needs.join(", ")],
  ]);
  if (facts.children.length) body.append(facts);
  if (why) part("Why", make("p", `${percent(why.success)} of ${number(why.episodes)} episodes succeed; ${why.line}`), make("p", `Remedy: ${why.remedy}`));
  if (found.plan && found.plan.length) part("Plan", table(["", "Step", "Success", why ? "Lost here" : ""], found.plan.map((step, place) => {
    const loss = why && why.losses[place] && why.losses[place].skill === step.skill ? why.losses[place] : null;
    return [String(place + 1), step.skill + (step.count > 1 ? ` × ${step.count}` : ""), percent(step.success), loss && loss.lost ? `${percent(loss.lost)} by ${loss.cause}` : ""];
  }), [2]));
  charts.forEach((chart) => chart.destroy());
  charts = [];
  const boxes = [];
  const curves = (found.curves || []).filter((curve) => curve.frames.length);
  if (curves.length) boxes.push(["Success of each step, over frames", curves[0].frames, curves.map((curve, place) => [`${place + 1} ${curve.skill}`, curve.success]), true]);
  const returns = found.returns;
  if (returns && returns.frames.length > 1) boxes.push(["Return of an episode, over frames", returns.frames, [["mean return", returns.returns]], false]);
  const places = boxes.map(([title]) => { const box = make("div"); part(title, box); return box; });
  if (found.film) {
    const film = make(found.film.endsWith(".mp4") ? "video" : "img");
    film.src = url("film", row.skill);
    film.controls = film.loop = film.muted = true;
    film.alt = `Film of ${row.skill}`;
    const old = at("skill-body").querySelector("video, img");
    part("Film", old && old.src === film.src ? old : film);
  }
  if (found.settings && found.settings.length) part("Settings that are no defaults, and where they are from", list(found.settings[0].slice(row.skill.length + 2).split(/(?<=\)), /)));
  if (found.log && found.log.length) part("End of its log", make("pre", found.log.join("\n")));
  for (const problem of found.problems) body.append(make("p", problem, "bad"));
  if (row.expert === null) body.append(make("p", "It has not trained yet.", "rest"));
  at("skill-body").replaceChildren(body);
  boxes.forEach(([, frames, series, share], place) => drawChart(places[place], frames, series, share));
}
function list(texts) {
  const made = make("ul");
  made.append(...texts.map((text) => make("li", text)));
  return made;
}
function drawChart(box, frames, series, share) {
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } };
  const short = (value) => (value >= 1e6 ? `${+(value / 1e6).toFixed(2)}M` : value >= 1e3 ? `${+(value / 1e3).toFixed(1)}k` : String(value));
  charts.push(new uPlot({
    width: Math.max(200, box.clientWidth), height: 190, legend: { show: false }, cursor: { show: false },
    scales: { x: { time: false }, y: share ? { range: [0, 1] } : {} },
    axes: [{ ...axis, values: (_, values) => values.map(short) }, { ...axis, size: 58, values: (_, values) => values.map((value) => (share ? `${Math.round(value * 100)} %` : String(value))) }],
    series: [{}, ...series.map((_, place) => ({ stroke: LINES[place % LINES.length], width: place === series.length - 1 ? 2.5 : 1.25, dash: place >= LINES.length ? [6, 4] : undefined, points: { show: frames.length === 1 } }))],
  }, [frames, ...series.map(([, values]) => values)], box));
  const key = make("ul", "", "key");
  series.forEach(([label, values], place) => {
    const item = make("li"), mark = make("span");
    mark.style.borderTopColor = LINES[place % LINES.length];
    item.append(mark, `${label}${share ? `, now ${percent(values.at(-1))}` : `, now ${values.at(-1).toFixed(2)}`}`);
    key.append(item);
  });
  box.append(key);
}
function table(heads, content, numbers) {
  const made = make("table"), head = make("tr"), how = (place) => (numbers.includes(place) ? "number" : "");
  head.append(...heads.map((text, place) => make("th", text, how(place))));
  made.append(make("thead"), make("tbody"));
  made.tHead.append(head);
  for (const texts of content) {
    const line = make("tr");
    line.append(...texts.map((text, place) => make("td", text, how(place))));
    made.tBodies[0].append(line);
  }
  return made;
}
async function drawMerges() {
  const found = await read(url("merges")).catch((error) => error);
  if (found instanceof Error) { at("generations").textContent = `the history cannot be read now: ${found.message}`; return; }
  if (!found.length) { at("generations").textContent = "Nothing is merged yet."; return; }
  at("generations").replaceChildren(table(["Generation", "Merged (UTC)", "Run", "Experts it changed, with their frames and own success"], found.map((one) => [
    String(one.generation), new Date(one.at * 1000).toISOString().slice(0, 19).replace("T", " "), one.run,
    one.experts.map((each) => `${each.skill} (${number(each.frames)} frames${each.success === null ? "" : `, ${percent(each.success)}`})`).join(", "),
  ]), [0]));
}
at("merges").ontoggle = () => at("merges").open && drawMerges();

at("graphs").onchange = () => {
  graph = Number(at("graphs").value);
  choose(null);
  state = null;
  at("merges").open = false;
  listen();
};
read("/graphs").then((known) => {
  control = known.control;
  known.graphs.forEach((name, place) => at("graphs").append(Object.assign(make("option", name), { value: String(place) })));
  at("choice").hidden = known.graphs.length < 2;
  at("title").hidden = known.graphs.length > 1;
  listen();
}).catch((error) => say(`not live: ${error.message}`, "off"));
