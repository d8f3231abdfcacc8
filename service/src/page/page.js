// The script of the page: asks for the overview every second and draws it. Text that comes from a
// sandbox is only ever put in as text.
"use strict";

const POLL_MS = 1000;
const SPAN_MS = 120_000;
const FRAME_MS = 50;
const MAX_OUTPUT = 400;
const MAX_CHARS = 200_000;
const MAX_DOWNLOAD = 512 * 1024 * 1024;
const MARK = "\u001e";
const OPERATIONS = ["create", "fork", "exec", "rollback", "checkpoint", "hibernate", "wake"];
// Those that have a plot also when there was none of them.
const USUAL = ["create", "fork", "exec", "rollback"];

const find = (id) => document.getElementById(id);
let token = sessionStorage.getItem("pvmm-token");
let seen = { sandboxes: [], operations: [] };
let clockSkew = 0;
let chosen = null;
let lastCpu = new Map();
let polling = 0;

// Elements.

function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) element[name] = value;
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const short = (id) => id.slice(0, 8);

function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit + 1 < units.length) { count /= 1024; unit += 1; }
  return `${count >= 100 || unit === 0 ? count.toFixed(0) : count.toFixed(1)} ${units[unit]}`;
}

function age(ms) {
  const seconds = Math.max(0, Math.floor(ms / 1000));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 10_000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

// Requests.

async function call(path, options = {}) {
  const headers = { ...options.headers, Authorization: `Bearer ${token}` };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.status === 401) {
    leave("This token is not accepted.");
    throw new Error("the token is not accepted");
  }
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Error(body.error || `status ${answer.status}`);
  }
  return answer;
}

async function poll() {
  const turn = polling;
  try {
    const fresh = await (await call("/v1/overview")).json();
    if (turn !== polling) return;
    clockSkew = fresh.time_ms - Date.now();
    show(fresh);
    tellLink(`updated ${new Date().toLocaleTimeString()}`, false);
  } catch (error) {
    if (turn === polling) tellLink(`no answer: ${error.message}`, true);
  }
  if (turn === polling) setTimeout(poll, POLL_MS);
}

function tellLink(text, lost) {
  find("link").textContent = text;
  find("link").classList.toggle("lost", lost);
}

function enter() {
  polling += 1;
  find("door").hidden = true;
  find("room").hidden = false;
  poll();
}

function leave(why) {
  polling += 1;
  token = null;
  sessionStorage.removeItem("pvmm-token");
  choose(null);
  find("room").hidden = true;
  find("door").hidden = false;
  find("door-error").textContent = why;
  find("token").focus();
}

// Totals and the list; tree.js draws the tree.

function show(fresh) {
  const before = seen;
  seen = fresh;
  const elapsed = before.time_ms ? fresh.time_ms - before.time_ms : 0;
  for (const sandbox of fresh.sandboxes) {
    const last = lastCpu.get(sandbox.id);
    const busy = last === undefined || sandbox.cpu_ms === null ? null : sandbox.cpu_ms - last;
    sandbox.cpu_percent = busy === null || elapsed <= 0 ? null : Math.max(0, (100 * busy) / elapsed);
  }
  lastCpu = new Map(fresh.sandboxes.map((it) => [it.id, it.cpu_ms]));
  find("version").textContent = fresh.version;
  showTiles(fresh.sandboxes);
  showList(fresh.sandboxes);
  showTree(fresh.sandboxes);
  showNumbers();
  if (chosen && !fresh.sandboxes.some((it) => it.id === chosen)) choose(null);
}

function showTiles(sandboxes) {
  const count = (test) => String(sandboxes.filter(test).length);
  const sum = (field) => bytes(sandboxes.reduce((total, it) => total + (it[field] || 0), 0));
  const tiles = [
    [count((it) => it.status === "running" || it.status === "paused"), "live"],
    [count((it) => it.status === "hibernated"), "hibernated"],
    [count((it) => it.parent), "forked"],
    [count((it) => it.has_checkpoint), "with a checkpoint"],
    [sum("memory_private"), "private memory"],
    [sum("memory_shared"), "shared memory"],
  ];
  find("tiles").replaceChildren(...tiles.map(([value, name]) =>
    make("div", { className: "tile" }, make("b", { textContent: value }), make("span", { textContent: name }))));
}

