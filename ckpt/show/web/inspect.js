const SEVERAL = "#8a93a3";
const KINDS = { weights: "#2f6feb", masters: "#8b5cf6", "optimizer states": "#14a38b", buffers: "#d9a400" };
const WHEEL = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#b8a800", "#8e3fa0", "#7c9217", "#16a4b5", "#604730"];

async function start() {
  const began = performance.now();
  const all = await content();
  const [nameOf, roleOf, dtypeOf, shapeOf, lookOf] = all.tensors.map((column) => Int32Array.from(column));
  const total = nameOf.length;
  const elements = all.shapes.map((shape) => shape.reduce((a, b) => a * b, 1));
  const bytes = Float64Array.from({ length: total }, (_, i) => elements[shapeOf[i]] * all.dtypes[dtypeOf[i]][1]);
  const lower = all.names.map((name) => name.toLowerCase());
  const label = (i) => all.names[nameOf[i]];
  const look = (i) => all.looks[lookOf[i]];
  const copies = (i) => look(i)[0], faults = (i) => look(i)[4];
  const isRank = all.holders.map(([name]) => typeof name === "number");
  const holder = (n) => (isRank[n] ? `rank ${all.holders[n][0]}` : String(all.holders[n][0]));

  function heldBy(runs, most = 6) {
    const texts = [];
    for (let at = 0; at < runs.length; at += 2) {
      const [first, last] = [runs[at], runs[at + 1]];
      if (isRank[first]) texts.push(first === last ? all.holders[first][0] : `${all.holders[first][0]}-${all.holders[last][0]}`);
      else for (let n = first; n <= last && texts.length <= most; n++) texts.push(all.holders[n][0]);
    }
    return texts.length > most ? `${texts.slice(0, most).join(", ")} … (${texts.length})` : texts.join(", ");
  }
  function holds(runs, n) {
    for (let at = 0; at < runs.length; at += 2) if (runs[at] <= n && n <= runs[at + 1]) return true;
    return false;
  }
  const numHolders = all.looks.map(([, runs]) => { let n = 0; for (let at = 0; at < runs.length; at += 2) n += runs[at + 1] - runs[at] + 1; return n; });

  // -- what is unusual: what is wrong, what has no elements, and what is not as most of its siblings are ----------------
  const reasons = new Map();
  const say = (i, text) => reasons.set(i, [...(reasons.get(i) || []), text]);
  {
    const pattern = all.names.map((name) => name.replace(/(^|\.)\d+(?=\.|$)/g, "$1*"));
    const families = new Map();
    for (let i = 0; i < total; i++) {
      if (faults(i).length) say(i, "damaged");
      if (!bytes[i]) say(i, "no elements");
      const key = `${roleOf[i]} ${pattern[nameOf[i]]}`;
      if (families.has(key)) families.get(key).push(i); else families.set(key, [i]);
    }
    const traits = [["shape", (i) => shapeOf[i]], ["dtype", (i) => dtypeOf[i]], ["number of copies", copies],
      ["number of ranks", (i) => numHolders[lookOf[i]]]];
    for (const family of families.values()) {
      if (family.length < 4) continue;
      for (const [what, of] of traits) {
        const counts = new Map();
        for (const i of family) counts.set(of(i), (counts.get(of(i)) || 0) + 1);
        if (counts.size === 1) continue;
        const most = Math.max(...counts.values());
        if (most < family.length * 0.75) continue;
        for (const i of family) if (counts.get(of(i)) < most) say(i, `another ${what} than ${most} of its ${family.length} siblings`);
      }
    }
  }
  let numDamaged = 0, numCopied = 0;
  for (let i = 0; i < total; i++) { numDamaged += faults(i).length > 0; numCopied += copies(i) > 1; }

  // -- colours ----------------------------------------------------------------------------------------------------------
  const parts = all.parts.map(([name, text, shade]) => [name, text && new RegExp(text), shade]);
  const norms = parts.find(([name]) => name === "norms");
  const partOfName = all.names.map((name) => {
    if (norms && norms[1].test(name.split(".").slice(-2).join("."))) return norms;
    return parts.find(([, found]) => !found || found.test(name));
  });
  const wheel = (n) => WHEEL[n % WHEEL.length];
  const schemes = {
    "part of the model": [(i) => partOfName[nameOf[i]][2], () => parts.map(([name, , shade]) => [name, shade])],
    dtype: [(i) => wheel(dtypeOf[i]), () => all.dtypes.map(([name], n) => [name, wheel(n)])],
    role: [(i) => wheel(roleOf[i]), () => all.roles.map((name, n) => [name, wheel(n)])],
    "rank or file": [(i) => (numHolders[lookOf[i]] === 1 ? wheel(look(i)[1][0]) : SEVERAL),
      () => [["several", SEVERAL], ...all.holders.slice(0, 10).map((_, n) => [holder(n), wheel(n)])]],
    copies: [(i) => (copies(i) > 1 ? WHEEL[1] : WHEEL[0]), () => [["one copy", WHEEL[0]], ["several copies", WHEEL[1]]]],
  };
  for (const name of Object.keys(schemes)) $("by").append(make("option", "", name));
  let paint = schemes["part of the model"][0];

  // -- the tree of names ------------------------------------------------------------------------------------------------
  const root = { k: "", p: null, c: [], t: -1, b: 0, bad: 0, odd: 0 };
  {
    const leaves = new Array(all.names.length);
    const inner = new Map([["", root]]);
    for (let n = 0; n < all.names.length; n++) {
      const words = all.names[n].split(".");
      let node = root, path = "";
      for (let at = 0; at < words.length - 1; at++) {
        path += `${words[at]}.`;
        let next = inner.get(path);
        if (!next) { next = { k: words[at], p: node, c: [], t: -1, b: 0, bad: 0, odd: 0 }; inner.set(path, next); node.c.push(next); }
        node = next;
      }
      leaves[n] = { k: words[words.length - 1], p: node, c: [], t: -1, b: 0, bad: 0, odd: 0 };
      node.c.push(leaves[n]);
    }
    for (let i = 0; i < total; i++) leaves[nameOf[i]].c.push({ k: all.roles[roleOf[i]], p: leaves[nameOf[i]], c: null, t: i, b: 0, bad: 0, odd: 0 });
  }
  const shown = new Uint8Array(total);
  function weigh(node) {
    if (!node.c) {
      const on = shown[node.t];
      node.b = on ? bytes[node.t] : 0;
      node.bad = on && faults(node.t).length ? 1 : 0;
      node.odd = on && reasons.has(node.t) ? 1 : 0;
      node.s = node;
      return;
    }
    node.b = node.bad = node.odd = 0;
    node.s = null;
    let most = -1;
    for (const child of node.c) {
      weigh(child);
      node.b += child.b; node.bad += child.bad; node.odd += child.odd;
      if (child.b > most) { most = child.b; node.s = child.s; }
    }
  }

  // -- the map: boxes in the order of the model, row by row, as square as they can be -------------------------------------
  let zoom = root, cells = [], hovered = null, chosen = -1;
  function rowsOf(children, x, y, w, h, place) {
    let left = children.reduce((sum, one) => sum + one.b, 0), at = 0;
    while (at < children.length && left > 0) {
      const wide = w >= h, side = wide ? h : w, scale = (w * h) / left;
      let sum = 0, worst = Infinity, end = at;
      while (end < children.length) {
        const next = sum + children[end].b;
        if (next > 0) {
          const thick = (next * scale) / side;
          let bad = 0;
          for (let i = at; i <= end; i++) {
            const long = (children[i].b * scale) / thick;
            if (long > 0) bad = Math.max(bad, thick / long, long / thick);
          }
          if (bad > worst) break;
          worst = bad;
        }
        sum = next;
        end++;
        if (end - at > 400) break;
      }
      const thick = Math.min((sum * scale) / side, wide ? w : h);
      let along = 0;
      for (let i = at; i < end; i++) {
        const long = sum ? (children[i].b / sum) * side : 0;
        if (wide) place(children[i], x, y + along, thick, long); else place(children[i], x + along, y, long, thick);
        along += long;
      }
      if (wide) { x += thick; w -= thick; } else { y += thick; h -= thick; }
      left -= sum;
      at = end;
    }
  }
  function drawMap() {
    const [pen, width, height] = paper($("map"), Math.max(320, Math.min(620, innerHeight * 0.5)));
    cells = [];
    const grid = colour("--grid"), ink = colour("--ink"), panel = colour("--track"), bad = colour("--bad");
    pen.fillStyle = colour("--panel");
    pen.fillRect(0, 0, width, height);
    pen.textBaseline = "middle";
    function box(node, x, y, w, h) {
      if (!node.b || w <= 0 || h <= 0) return;
      let words = node.k;
      while (node.c && node.c.length === 1) { node = node.c[0]; if (node.c) words += `.${node.k}`; }
      const isSmall = w < 3 || h < 3 || w * h < 16;
      if (!node.c || isSmall) {
        const shade = node.bad ? bad : paint(node.s.t);
        pen.fillStyle = shade;
        pen.fillRect(x, y, w, h);
        if (w > 2 && h > 2) { pen.strokeStyle = grid; pen.lineWidth = 0.5; pen.strokeRect(x, y, w, h); }
        if (!node.bad && node.odd && w > 4 && h > 4) { pen.fillStyle = "#fff"; pen.fillRect(x + 1, y + 1, Math.min(4, w / 3), Math.min(4, h / 3)); }
        if (w > 34 && h > 13) {
          pen.font = "11px system-ui,sans-serif";
          pen.fillStyle = light(shade) ? "#15171c" : "#fff";
          pen.fillText(fitted(pen, words, w - 6), x + 3, y + Math.min(h / 2, 10));
        }
        cells.push([x, y, w, h, node]);
        return;
      }
      cells.push([x, y, w, h, node]);
      const hasHead = w > 46 && h > 34;
      pen.fillStyle = node.bad ? bad : panel;
      pen.fillRect(x, y, w, h);
      if (hasHead) {
        pen.font = "600 11px system-ui,sans-serif";
        pen.fillStyle = node.bad ? "#fff" : ink;
        pen.fillText(fitted(pen, words, w - 8), x + 4, y + 8);
      }
      const edge = w > 12 && h > 12 ? (w > 90 && h > 60 ? 2 : 1) : 0.5, top = hasHead ? 15 : edge;
      rowsOf(node.c, x + edge, y + top, w - 2 * edge, h - top - edge, box);
    }
    if (zoom.b) rowsOf(zoom.c || [zoom], 0, 0, width, height, box);
    else { pen.fillStyle = ink; pen.font = "14px system-ui,sans-serif"; pen.fillText("Nothing that was searched for is here.", 16, 24); }
    outline();
  }
  function light(shade) {
    const value = parseInt(shade.slice(1), 16);
    return 0.299 * (value >> 16) + 0.587 * ((value >> 8) & 255) + 0.114 * (value & 255) > 140;
  }
  function outline() {
    const cell = cells.find(([, , , , node]) => node.t === chosen && chosen >= 0);
    const pen = $("map").getContext("2d");
    if (cell) { pen.strokeStyle = colour("--ink"); pen.lineWidth = 2.5; pen.strokeRect(cell[0] + 1, cell[1] + 1, Math.max(2, cell[2] - 2), Math.max(2, cell[3] - 2)); }
  }
  const redrawMap = redrawn(drawMap);
  const path = (node) => { const words = []; for (; node && node.p; node = node.p) words.unshift(node.k); return words.join("."); };
  function cellAt(event) {
    const place = $("map").getBoundingClientRect(), x = event.clientX - place.left, y = event.clientY - place.top;
    for (let at = cells.length - 1; at >= 0; at--) {
      const [left, top, w, h] = cells[at];
      if (left <= x && x < left + w && top <= y && y < top + h) return cells[at][4];
    }
    return null;
  }
  function about(node) {
    if (node.t >= 0) return [label(node.t), describe(node.t), ...(reasons.get(node.t) || [])].join("\n");
    return `${path(node)}\n${size(node.b)}${node.bad ? `, ${node.bad} damaged` : ""}`;
  }
  $("map").addEventListener("mousemove", (event) => { hovered = cellAt(event); tip(event, hovered && about(hovered)); });
  $("map").addEventListener("mouseleave", (event) => tip(event, ""));
  $("map").addEventListener("click", (event) => {
    const node = cellAt(event);
    if (!node) return;
    if (node.t >= 0) choose(node.t); else into(node);
  });
  $("map").addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    if (event.deltaY > 0) { if (zoom.p) into(zoom.p); return; }
    let node = cellAt(event);
    while (node && node.p && node.p !== zoom) node = node.p;
    if (node && node.c) into(node);
  }, { passive: false });
  function into(node) {
    while (node.c && node.c.length === 1 && node.c[0].c) node = node.c[0];
    zoom = node;
    const row = [];
    for (let one = node; one; one = one.p) row.unshift(one);
    $("crumbs").replaceChildren(...row.map((one) => {
      const button = make("button", "", one.p ? one.k : "all tensors");
      button.addEventListener("click", () => { zoom = one; into(one); });
      return button;
    }), make("span", "soft", node === root ? "click a box to zoom in" : `${size(node.b)}; Esc goes back`));
    redrawMap();
    list.show(sortedItems());
    counts();
  }

  // -- the list ---------------------------------------------------------------------------------------------------------
  const describe = (i) => `${all.roles[roleOf[i]]} · ${all.dtypes[dtypeOf[i]][0]} [${all.shapes[shapeOf[i]].join(", ")}] · ${size(bytes[i])} · ${where(i)}`;
  const where = (i) => (copies(i) > 1 ? `${copies(i)} copies: ` : "") + (isRank[look(i)[1][0]] ? (numHolders[lookOf[i]] === 1 ? "rank " : "ranks ") : "") + heldBy(look(i)[1]);
  let order = ["", 1], matching = [];
  const keys = { name: (i) => lower[nameOf[i]], role: (i) => all.roles[roleOf[i]], dtype: (i) => all.dtypes[dtypeOf[i]][0],
    shape: (i) => elements[shapeOf[i]], bytes: (i) => bytes[i], held: (i) => numHolders[lookOf[i]] };
  const list = new List($("list"), [["name", "name"], ["role", "role"], ["dtype", "dtype"], ["shape", "shape"], ["bytes", "bytes", true], ["held", "held by"]], {
    widths: "minmax(0,3fr) minmax(0,.9fr) minmax(0,.8fr) minmax(0,1fr) 80px minmax(0,1fr)",
    fill(i, cells) {
      const texts = [label(i), all.roles[roleOf[i]], all.dtypes[dtypeOf[i]][0], `[${all.shapes[shapeOf[i]].join(", ")}]`, size(bytes[i]), where(i)];
      texts.forEach((text, at) => { cells[at].textContent = text; });
      cells[0].className = `mono${faults(i).length ? " bad" : reasons.has(i) ? " odd" : ""}`;
      cells[0].title = label(i);
    },
    chosen: (i) => choose(i),
    sorted(key) {
      const first = key === "bytes" || key === "held" ? -1 : 1;
      order = order[0] !== key ? [key, first] : order[1] === first ? [key, -first] : ["", 1];
      list.show(sortedItems());
    },
  });
  function sortedItems() {
    const prefix = path(zoom);
    const isInside = (name) => name === prefix || name.startsWith(`${prefix}.`);
    const inside = zoom === root ? matching : matching.filter((i) => isInside(label(i)));
    if (!order[0]) return inside;
    const key = keys[order[0]], values = new Map(inside.map((i) => [i, key(i)]));
    return [...inside].sort((a, b) => { const [x, y] = [values.get(a), values.get(b)]; return (x < y ? -1 : x > y ? 1 : a - b) * order[1]; });
  }
  function counts() {
    const items = list.items;
    let sum = 0;
    for (const i of items) sum += bytes[i];
    $("count").textContent = `${items.length.toLocaleString("en")} of ${counted(total, "tensor")}, ${size(sum)}`;
  }

  // -- one tensor -------------------------------------------------------------------------------------------------------
  let slices = [];
  function choose(i) {
    chosen = i;
    list.pick(i);
    redrawMap();
    card();
  }
  function card() {
    const box = $("card"), i = chosen;
    if (i < 0) { box.replaceChildren(make("span", "soft", "Choose a tensor, in the map or in the list.")); return; }
    const facts = make("dl"), one = look(i);
    const rows = [["role", all.roles[roleOf[i]]], ["dtype", all.dtypes[dtypeOf[i]][0]], ["shape", `[${all.shapes[shapeOf[i]].join(", ")}]`],
      ["elements", elements[shapeOf[i]].toLocaleString("en")], ["bytes", `${bytes[i].toLocaleString("en")} (${size(bytes[i])})`],
      ["held by", heldBy(one[1], 40)], ["copies", copies(i)], ...one[5].map((text) => ["", text])];
    for (const [name, text] of rows) facts.append(make("dt", "", name), make("dd", "", String(text)));
    const wrong = [...faults(i), ...(reasons.get(i) || []).filter((text) => text !== "damaged")];
    const canvas = make("canvas");
    canvas.id = "slices";
    box.replaceChildren(make("h3", "", label(i)), facts, ...wrong.map((text, n) => make("div", n < faults(i).length ? "bad" : "odd", text)), canvas,
      make("div", "soft", one[6] === null ? "Its slices are too many to be drawn here." : one[2] === "elements" ? "From its first element, left, to its last." : `To the right ${one[2]}${one[3] ? `, downwards ${one[3]}` : ""}.`));
    drawSlices();
    canvas.addEventListener("mousemove", (event) => {
      const place = canvas.getBoundingClientRect(), x = (event.clientX - place.left) / place.width, y = (event.clientY - place.top) / place.height;
      const found = slices.findLast(([, l, t, r, b]) => l <= x && x < r && t <= y && y < b);
      tip(event, found ? `${found[0] === "held" || found[0] === "several" ? "" : `${found[0]} `}${found[5].length ? (isRank[found[5][0]] ? "rank " : "") + heldBy(found[5]) : ""}\n${((found[3] - found[1]) * (found[4] - found[2]) * 100).toPrecision(3)} % of the tensor` : "");
    });
    canvas.addEventListener("mouseleave", (event) => tip(event, ""));
  }
  function drawSlices() {
    const canvas = $("slices");
    if (!canvas || chosen < 0) return;
    const one = look(chosen);
    slices = one[6] === null ? [] : one[6].length ? one[6] : [["held", 0, 0, 1, 1, one[1]]];
    const [pen, width, height] = paper(canvas, one[3] ? 200 : 56);
    pen.fillStyle = colour("--track");
    pen.fillRect(0, 0, width, height);
    pen.font = "11px system-ui,sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (const [kind, l, t, r, b, runs] of slices) {
      const x = l * width, y = t * height, w = Math.max((r - l) * width, kind === "held" ? 0.3 : 3), h = Math.max((b - t) * height, kind === "held" ? 0.3 : 3);
      if (kind === "hole" || kind === "overlap") {
        pen.fillStyle = kind === "hole" ? colour("--paper") : colour("--bad");
        pen.fillRect(x, y, w, h);
        pen.strokeStyle = colour("--bad");
        pen.lineWidth = 2;
        pen.strokeRect(x + 1, y + 1, w - 2, h - 2);
      } else {
        pen.fillStyle = kind === "padding" ? "#9aa1ae55" : runs.length === 2 && runs[0] === runs[1] ? wheel(runs[0]) : SEVERAL;
        pen.fillRect(x, y, w, h);
        if (w > 3) { pen.strokeStyle = colour("--paper"); pen.lineWidth = 0.5; pen.strokeRect(x, y, w, h); }
      }
      const words = kind === "held" ? heldBy(runs, 2) : kind;
      if (w > words.length * 6 + 4 && h > 12) { pen.fillStyle = kind === "hole" ? colour("--bad") : kind === "held" && runs.length === 2 && runs[0] === runs[1] && light(wheel(runs[0])) ? "#15171c" : "#fff"; pen.fillText(words, x + w / 2, y + h / 2); }
    }
  }
  redrawn(drawSlices);

  // -- ranks ------------------------------------------------------------------------------------------------------------
  const sums = all.holders.map(([, kinds]) => Object.values(kinds).reduce((a, b) => a + b, 0));
  const largest = Math.max(1, ...sums);
  function drawHolders() {
    const [pen, width, height] = paper($("holders"), 150), count = all.holders.length;
    pen.fillStyle = colour("--panel");
    pen.fillRect(0, 0, width, height);
    const step = width / count, gap = step > 6 ? 1 : 0;
    for (let n = 0; n < count; n++) {
      let y = height;
      for (const kind of Object.keys(KINDS)) {
        const tall = ((all.holders[n][1][kind] || 0) / largest) * (height - 8);
        pen.fillStyle = KINDS[kind];
        pen.fillRect(n * step, y - tall, Math.max(0.5, step - gap), tall);
        y -= tall;
      }
      if (n === marked) { pen.strokeStyle = colour("--ink"); pen.lineWidth = 2; pen.strokeRect(n * step, 1, Math.max(2, step), height - 2); }
    }
  }
  let marked = -1;
  const holderAt = (event) => { const place = $("holders").getBoundingClientRect(); return Math.min(all.holders.length - 1, Math.max(0, Math.floor(((event.clientX - place.left) / place.width) * all.holders.length))); };
  $("holders").addEventListener("mousemove", (event) => {
    const n = holderAt(event), [, kinds, place] = all.holders[n];
    tip(event, [`${holder(n)}: ${size(sums[n])}`, ...Object.entries(kinds).map(([kind, count]) => `${kind} ${size(count)}`), place].filter(Boolean).join("\n"));
  });
  $("holders").addEventListener("mouseleave", (event) => tip(event, ""));
  $("holders").addEventListener("click", (event) => {
    const word = isRank[holderAt(event)] ? `rank:${all.holders[holderAt(event)][0]}` : `file:${holderAt(event)}`;
    const words = $("search").value.split(/\s+/).filter((one) => one && !/^(rank|file):/.test(one));
    $("search").value = $("search").value.includes(word) ? words.join(" ") : [...words, word].join(" ");
    search();
  });
  const redrawHolders = redrawn(drawHolders);
  {
    const least = Math.min(...sums), what = isRank.every(Boolean) ? "rank" : isRank.some(Boolean) ? "rank or file" : "file";
    $("holders-title").textContent = `${all.holders.length.toLocaleString("en")} ${what}${all.holders.length === 1 ? "" : "s"}, ` +
      (least === largest ? `${size(least)} each` : `${size(least)} to ${size(largest)}`) + " of tensors; click one for its tensors";
    const there = Object.keys(KINDS).filter((kind) => all.holders.some(([, kinds]) => kinds[kind]));
    for (const kind of there) { const one = make("span", "", kind); one.style.setProperty("--of", KINDS[kind]); $("kinds").append(one); }
    $("ranks").hidden = !all.holders.length;
  }

  // -- the search -------------------------------------------------------------------------------------------------------
  const off = chips($("roles"), all.roles.length > 1 ? all.roles.slice(0, 12) : [], () => search());
  function search() {
    const words = $("search").value.split(/\s+/).filter(Boolean), names = [], tests = [];
    marked = -1;
    for (const word of words) {
      const [, kind, value] = /^(rank|file|role|dtype):(.+)$/.exec(word) || [];
      if (kind === "rank" || kind === "file") {
        marked = kind === "file" ? Number(value) : all.holders.findIndex(([name]) => String(name) === value);
        const n = marked;
        tests.push((i) => n >= 0 && holds(look(i)[1], n));
      } else if (kind === "role") { const fits = matcher(value); tests.push((i) => fits(all.roles[roleOf[i]].toLowerCase())); }
      else if (kind === "dtype") {
        const known = { bf16: "bfloat16", fp16: "float16", fp32: "float32", fp64: "float64" }[value] || value;
        tests.push((i) => all.dtypes[dtypeOf[i]][0].includes(known));
      } else names.push(matcher(word));
    }
    if ($("odd").getAttribute("aria-pressed") === "true") tests.push((i) => reasons.has(i));
    if (only) tests.push(only);
    if (off.size) tests.push((i) => !off.has(all.roles[roleOf[i]]));
    const named = names.length ? lower.map((name) => names.every((fits) => fits(name))) : null;
    matching = [];
    for (let i = 0; i < total; i++) {
      shown[i] = (!named || named[nameOf[i]]) && tests.every((fits) => fits(i)) ? 1 : 0;
      if (shown[i]) matching.push(i);
    }
    weigh(root);
    if (!zoom.b) zoom = root;
    into(zoom);
    redrawHolders();
  }
  let only = null, wait = 0;
  $("search").addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(search, 80); });
  $("odd").addEventListener("click", () => { $("odd").setAttribute("aria-pressed", String($("odd").getAttribute("aria-pressed") !== "true")); search(); });
  $("by").addEventListener("change", () => recolour());
  function recolour() {
    const [of, legend] = schemes[$("by").value];
    paint = of;
    $("legend").replaceChildren(...legend().map(([name, shade]) => { const one = make("span", "", name); one.style.setProperty("--of", shade); return one; }));
    redrawMap();
  }
  addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== $("search")) { event.preventDefault(); $("search").focus(); }
    if (event.key === "Escape") { if (zoom.p) into(zoom.p); else if ($("search").value) { $("search").value = ""; search(); } }
  });

  // -- the rest ---------------------------------------------------------------------------------------------------------
  document.title = $("title").textContent = all.title;
  $("summary").textContent = all.summary.join(" · ");
  function badge(text, style, test) {
    const one = make(test ? "button" : "span", `badge ${style}`, text);
    if (test) one.addEventListener("click", () => { only = only === test ? null : test; search(); });
    $("badges").append(one);
  }
  if (numDamaged) badge(`${counted(numDamaged, "tensor")} damaged`, "bad", (i) => faults(i).length > 0);
  else badge("no holes, no overlaps", "good");
  if (numCopied) badge(`${counted(numCopied, "tensor")} in several copies`, "soft", (i) => copies(i) > 1);
  if (reasons.size) badge(`${counted(reasons.size, "tensor")} unusual`, "odd", (i) => reasons.has(i));
  $("run").hidden = all.steps.length < 2;
  all.steps.forEach((row, at) => {
    const line = make("tr");
    for (const text of row) line.append(make(at ? "td" : "th", "", text));
    $("steps").append(line);
  });
  for (const [name, text] of all.facts) $("facts").append(make("dt", "", name), make("dd", "", text));
  recolour();
  search();
  card();
  drawMap();
  ready(0);
}
start();
