// The fork tree as a picture: sandboxes from left to right, and below each one its checkpoints.
"use strict";

const [MARGIN, BLOCK, LINE, LANE] = [18, 34, 18, 22];
const NAME_CHARS = 16;
// More checkpoints than this are thinned out along straight lines.
const MANY = 10;

// The rows of a sandbox's checkpoints: side branches below their parent and to the right of it, the
// newest branch straight down. A row has its checkpoint, its lane, and the row of its parent.
function checkpointRows(checkpoints) {
  const nodes = new Map(checkpoints.map((it) => [it.name, { ...it, children: [], left_out: 0 }]));
  const roots = [];
  for (const node of nodes.values()) {
    const parent = nodes.get(node.parent);
    if (parent) parent.children.push(node);
    else roots.push(node);
  }
  thin(nodes);
  const here = [...nodes.values()].find((it) => it.current);
  for (let node = here; node && !node.past; node = nodes.get(node.parent)) node.past = true;
  const rows = [];
  const place = (node, lane, above) => {
    Object.assign(node, { lane, above, row: rows.length });
    rows.push(node);
    node.children.forEach((child, at) => place(child, lane + (at + 1 < node.children.length ? 1 : 0), node));
  };
  for (const root of roots) place(root, 0, null);
  return rows;
}

// Leaves out the oldest of those that only lie between two others.
function thin(nodes) {
  for (const node of [...nodes.values()]) {
    if (nodes.size <= MANY) return;
    const parent = nodes.get(node.parent);
    if (!parent || node.current || node.children.length !== 1) continue;
    const [child] = node.children;
    child.parent = node.parent;
    child.left_out += node.left_out + 1;
    parent.children[parent.children.indexOf(node)] = child;
    nodes.delete(node.name);
  }
}

// Places each sandbox: its column by its ancestors, its height by what is below it. A parent that
// has ended is drawn, too, so that its children stay together.
function forest(sandboxes) {
  const nodes = new Map();
  const add = (id, sandbox) => {
    const rows = checkpointRows((sandbox && sandbox.checkpoints) || []);
    const lanes = Math.max(0, ...rows.map((row) => row.lane));
    const width = Math.max(88 + marksWidth({ sandbox }), rows.length ? 36 + lanes * LANE + Math.max(...rows.map((row) => label(row).length)) * 7 : 0);
    const node = { id, sandbox, rows, width, height: BLOCK + rows.length * LINE, children: [] };
    nodes.set(id, node);
    return node;
  };
  for (const it of [...sandboxes].reverse()) add(it.id, it);
  const roots = [];
  for (const node of [...nodes.values()]) {
    const parent = node.sandbox.parent;
    if (!parent) { roots.push(node); continue; }
    if (!nodes.has(parent)) roots.push(add(parent, null));
    nodes.get(parent).children.push(node);
  }
  const widths = [];
  const measure = (node, depth) => {
    node.depth = depth;
    widths[depth] = Math.max(widths[depth] || 0, node.width);
    for (const child of node.children) measure(child, depth + 1);
    node.below = node.children.reduce((sum, child) => sum + child.total, 0);
    node.total = Math.max(node.height, node.below);
  };
  for (const root of roots) measure(root, 0);
  const columns = widths.map((_, depth) => MARGIN + widths.slice(0, depth).reduce((sum, width) => sum + width + 56, 0));
  const place = (node, top) => {
    node.x = columns[node.depth];
    let next = top;
    for (const child of node.children) { place(child, next); next += child.total; }
    const [first, last] = [node.children[0], node.children[node.children.length - 1]];
    const middle = first ? (first.y + last.y) / 2 : top + MARGIN;
    // What is below the sandbox itself must fit, too.
    node.y = Math.min(middle, top + node.total - node.height + MARGIN);
  };
  let top = 0;
  for (const root of roots) { place(root, top); top += root.total; }
  return { nodes: [...nodes.values()], height: top, width: columns.length ? columns[columns.length - 1] + widths[widths.length - 1] : 0 };
}

