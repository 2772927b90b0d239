// The map of all tensors: a tree of their names, and boxes as large as their bytes, in the order of the model.

// A tensor's name is a path of inner nodes; its roles are the leaves, whose `t` is the tensor.
function treeOf(tensors) {
  const node = (k, p, t = -1) => ({ k, p, c: t < 0 ? [] : null, t, bytes: NaN, bad: 0, odd: 0, largest: null });
  const root = node("", null);
  const inner = new Map([[root, new Map()]]);
  let stack = [root],
    before = [];
  const leaves = tensors.names.map((name) => {
    const words = name.split("."),
      last = words.pop();
    let at = 0; // neighbours have most of their path in common
    while (at < words.length && words[at] === before[at]) at++;
    stack.length = at + 1;
    for (; at < words.length; at++) {
      const children = inner.get(stack[at]);
      let next = children.get(words[at]);
      if (!next) {
        next = node(words[at], stack[at]);
        children.set(words[at], next);
        inner.set(next, new Map());
        stack[at].c.push(next);
      }
      stack.push(next);
    }
    before = words;
    const leaf = node(last, stack[at]);
    stack[at].c.push(leaf);
    return leaf;
  });
  for (let i = 0; i < tensors.total; i++) {
    const leaf = leaves[tensors.nameOf[i]];
    leaf.c.push(node(tensors.role(i), leaf, i));
  }
  return root;
}

// Sum up bytes, and what is damaged or unusual, of the tensors that are shown.
function weigh(node, tensors, isShown) {
  if (!node.c) {
    const on = isShown[node.t];
    node.bytes = on ? tensors.bytes[node.t] : 0;
    node.bad = on && tensors.isBad[node.t];
    node.odd = on && tensors.isOdd[node.t];
    node.largest = node;
    return;
  }
  node.bytes = node.bad = node.odd = 0;
  let most = -1;
  for (const child of node.c) {
    weigh(child, tensors, isShown);
    node.bytes += child.bytes;
    node.bad += child.bad;
    node.odd += child.odd;
    if (child.bytes > most) [most, node.largest] = [child.bytes, child.largest];
  }
}

const pathOf = (node) => (node && node.p ? [...(node.p.p ? [pathOf(node.p)] : []), node.k].join(".") : "");

// Place boxes in rows, in their order; a row takes as many as make its boxes squarest.
function place(nodes, x, y, w, h, box) {
  let left = nodes.reduce((sum, one) => sum + one.bytes, 0),
    at = 0;
  while (at < nodes.length && left > 0) {
    const isWide = w >= h,
      side = isWide ? h : w,
      scale = (w * h) / left;
    let sum = 0,
      worst = Infinity,
      end = at;
    for (; end < nodes.length && end - at <= 400; end++) {
      const thick = ((sum + nodes[end].bytes) * scale) / side;
      let ratio = 0;
      for (let i = at; i <= end && thick > 0; i++) {
        const long = (nodes[i].bytes * scale) / thick;
        if (long > 0) ratio = Math.max(ratio, thick / long, long / thick);
      }
      if (ratio > worst) break;
      if (thick > 0) worst = ratio;
      sum += nodes[end].bytes;
    }
    const thick = Math.min((sum * scale) / side, isWide ? w : h);
    let along = 0;
    for (; at < end; at++) {
      const long = sum ? (nodes[at].bytes / sum) * side : 0;
      if (isWide) box(nodes[at], x, y + along, thick, long);
      else box(nodes[at], x + along, y, long, thick);
      along += long;
    }
    if (isWide) [x, w] = [x + thick, w - thick];
    else [y, h] = [y + thick, h - thick];
    left -= sum;
  }
}

function isLight(shade) {
  const value = parseInt(shade.slice(1), 16);
  return 0.299 * (value >> 16) + 0.587 * ((value >> 8) & 255) + 0.114 * (value & 255) > 140;
}