function memoryCell(sandbox, most) {
  const { memory_private: own, memory_shared: shared } = sandbox;
  if (own === null) return make("td", { textContent: "–" });
  const scale = 100 / most;
  const bar = draw("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none" });
  bar.append(
    draw("rect", { class: "private", height: 8, width: own * scale }),
    draw("rect", { class: "shared", height: 8, x: own * scale, width: shared * scale }));
  const text = `${bytes(own)} + ${bytes(shared)}`;
  return make("td", {}, make("div", { className: "memory" }, bar, make("span", { textContent: text })));
}

function showList(sandboxes) {
  const now = Date.now() + clockSkew;
  const most = Math.max(1, ...sandboxes.map((it) => it.memory_private + it.memory_shared));
  const cell = (textContent, className = "") => make("td", { textContent, className });
  find("list").replaceChildren(...sandboxes.map((it) => {
    const state = make("td", {}, make("span", { className: `key ${it.status}`, textContent: it.status }));
    const percent = it.cpu_percent === null ? "–" : `${it.cpu_percent.toFixed(0)} %`;
    const id = cell(short(it.id), "id");
    id.title = it.id;
    const row = make("tr", { className: it.id === chosen ? "chosen" : "", tabIndex: 0 },
      state, id, cell(it.template), cell(age(now - it.created_ms)), cell(percent), memoryCell(it, most));
    row.addEventListener("click", () => choose(it.id));
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(it.id); });
    return row;
  }));
  find("none").hidden = sandboxes.length > 0;
}

// Plots, which move with the clock.

const plots = new Map(OPERATIONS.map((name) => {
  const numbers = make("span");
  const canvas = make("canvas");
  const figure = make("figure", {}, make("figcaption", { textContent: name }, numbers), canvas);
  return [name, { figure, numbers, canvas }];
}));

function showNumbers() {
  const since = Date.now() + clockSkew - SPAN_MS;
  for (const [name, plot] of plots) {
    const all = seen.operations.filter((it) => it.operation === name && it.time_ms > since);
    const good = all.filter((it) => it.succeeded).map((it) => it.duration_ms).sort((a, b) => a - b);
    const at = (share) => good[Math.round((good.length - 1) * share)];
    const failed = all.length - good.length;
    plot.figure.hidden = !all.length && !USUAL.includes(name);
    const parts = good.length ? [`${good.length}×`, `p50 ${duration(at(0.5))}`, `p95 ${duration(at(0.95))}`] : ["none"];
    if (failed) parts.push(`${failed} failed`);
    plot.numbers.textContent = parts.join(" · ");
  }
}

function plotOne({ canvas }, name, colours, now) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width) return;
  if (canvas.width !== Math.round(width * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const points = seen.operations.filter((it) => it.operation === name && it.time_ms > now - SPAN_MS);
  // A scale of powers of ten, from one millisecond to what is needed.
  const top = Math.max(2, Math.ceil(Math.log10(Math.max(1, ...points.map((it) => it.duration_ms)))));
  const x = (time) => 28 + (width - 34) * (1 - (now - time) / SPAN_MS);
  const y = (ms) => height - 8 - (height - 16) * (Math.log10(Math.max(1, ms)) / top);
  context.font = "10px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let power = 0; power <= top; power += 1) {
    const line = Math.round(y(10 ** power)) + 0.5;
    context.strokeStyle = colours.line;
    context.fillStyle = colours.faint;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(28, line);
    context.lineTo(width, line);
    context.stroke();
    context.fillText(power < 3 ? String(10 ** power) : `${10 ** (power - 3)}k`, 23, line);
  }
  const good = points.filter((it) => it.succeeded);
  context.strokeStyle = colours.accent;
  context.globalAlpha = 0.35;
  context.beginPath();
  good.forEach((it, at) => (at ? context.lineTo(x(it.time_ms), y(it.duration_ms)) : context.moveTo(x(it.time_ms), y(it.duration_ms))));
  context.stroke();
  context.globalAlpha = 1;
  for (const it of points) {
    context.fillStyle = it.succeeded ? colours.accent : colours.failed;
    context.beginPath();
    context.arc(x(it.time_ms), y(it.duration_ms), 2.5, 0, 2 * Math.PI);
    context.fill();
  }
}

