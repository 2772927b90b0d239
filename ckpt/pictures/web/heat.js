const OUTSIDE = "outside of layers";
// From a small change to a large one: colours rise in lightness, so that they can be told apart without hue.
const RAMP = [
  [48, 18, 98],
  [72, 70, 160],
  [45, 125, 165],
  [40, 170, 130],
  [150, 205, 70],
  [250, 230, 60],
];
const NAN = "#ff2bd6",
  MISSING = "#8a93a3";
const STATES = { "=": "equal", "*": "different", "-": "only in A", "+": "only in B", "!": "not readable" };
const MODEL = ["weight", "master", "buffer"];
// Of each measure: its value, and the powers of ten that the ramp begins and ends at.
const MEASURES = {
  "relative error": [(one) => (one.change ? (one.change.relative ?? 1) : 0), -8, 0],
  "1 - cosine": [(one) => Math.max(0, 1 - (one.change?.cosine ?? 1)), -12, 0],
  "largest change": [(one) => numeric(one.change?.largest), -8, 1],
  "share of changed elements": [shareOf, -4, 0],
};

function shareOf(one) {
  return one.change ? one.change.num_changed / Math.max(1, one.change.numel) : 0;
}
function isNan(one) {
  return (one.change ? one.change.not_finite[0] + one.change.not_finite[1] : (one.difference?.num_nan ?? 0)) > 0;
}
function isMeasured(one) {
  return one.status === "=" || (one.change && one.change.largest !== null);
}
function stateOf(one) {
  const isOther = one.kind === "shape" || one.kind === "dtype";
  return isOther ? `another ${one.kind}: ${one.a} in A, ${one.b} in B` : STATES[one.status];
}
// The layer of a name, and what is behind it: experts and the like together.
function placeOf(fqn) {
  const found = /^(.*?\.\d+)\.(.+)$/.exec(fqn);
  return found ? [found[1], found[2].replace(/(^|\.)\d+(?=\.|$)/g, "$1*")] : [OUTSIDE, fqn];
}
function aboutAll(found) {
  const one = found[0],
    change = one.change;
  const words = [one.fqn, stateOf(one)];
  if (found.length > 1) words.splice(1, 0, `the furthest of ${found.length}`);
  if (change) {
    words.push(`relative error ${number(change.relative)}, cosine ${change.cosine?.toFixed(6) ?? "?"}`);
    words.push(`largest change ${number(change.largest)} at [${change.index.join(", ")}]`);
  }
  if (isNan(one)) words.push("has NaN or infinite elements");
  return words.join("\n");
}