class TensorMap {
  constructor(canvas, root, { about, chosen, zoomed }) {
    Object.assign(this, { canvas, root, zoom: root, cells: [], paint: () => SEVERAL, picked: -1 });
    this.draw = redrawn(() => this.drawNow());
    canvas.addEventListener("mousemove", (event) => {
      const node = this.at(event);
      tip(event, node && about(node));
    });
    canvas.addEventListener("mouseleave", (event) => tip(event, ""));
    canvas.addEventListener("click", (event) => {
      const node = this.at(event);
      if (node) (node.c ? zoomed : (leaf) => chosen(leaf.t))(node);
    });
  }
  // The innermost box under the mouse: later ones lie in earlier ones.
  at(event) {
    const edge = this.canvas.getBoundingClientRect(),
      x = event.clientX - edge.left,
      y = event.clientY - edge.top;
    const found = this.cells.findLast(([l, t, w, h]) => l <= x && x < l + w && t <= y && y < t + h);
    return found && found[4];
  }
  drawNow() {
    const [pen, width, height] = paper(this.canvas, Math.max(320, Math.min(620, innerHeight * 0.5)));
    this.colours = { grid: colour("--grid"), ink: colour("--ink"), panel: colour("--track"), bad: colour("--bad") };
    this.cells = [];
    pen.fillStyle = colour("--panel");
    pen.fillRect(0, 0, width, height);
    pen.textBaseline = "middle";
    pen.fillStyle = this.colours.ink;
    pen.font = "14px system-ui,sans-serif";
    if (!this.zoom.bytes) pen.fillText("Nothing that was searched for is here.", 16, 24);
    place(this.zoom.c || [this.zoom], 0, 0, width, height, (...one) => this.box(pen, ...one));
    const picked = this.cells.find(([, , , , node]) => node.t === this.picked && node.t >= 0);
    if (!picked) return;
    pen.strokeStyle = this.colours.ink;
    pen.lineWidth = 2.5;
    pen.strokeRect(picked[0] + 1, picked[1] + 1, Math.max(2, picked[2] - 2), Math.max(2, picked[3] - 2));
  }
  box(pen, node, x, y, w, h) {
    if (!node.bytes || w <= 0 || h <= 0) return;
    let words = node.k;
    while (node.c && node.c.length === 1) {
      node = node.c[0];
      if (node.c) words += `.${node.k}`;
    }
    this.cells.push([x, y, w, h, node]);
    if (!node.c || w < 3 || h < 3 || w * h < 16) {
      this.leaf(pen, node, words, x, y, w, h);
      return;
    }
    const hasHead = w > 46 && h > 34,
      edge = w > 90 && h > 60 ? 2 : w > 12 && h > 12 ? 1 : 0.5;
    pen.fillStyle = node.bad ? this.colours.bad : this.colours.panel;
    pen.fillRect(x, y, w, h);
    if (hasHead) {
      pen.font = "600 11px system-ui,sans-serif";
      pen.fillStyle = node.bad ? "#fff" : this.colours.ink;
      pen.fillText(fitted(pen, words, w - 8), x + 4, y + 8);
    }
    const top = hasHead ? 15 : edge;
    place(node.c, x + edge, y + top, w - 2 * edge, h - top - edge, (...one) => this.box(pen, ...one));
  }
  // A tensor, or a part of the tree that is too small for its own boxes, in the colour of its largest tensor.
  leaf(pen, node, words, x, y, w, h) {
    const shade = node.bad ? this.colours.bad : this.paint(node.largest.t);
    pen.fillStyle = shade;
    pen.fillRect(x, y, w, h);
    if (w > 2 && h > 2) {
      pen.strokeStyle = this.colours.grid;
      pen.lineWidth = 0.5;
      pen.strokeRect(x, y, w, h);
    }
    if (!node.bad && node.odd && w > 4 && h > 4) {
      pen.fillStyle = "#fff";
      pen.fillRect(x + 1, y + 1, Math.min(4, w / 3), Math.min(4, h / 3));
    }
    if (w > 34 && h > 13) {
      pen.font = "11px system-ui,sans-serif";
      pen.fillStyle = isLight(shade) ? "#15171c" : "#fff";
      pen.fillText(fitted(pen, words, w - 6), x + 3, y + Math.min(h / 2, 10));
    }
  }
}