let lastFrame = 0;
function frame(at) {
  requestAnimationFrame(frame);
  if (at - lastFrame < FRAME_MS || find("room").hidden) return;
  lastFrame = at;
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const colours = { line: colour("line"), faint: colour("faint"), accent: colour("accent"), failed: colour("failed") };
  for (const [name, plot] of plots) plotOne(plot, name, colours, Date.now() + clockSkew);
}

// One sandbox: a terminal and its files.

const history = [];
let past = 0;
let folder = "/root";
let running = null;

function choose(id) {
  if (running) running.abort();
  const other = id !== chosen;
  chosen = id;
  find("inside").hidden = !id;
  if (id && other) {
    find("inside-name").textContent = id;
    find("output").replaceChildren();
    folder = "/root";
    find("entries").replaceChildren();
    find("crumbs").replaceChildren();
    tab("terminal");
    showPrompt();
  }
  showList(seen.sandboxes);
  showTree(seen.sandboxes);
}

function tab(name) {
  for (const other of ["terminal", "files"]) {
    find(other).hidden = other !== name;
    find(`tab-${other}`).setAttribute("aria-selected", String(other === name));
  }
  if (name === "terminal") find("command").focus({ preventScroll: true });
  // Not before someone asks: a listing wakes a sandbox that hibernates.
  else if (!find("crumbs").firstChild) list("/");
}

function showPrompt() {
  find("prompt").textContent = `${folder} #`;
}

// Escape sequences that move a cursor or set a colour mean nothing in a list of lines.
const plain = (text) => text.replace(/\u001b(\[[0-9;?]*[ -/]*[@-~]|\][^\u0007\u001b]*(\u0007|\u001b\\)?|.)/g, "").replace(/\r\n?/g, "\n");

function print(text, className) {
  if (!text) return;
  const output = find("output");
  const last = output.lastChild;
  const follows = output.scrollTop + output.clientHeight > output.scrollHeight - 30;
  if (last && last.className === className && last.textContent.length < 4096) last.append(text);
  else output.append(make("span", { className, textContent: text }));
  while (output.childNodes.length > MAX_OUTPUT || (output.textContent.length > MAX_CHARS && output.childNodes.length > 1)) output.firstChild.remove();
  if (follows) output.scrollTop = output.scrollHeight;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) {
      const field = (name) => piece.split("\n").filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2)).join("\n");
      if (field("event")) yield [field("event"), JSON.parse(field("data"))];
    }
  }
}