class Heat {
  constructor(canvas, { chosen }) {
    Object.assign(this, { canvas, rows: [], columns: [], boxes: new Map(), cells: [], picked: null });
    this.draw = redrawn(() => this.drawNow());
    canvas.addEventListener("mousemove", (event) => {
      const found = this.at(event);
      tip(event, found && aboutAll(found));
    });
    canvas.addEventListener("mouseleave", (event) => tip(event, ""));
    canvas.addEventListener("click", (event) => {
      const found = this.at(event);
      if (found) chosen(found[0]);
    });
  }
  // Put tensors into boxes by layer and name; of those in one box the one that is furthest comes first.
  arrange(items, weight) {
    const layers = new Set(),
      names = new Set();
    this.boxes = new Map();
    for (const one of items) {
      const [layer, name] = placeOf(one.fqn),
        key = `${layer}\n${name}`;
      if (layer !== OUTSIDE) {
        layers.add(layer);
        names.add(name);
      }
      if (this.boxes.has(key)) this.boxes.get(key).push(one);
      else this.boxes.set(key, [one]);
    }
    this.rows = [...layers].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    this.columns = [...names];
    for (const found of this.boxes.values()) found.sort((a, b) => weight(b) - weight(a));
  }
  at(event) {
    const edge = this.canvas.getBoundingClientRect(),
      x = event.clientX - edge.left,
      y = event.clientY - edge.top;
    const found = this.cells.find(([l, t, w, h]) => l <= x && x < l + w && t <= y && y < t + h);
    return found && found[4];
  }
  drawNow() {
    const others = [...this.boxes].filter(([key]) => key.startsWith(`${OUTSIDE}\n`)).map(([, found]) => found);
    const width = this.canvas.clientWidth,
      left = 150,
      top = this.columns.length ? 150 : 0;
    const across = Math.max(3, Math.min(90, (width - left - 110) / Math.max(1, this.columns.length)));
    const down = this.rows.length > 64 ? Math.max(6, Math.floor(900 / this.rows.length)) : 18;
    const perLine = Math.max(1, Math.floor((width - 10) / 220)),
      below = top + this.rows.length * down + 12;
    const [pen, , height] = paper(this.canvas, below + Math.ceil(others.length / perLine) * 24 + 6);
    this.cells = [];
    pen.fillStyle = colour("--paper");
    pen.fillRect(0, 0, width, height);
    pen.textBaseline = "middle";
    pen.font = "11px ui-monospace,Menlo,Consolas,monospace";
    pen.fillStyle = colour("--soft");
    this.columns.forEach((name, x) => {
      if (x % Math.ceil(12 / across)) return;
      pen.save();
      pen.translate(left + (x + 0.5) * across, top - 6);
      pen.rotate(-Math.PI / 3.4);
      pen.fillText(fitted(pen, name, 175), 0, 0);
      pen.restore();
    });
    this.rows.forEach((layer, y) => {
      pen.textAlign = "right";
      pen.fillStyle = colour("--soft");
      if (y % Math.ceil(12 / down) === 0) pen.fillText(fitted(pen, layer, left - 10), left - 8, top + (y + 0.5) * down);
      pen.textAlign = "left";
      this.columns.forEach((name, x) => {
        const found = this.boxes.get(`${layer}\n${name}`);
        if (found) this.box(pen, found, left + x * across, top + y * down, across, down);
      });
    });
    others.forEach((found, n) => {
      const x = (n % perLine) * 220,
        y = below + Math.floor(n / perLine) * 24;
      this.box(pen, found, x, y, 18, 18);
      pen.fillStyle = colour("--ink");
      pen.fillText(fitted(pen, found[0].fqn, 190), x + 24, y + 9);
    });
  }
  box(pen, found, x, y, w, h) {
    const edge = w > 6 && h > 6 ? 1 : 0,
      one = found[0];
    pen.fillStyle = this.shade(one);
    pen.fillRect(x, y, w - edge, h - edge);
    if (!isMeasured(one) && w > 12) {
      pen.textAlign = "center";
      pen.fillStyle = "#fff";
      pen.fillText({ shape: "S", dtype: "T" }[one.kind] || one.status, x + w / 2, y + h / 2);
      pen.textAlign = "left";
    }
    if (found.includes(this.picked)) {
      pen.strokeStyle = colour("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(x, y, w - edge, h - edge);
    }
    this.cells.push([x, y, w, h, found]);
  }
}

async function start() {
  const all = await content(),
    tensors = all.tensors;
  const lower = new Map(tensors.map((one) => [one, one.fqn.toLowerCase()]));
  for (const name of Object.keys(MEASURES)) $("by").append(make("option", "", name));
  const roles = [...new Set(tensors.map((one) => one.role))],
    states = roles.filter((role) => !MODEL.includes(role));
  const choices = states.length < roles.length ? ["the model", ...states] : states;
  for (const name of choices) $("role").append(make("option", "", name));
  const isWanted = (one) =>
    one.role === $("role").value || ($("role").value === "the model" && MODEL.includes(one.role));
  const weight = (one) => (isNan(one) ? Infinity : isMeasured(one) ? MEASURES[$("by").value][0](one) : 1e9);
  let matching = [],
    order = ["relative", -1];

  // -- the map ----------------------------------------------------------------------------------------------------------
  const map = new Heat($("map"), { chosen: choose });
  map.shade = (one) => (isNan(one) ? NAN : isMeasured(one) ? ramp(MEASURES[$("by").value][0](one)) : MISSING);
  function ramp(x) {
    const [, low, high] = MEASURES[$("by").value];
    if (!(x > 0)) return colour("--track");
    const at = Math.max(0, Math.min(1, (Math.log10(x) - low) / (high - low))) * (RAMP.length - 1);
    const n = Math.min(RAMP.length - 2, Math.floor(at));
    return `rgb(${RAMP[n].map((c, i) => Math.round(c + (RAMP[n + 1][i] - c) * (at - n))).join(",")})`;
  }
  function explain() {
    const [, low, high] = MEASURES[$("by").value],
      steps = [];
    for (let at = low; at <= high; at += Math.ceil((high - low) / 5)) steps.push([`1e${at}`, ramp(10 ** at)]);
    const others = [
      ["NaN or infinite", NAN],
      ["another shape (S) or dtype (T), or on one side (- +)", MISSING],
    ];
    legend($("legend"), [["no change", colour("--track")], ...steps, ...others]);
  }

  // -- the list ---------------------------------------------------------------------------------------------------------
  const keys = {
    name: (one) => one.fqn,
    state: stateOf,
    changed: shareOf,
    relative: weight,
    cosine: (one) => one.change?.cosine ?? 1,
    largest: (one) => numeric(one.change?.largest),
  };
  const list = new List($("list"), Object.keys(keys), ["changed", "relative", "cosine", "largest"], {
    widths: "minmax(0,3fr) minmax(0,1fr) 70px 90px 90px 90px",
    texts(one) {
      const change = one.change,
        name = [one.fqn, stateOf(one)];
      if (!change) return [...name, "", "", "", ""];
      const share = `${(100 * shareOf(one)).toPrecision(3)} %`;
      return [...name, share, number(change.relative), change.cosine?.toFixed(6) ?? "?", number(change.largest)];
    },
    style: (one) => (isNan(one) || one.status === "!" ? "bad" : one.status === "=" ? "" : "odd"),
    chosen: choose,
    sorted(key) {
      const first = ["name", "state", "cosine"].includes(key) ? 1 : -1;
      order = [key, order[0] === key ? -order[1] : first];
      list.show(sortedBy(matching, keys[order[0]], order[1]));
    },
  });

  // -- one tensor -------------------------------------------------------------------------------------------------------
  function choose(one) {
    map.picked = one;
    list.pick(one);
    map.draw();
    card();
  }
  function card() {
    const one = map.picked;
    if (!one) {
      $("card").replaceChildren(make("span", "soft", "Choose a tensor, in the map or in the list."));
      return;
    }
    const { change, difference } = one,
      pairs = [
        ["role", one.role],
        ["state", stateOf(one)],
      ];
    pairs.push(["in B", one.b_fqn], ["rounded to", one.cast], ["error", one.error]);
    if (change) {
      const [a, b] = change.not_finite;
      pairs.push(["elements", grouped(change.numel)], ["changed", grouped(change.num_changed)]);
      pairs.push(["relative error", number(change.relative)], ["cosine", change.cosine]);
      pairs.push(["largest change", number(change.largest)], ["at", `[${change.index.join(", ")}]`]);
      pairs.push(["NaN or infinite", `${a} in A, ${b} in B`]);
    }
    for (const [side, found] of difference
      ? [
          ["A", difference.a],
          ["B", difference.b],
        ]
      : []) {
      const where = `at byte ${found.offset} of ${found.file}${found.rank === null ? "" : `, rank ${found.rank}`}`;
      pairs.push([
        `first in ${side}`,
        `[${difference.index.join(", ")}] is ${found.value} (0x${found.bits}), ${where}`,
      ]);
    }
    const known = pairs.filter(([, text]) => text !== undefined && text !== null);
    $("card").replaceChildren(make("h3", "", one.fqn), facts(known));
  }

  // -- the search -------------------------------------------------------------------------------------------------------
  function search() {
    const fits = $("search").value.split(/\s+/).filter(Boolean).map(matcher),
      onlyOdd = isPressed($("odd"));
    const isIn = (one) => isWanted(one) && (!onlyOdd || one.status !== "=") && fits.every((fit) => fit(lower.get(one)));
    matching = tensors.filter(isIn);
    const differing = matching.filter((one) => one.status !== "=").length;
    $("count").textContent = `${counted(matching.length, "tensor")}, ${grouped(differing)} not equal`;
    map.arrange(matching, weight);
    map.draw();
    list.show(sortedBy(matching, keys[order[0]], order[1]));
  }
  searched(search);
  toggled($("odd"), search);
  $("role").addEventListener("change", search);
  $("by").addEventListener("change", () => {
    explain();
    search();
  });

  // -- the rest ---------------------------------------------------------------------------------------------------------
  $("sides").textContent = `A: ${all.a.path} (${all.a.format})   B: ${all.b.path} (${all.b.format})`;
  const styles = { "=": "good", "!": "bad" };
  for (const [sign, words] of Object.entries(STATES)) {
    const text = `${grouped(all.counts[sign])} ${words}`;
    if (all.counts[sign]) $("badges").append(make("span", `badge ${styles[sign] || "odd"}`, text));
  }
  const numNan = tensors.filter(isNan).length;
  if (numNan) $("badges").append(make("span", "badge bad", `${counted(numNan, "tensor")} with NaN or infinity`));
  for (const one of all.not_compared) {
    const text = `not compared: ${one.role} of ${counted(one.count, "tensor")} of ${one.side}: ${one.why}`;
    $("notes").append(make("div", "soft", text));
  }
  for (const note of all.notes) $("notes").append(make("div", "soft", note));
  const isDiff = "layers" in all;
  $("made").textContent = isDiff
    ? "Made by ckpt diff --html."
    : "Made by ckpt verify --html: every bit was compared, and what differs was measured.";
  explain();
  search();
  card();
  map.drawNow();
  if (tensors.every((one) => one.status === "=")) {
    $("title").textContent = isDiff ? "Nothing changed" : "Equal: nothing differs";
    for (const id of ["grid", "map", "legend", "odd"]) $(id).style.display = "none";
  }
  ready();
}
start();
