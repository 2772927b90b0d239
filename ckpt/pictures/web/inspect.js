const KINDS = { weights: "#2f6feb", masters: "#8b5cf6", "optimizer states": "#14a38b", buffers: "#d9a400" };
const COLUMNS = "minmax(0,3fr) minmax(0,.9fr) minmax(0,.8fr) minmax(0,1fr) 80px minmax(0,1fr)";

async function start() {
  const tensors = new Tensors(await content());
  const isShown = new Uint8Array(tensors.total);
  const root = treeOf(tensors),
    schemes = tensors.schemes();
  let matching = [],
    order = ["", 1],
    only = null,
    marked = -1;

  // -- the map ----------------------------------------------------------------------------------------------------------
  const map = new TensorMap($("map"), root, { about, chosen: choose, zoomed: into });
  function about(node) {
    if (!node.c) return tensors.about(node.t);
    return `${pathOf(node)}\n${size(node.bytes)}${node.bad ? `, ${node.bad} damaged` : ""}`;
  }
  function into(node) {
    while (node.c && node.c.length === 1 && node.c[0].c) node = node.c[0];
    map.zoom = node;
    const row = [];
    for (let one = node; one; one = one.p) row.unshift(one);
    const buttons = row.map((one) => {
      const button = make("button", "", one.p ? one.k : "all tensors");
      button.addEventListener("click", () => into(one));
      return button;
    });
    const hint = node === root ? "click a box to zoom in" : `${size(node.bytes)}; Esc goes back`;
    $("crumbs").replaceChildren(...buttons, make("span", "soft", hint));
    map.draw();
    list.show(listed());
    const sum = list.items.reduce((sum, i) => sum + tensors.bytes[i], 0);
    $("count").textContent = `${grouped(list.items.length)} of ${counted(tensors.total, "tensor")}, ${size(sum)}`;
  }
  function recolour() {
    const [paint, entries] = schemes[$("by").value];
    map.paint = paint;
    legend($("legend"), entries);
    map.draw();
  }
  for (const name of Object.keys(schemes)) $("by").append(make("option", "", name));
  $("by").addEventListener("change", recolour);

  // -- the list ---------------------------------------------------------------------------------------------------------
  const keys = {
    name: (i) => tensors.lower[tensors.nameOf[i]],
    role: (i) => tensors.role(i),
    dtype: (i) => tensors.dtype(i),
    shape: (i) => tensors.numel(i),
    bytes: (i) => tensors.bytes[i],
    "held by": (i) => tensors.ranks(i),
  };
  const list = new List($("list"), Object.keys(keys), ["bytes"], {
    widths: COLUMNS,
    texts: (i) => [
      ...[tensors.name(i), tensors.role(i), tensors.dtype(i), tensors.shape(i), size(tensors.bytes[i])],
      tensors.where(i),
    ],
    style: (i) => (tensors.isBad[i] ? "bad" : tensors.isOdd[i] ? "odd" : ""),
    chosen: choose,
    sorted(key) {
      const first = key === "bytes" || key === "held by" ? -1 : 1;
      order = order[0] !== key ? [key, first] : order[1] === first ? [key, -first] : ["", 1];
      list.show(listed());
    },
  });
  function listed() {
    const prefix = pathOf(map.zoom);
    const isInside = (name) => name === prefix || name.startsWith(`${prefix}.`);
    const inside = map.zoom === root ? matching : matching.filter((i) => isInside(tensors.name(i)));
    return order[0] ? sortedBy(inside, keys[order[0]], order[1]) : inside;
  }

  // -- one tensor -------------------------------------------------------------------------------------------------------
  let slices = [];
  function choose(i) {
    map.picked = i;
    list.pick(i);
    map.draw();
    card();
  }
  function card() {
    const i = map.picked;
    if (i < 0) {
      $("card").replaceChildren(make("span", "soft", "Choose a tensor, in the map or in the list."));
      return;
    }
    const [copies, runs, right, down, faults, remarks, drawn] = tensors.look(i);
    const odd = (tensors.reasons.get(i) || []).filter((text) => text !== "damaged");
    const canvas = make("canvas");
    canvas.id = "slices";
    canvas.addEventListener("mousemove", sayOfSlice);
    canvas.addEventListener("mouseleave", (event) => tip(event, ""));
    const axes = right === "elements" ? "From its first element, left, to its last." : `To the right ${right}`;
    const said = drawn === null ? "Its slices are too many to be drawn here." : axes + (down && `, downwards ${down}`);
    $("card").replaceChildren(
      make("h3", "", tensors.name(i)),
      facts([
        ["role", tensors.role(i)],
        ["dtype", tensors.dtype(i)],
        ["shape", tensors.shape(i)],
        ["elements", grouped(tensors.numel(i))],
        ["bytes", `${grouped(tensors.bytes[i])} (${size(tensors.bytes[i])})`],
        [tensors.isRank[runs[0]] ? "ranks" : "files", tensors.heldBy(runs, 40)],
        ["copies", copies],
        ...remarks.map((text) => ["", text]),
      ]),
      ...faults.map((text) => make("div", "bad", text)),
      ...odd.map((text) => make("div", "odd", text)),
      canvas,
      make("div", "soft", said),
    );
    drawSlices();
  }
  function sayOfSlice(event) {
    const edge = event.target.getBoundingClientRect();
    const x = (event.clientX - edge.left) / edge.width,
      y = (event.clientY - edge.top) / edge.height;
    const found = slices.findLast(([, l, t, r, b]) => l <= x && x < r && t <= y && y < b);
    if (!found) return tip(event, "");
    const [kind, l, t, r, b, runs] = found;
    const who = runs.length ? (tensors.isRank[runs[0]] ? "rank " : "") + tensors.heldBy(runs) : "";
    const share = `${((r - l) * (b - t) * 100).toPrecision(3)} % of the tensor`;
    return tip(event, [kind === "held" || kind === "several" ? who : `${kind} ${who}`, share].join("\n"));
  }
  function drawSlices() {
    if (!$("slices")) return;
    const [, runs, , down, , , drawn] = tensors.look(map.picked);
    slices = drawn === null ? [] : drawn.length ? drawn : [["held", 0, 0, 1, 1, runs]];
    const [pen, width, height] = paper($("slices"), down ? 200 : 56);
    pen.fillStyle = colour("--track");
    pen.fillRect(0, 0, width, height);
    pen.font = "11px system-ui,sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (const [kind, l, t, r, b, held] of slices) {
      const least = kind === "held" ? 0.3 : 3; // what is wrong is never too narrow to be seen
      slice(
        pen,
        kind,
        held,
        l * width,
        t * height,
        Math.max((r - l) * width, least),
        Math.max((b - t) * height, least),
      );
    }
  }
  function slice(pen, kind, held, x, y, w, h) {
    const bad = colour("--bad"),
      isOne = held.length === 2 && held[0] === held[1];
    const shade =
      { hole: colour("--paper"), overlap: bad, padding: "#9aa1ae" }[kind] || (isOne ? wheel(held[0]) : SEVERAL);
    pen.globalAlpha = kind === "padding" ? 0.4 : 1;
    pen.fillStyle = shade;
    pen.fillRect(x, y, w, h);
    pen.globalAlpha = 1;
    pen.strokeStyle = kind === "hole" || kind === "overlap" ? bad : colour("--paper");
    pen.lineWidth = kind === "hole" || kind === "overlap" ? 2 : 0.5;
    if (w > 2.9) pen.strokeRect(x, y, w, h);
    const words = kind === "held" ? String(tensors.heldBy(held, 2)) : kind;
    pen.fillStyle = kind === "hole" ? bad : isLight(shade) ? "#15171c" : "#fff";
    if (w > words.length * 6 + 4 && h > 12) pen.fillText(words, x + w / 2, y + h / 2);
  }
  redrawn(drawSlices);

  // -- ranks ------------------------------------------------------------------------------------------------------------
  const count = tensors.holders.length;
  const sums = tensors.holders.map(([, kinds]) => Object.values(kinds).reduce((a, b) => a + b, 0));
  const least = Math.min(...sums),
    largest = Math.max(1, ...sums);
  const drawHolders = redrawn(() => {
    const [pen, width, height] = paper($("holders"), 150),
      step = width / count;
    pen.fillStyle = colour("--panel");
    pen.fillRect(0, 0, width, height);
    tensors.holders.forEach(([, kinds], n) => {
      let y = height;
      for (const [kind, shade] of Object.entries(KINDS)) {
        const tall = ((kinds[kind] || 0) / largest) * (height - 8);
        pen.fillStyle = shade;
        pen.fillRect(n * step, y - tall, Math.max(0.5, step - (step > 6 ? 1 : 0)), tall);
        y -= tall;
      }
    });
    pen.strokeStyle = colour("--ink");
    pen.lineWidth = 2;
    if (marked >= 0) pen.strokeRect(marked * step, 1, Math.max(2, step), height - 2);
  });
  function holderAt(event) {
    const edge = $("holders").getBoundingClientRect();
    return Math.max(0, Math.min(count - 1, Math.floor(((event.clientX - edge.left) / edge.width) * count)));
  }
  $("holders").addEventListener("mousemove", (event) => {
    const n = holderAt(event),
      [, kinds, where] = tensors.holders[n];
    const bytes = Object.entries(kinds).map(([kind, one]) => `${kind} ${size(one)}`);
    tip(event, [`${tensors.holder(n)}: ${size(sums[n])}`, ...bytes, where].filter(Boolean).join("\n"));
  });
  $("holders").addEventListener("mouseleave", (event) => tip(event, ""));
  $("holders").addEventListener("click", (event) => {
    const n = holderAt(event),
      word = tensors.isRank[n] ? `rank:${tensors.holders[n][0]}` : `file:${n}`;
    const words = $("search").value.split(/\s+/).filter(Boolean);
    const others = words.filter((one) => !/^(rank|file):/.test(one));
    $("search").value = (words.includes(word) ? others : [...others, word]).join(" ");
    search();
  });
  {
    const each = size(least) === size(largest) ? `${size(largest)} each` : `${size(least)} to ${size(largest)}`;
    const what = tensors.isRank.every(Boolean) ? "rank" : tensors.isRank.some(Boolean) ? "holder" : "file";
    $("holders-title").textContent = `${counted(count, what)}, ${each} of tensors; click one for its tensors`;
    legend(
      $("kinds"),
      Object.entries(KINDS).filter(([kind]) => tensors.holders.some(([, kinds]) => kinds[kind])),
    );
    $("ranks").hidden = !count;
  }

  // -- the search -------------------------------------------------------------------------------------------------------
  const off = chips($("roles"), tensors.roles.length > 1 ? tensors.roles.slice(0, 12) : [], search);
  function search() {
    const [tests, asked] = tensors.search($("search").value);
    marked = asked;
    if (off.size) tests.push((i) => !off.has(tensors.role(i)));
    if (isPressed($("odd"))) tests.push((i) => tensors.isOdd[i]);
    if (only) tests.push(only);
    matching = [];
    for (let i = 0; i < tensors.total; i++) {
      isShown[i] = tests.every((fits) => fits(i)) ? 1 : 0;
      if (isShown[i]) matching.push(i);
    }
    weigh(root, tensors, isShown);
    into(map.zoom.bytes ? map.zoom : root);
    drawHolders();
  }
  searched(search);
  toggled($("odd"), search);
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (map.zoom.p) into(map.zoom.p);
    else if ($("search").value) {
      $("search").value = "";
      search();
    }
  });
  function badge(text, style, test) {
    const one = make(test ? "button" : "span", `badge ${style}`, text);
    $("badges").append(one);
    if (!test) return;
    toggled(one, () => {
      for (const other of $("badges").children) if (other !== one) other.setAttribute("aria-pressed", "false");
      only = isPressed(one) ? test : null;
      search();
    });
  }
  const numBad = tensors.isBad.reduce((sum, one) => sum + one, 0);
  const numCopied = tensors.lookOf.reduce((sum, look) => sum + (tensors.looks[look][0] > 1), 0);
  if (numBad) badge(`${counted(numBad, "tensor")} damaged`, "bad", (i) => tensors.isBad[i]);
  else badge("no holes, no overlaps", "good");
  if (numCopied) badge(`${counted(numCopied, "tensor")} in several copies`, "soft", (i) => tensors.copies(i) > 1);
  const numOdd = tensors.reasons.size;
  if (numOdd) badge(`${counted(numOdd, "tensor")} unusual`, "odd", (i) => tensors.isOdd[i]);

  // -- the rest ---------------------------------------------------------------------------------------------------------
  $("title").textContent = tensors.title;
  $("summary").textContent = tensors.summary.join(" · ");
  $("run").hidden = tensors.steps.length < 2;
  tensors.steps.forEach((row, at) => {
    const line = make("tr");
    line.append(...row.map((text) => make(at ? "td" : "th", "", text)));
    $("steps").append(line);
  });
  $("facts").replaceWith(facts(tensors.facts));
  recolour();
  search();
  card();
  map.drawNow();
  ready();
}
start();