function showTree(sandboxes) {
  const { nodes, width, height } = forest(sandboxes);
  const picture = draw("svg", { width: width + MARGIN, height: Math.max(1, height) + 6, role: "img", "aria-label": "Fork tree" });
  for (const node of nodes) {
    for (const child of node.children) {
      const [from, to] = [node.x + 84 + marksWidth(node), child.x - 9];
      const middle = to - 40;
      picture.append(draw("path", {
        class: "fork",
        d: `M${from},${node.y} H${Math.max(from, middle - 20)} C${middle + 20},${node.y} ${middle},${child.y} ${to},${child.y}` }));
    }
  }
  for (const node of nodes) picture.append(treeNode(node));
  find("tree").replaceChildren(...(nodes.length ? [picture] : []));
}

// The marks of a sandbox's snapshots, behind its name.
const marksWidth = ({ sandbox }) => (sandbox ? Math.min(3, sandbox.snapshots.length) * 11 + (sandbox.snapshots.length > 3 ? 24 : 0) : 0);

function treeNode(node) {
  const state = node.sandbox ? node.sandbox.status : "ended";
  const group = draw("g", { class: `sandbox ${state}${node.id === chosen ? " chosen" : ""}`, transform: `translate(${node.x} ${node.y})` });
  group.append(...node.rows.filter((row) => row.above).map(checkpointEdge), ...rootEdges(node.rows));
  group.append(draw("circle", { r: 8 }), draw("text", { x: 14 }, short(node.id)));
  group.append(draw("title", {}, `${node.id}: ${state}`));
  if (!node.sandbox) return group;
  group.append(...node.rows.map(checkpointMark));
  if (node.sandbox.has_checkpoint && !node.rows.length) {
    group.append(draw("rect", { class: "checkpoint", x: -4.5, y: -4.5, width: 9, height: 9, transform: "translate(6 -7) rotate(45)" }));
  }
  node.sandbox.snapshots.slice(0, 3).forEach((_, at) => {
    group.append(draw("rect", { class: "snapshot", x: 80 + at * 11, y: -3.5, width: 7, height: 7, rx: 1.5 }));
  });
  if (node.sandbox.snapshots.length > 3) {
    group.append(draw("text", { class: "more", x: 114 }, `+${node.sandbox.snapshots.length - 3}`));
  }
  group.addEventListener("click", () => choose(node.id));
  return group;
}

const rowX = (row) => 20 + row.lane * LANE;
const rowY = (row) => 22 + row.row * LINE;

function label(row) {
  const name = row.name.length > NAME_CHARS ? `${row.name.slice(0, NAME_CHARS - 1)}…` : row.name;
  return row.left_out ? `${name} (+${row.left_out})` : name;
}

function checkpointEdge(row) {
  const [x, y, fromX, fromY] = [rowX(row), rowY(row), rowX(row.above), rowY(row.above)];
  const bend = x === fromX ? `V${y}` : `V${y - 9} Q${fromX},${y} ${x},${y}`;
  const kind = `line${row.past ? " past" : ""}${row.left_out ? " gap" : ""}`;
  return draw("path", { class: kind, d: `M${fromX},${fromY} ${bend}` });
}

// The first checkpoint hangs on its sandbox, and so does each whose parent was deleted.
function rootEdges(rows) {
  return rows.filter((row) => !row.above).map((row) =>
    draw("path", { class: `line${row.past ? " past" : ""}`, d: `M0,8 V${rowY(row) - 9} Q0,${rowY(row)} ${rowX(row)},${rowY(row)}` }));
}

function checkpointMark(row) {
  const group = draw("g", { class: `checkpoint${row.current ? " here" : ""}`, transform: `translate(${rowX(row)} ${rowY(row)})` });
  group.append(
    draw("rect", { x: -3.5, y: -3.5, width: 7, height: 7, transform: "rotate(45)" }),
    draw("text", { x: 11 }, label(row)),
    draw("title", {}, `checkpoint ${row.name}${row.parent ? `, after ${row.parent}` : ""}${row.current ? ": the sandbox goes on from here" : ""}`));
  return group;
}