// Runs a line. The shell tells its folder at the end, behind a mark, for the next line.
async function run(line) {
  const id = chosen;
  print(`${folder} # ${line}\n`, "said");
  const stop = new AbortController();
  running = stop;
  find("stop").hidden = false;
  let held = "";
  try {
    const cmd = `${line}\npvmm_code=$?; printf '\\036%s' "$PWD"; exit $pvmm_code`;
    const answer = await call(`/v1/sandboxes/${id}/exec/stream`, {
      method: "POST", body: JSON.stringify({ cmd, cwd: folder }), signal: stop.signal });
    for await (const [event, data] of events(answer)) {
      if (id !== chosen) return;
      if (event === "stdout") {
        const text = held + data.chunk;
        const at = text.lastIndexOf(MARK);
        held = at < 0 ? "" : text.slice(at);
        print(plain(at < 0 ? text : text.slice(0, at)), "stdout");
      } else if (event === "stderr") print(plain(data.chunk), "stderr");
      else if (event === "error") print(`${data.error}\n`, "note");
      else if (event === "exit") {
        if (held.startsWith(`${MARK}/`)) folder = held.slice(1).split("\n")[0];
        if (data.exit_code) print(`exit ${data.exit_code}\n`, "note");
      }
    }
  } catch (error) {
    if (id === chosen) print(`${stop.signal.aborted ? "stopped" : error.message}\n`, "note");
  } finally {
    if (running === stop) { running = null; find("stop").hidden = true; showPrompt(); }
  }
}

async function list(path) {
  const id = chosen;
  find("files-error").textContent = "";
  const parts = path.split("/").filter(Boolean);
  const crumb = (textContent, to) => {
    const button = make("button", { type: "button", textContent });
    button.addEventListener("click", () => list(to));
    return button;
  };
  try {
    const answer = await call(`/v1/sandboxes/${id}/fs/dir?path=${encodeURIComponent(path)}`);
    const { entries } = await answer.json();
    if (id !== chosen) return;
    find("crumbs").replaceChildren(crumb("/", "/"),
      ...parts.map((part, at) => crumb(`${part}/`, `/${parts.slice(0, at + 1).join("/")}`)));
    entries.sort((a, b) => b.is_dir - a.is_dir || (a.name < b.name ? -1 : 1));
    find("entries").replaceChildren(...entries.map((entry) => {
      const button = make("button", { type: "button", textContent: entry.is_dir ? `${entry.name}/` : entry.name });
      button.addEventListener("click", () => (entry.is_dir ? list(entry.path) : download(entry)));
      const cell = (textContent) => make("td", { textContent });
      return make("tr", {}, make("td", {}, button), cell(entry.is_dir ? "" : bytes(entry.size)), cell(entry.mode),
        cell(new Date(entry.mtime * 1000).toLocaleString()));
    }));
  } catch (error) {
    if (id === chosen) find("files-error").textContent = error.message;
  }
}

async function download(entry) {
  find("files-error").textContent = "";
  try {
    if (entry.size > MAX_DOWNLOAD) throw new Error("too large for a browser: use GET /v1/sandboxes/ID/fs");
    const answer = await call(`/v1/sandboxes/${chosen}/fs?path=${encodeURIComponent(entry.path)}`);
    const address = URL.createObjectURL(await answer.blob());
    make("a", { href: address, download: entry.name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  } catch (error) {
    find("files-error").textContent = `${entry.name}: ${error.message}`;
  }
}

// Keys and buttons.

find("door").addEventListener("submit", (event) => {
  event.preventDefault();
  token = find("token").value.trim();
  find("token").value = "";
  find("door-error").textContent = "";
  sessionStorage.setItem("pvmm-token", token);
  enter();
});
find("leave").addEventListener("click", () => leave(""));
find("close").addEventListener("click", () => choose(null));
find("stop").addEventListener("click", () => running && running.abort());
find("tab-terminal").addEventListener("click", () => tab("terminal"));
find("tab-files").addEventListener("click", () => tab("files"));
find("line").addEventListener("submit", (event) => {
  event.preventDefault();
  const line = find("command").value;
  if (running || !line.trim()) return;
  find("command").value = "";
  history.push(line);
  past = history.length;
  run(line);
});
find("command").addEventListener("keydown", (event) => {
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (step) {
    event.preventDefault();
    past = Math.min(history.length, Math.max(0, past + step));
    find("command").value = history[past] || "";
  } else if (event.key === "c" && event.ctrlKey && running && !getSelection().toString()) running.abort();
});
find("plots").append(...[...plots.values()].map((plot) => plot.figure));
requestAnimationFrame(frame);
if (token) enter();
else leave("");
