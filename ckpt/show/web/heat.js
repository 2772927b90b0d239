const OUTSIDE = "outside of layers";
// From no change to a large one; the colours rise in lightness, so that they can be told apart without hue.
const RAMP = [[48, 18, 98], [72, 70, 160], [45, 125, 165], [40, 170, 130], [150, 205, 70], [250, 230, 60]];
const NAN = "#ff2bd6", MISSING = "#8a93a3";
const STATES = { "=": "equal", "*": "differs", "-": "only in A", "+": "only in B", "!": "not readable" };

async function start() {
  const all = await content();
  const tensors = all.tensors;
  const lower = tensors.map((one) => one.fqn.toLowerCase());
  const isOdd = (one) => (one.change ? one.change.not_finite[0] + one.change.not_finite[1] : one.difference ? one.difference.num_nan : 0) > 0;
  const isMeasured = (one) => one.status === "=" || (one.change && one.change.largest !== null);
  const measures = {
    "relative error": [(one) => (one.change ? (one.change.relative === null ? 1 : one.change.relative) : 0), -8, 0],
    "1 - cosine": [(one) => (one.change && one.change.cosine !== null ? Math.max(0, 1 - one.change.cosine) : 0), -12, 0],
    "largest change": [(one) => (one.change ? Number(one.change.largest) : 0), -8, 1],
    "share of changed elements": [(one) => (one.change ? one.change.num_changed / Math.max(1, one.change.numel) : 0), -4, 0],
  };
  for (const name of Object.keys(measures)) $("by").append(make("option", "", name));
  const roles = [...new Set(tensors.map((one) => one.role))];
  const model = ["weight", "master", "buffer"];
  for (const name of ["the model", ...roles.filter((role) => !model.includes(role))]) $("role").append(make("option", "", name));
  if (!roles.some((role) => model.includes(role))) $("role").selectedIndex = 1;
  const isWanted = (one) => ($("role").value === "the model" ? model.includes(one.role) : one.role === $("role").value);

  // -- where each tensor stands: its layer, and its name in the layer, experts and the like together ----------------------
  function place(fqn) {
    const found = /^(.*?\.\d+)\.(.+)$/.exec(fqn);
    return found ? [found[1], found[2].replace(/(^|\.)\d+(?=\.|$)/g, "$1*")] : [OUTSIDE, fqn];
  }
  const natural = (a, b) => a.localeCompare(b, "en", { numeric: true });
  const value = (one) => measures[$("by").value][0](one);
  function shade(one) {
    if (isOdd(one)) return NAN;
    if (!isMeasured(one)) return MISSING;
    return ramp(value(one));
  }
  function ramp(x) {
    const [, low, high] = measures[$("by").value];
    if (!(x > 0)) return colour("--track");
    const at = Math.max(0, Math.min(1, (Math.log10(x) - low) / (high - low))) * (RAMP.length - 1);
    const n = Math.min(RAMP.length - 2, Math.floor(at)), part = at - n;
    return `rgb(${RAMP[n].map((c, i) => Math.round(c + (RAMP[n + 1][i] - c) * part)).join(",")})`;
  }
  const weight = (one) => (isOdd(one) ? Infinity : isMeasured(one) ? value(one) : 1e9);

  let rows = [], columns = [], boxes = new Map(), cells = [], chosen = null, matching = [];
  function arrange() {
    boxes = new Map();
    const layers = new Map(), names = new Map();
    for (const one of matching) {
      const [layer, name] = place(one.fqn), key = `${layer}\n${name}`;
      layers.set(layer, 1);
      if (layer !== OUTSIDE) names.set(name, 1);
      if (boxes.has(key)) boxes.get(key).push(one); else boxes.set(key, [one]);
    }
    rows = [...layers.keys()].filter((layer) => layer !== OUTSIDE).sort(natural);
    columns = [...names.keys()];
    for (const found of boxes.values()) found.sort((a, b) => weight(b) - weight(a));
  }
  function drawMap() {
    const outside = [...boxes.entries()].filter(([key]) => key.startsWith(`${OUTSIDE}\n`)).map(([, found]) => found);
    const left = 150, width = $("map").clientWidth, slant = columns.length ? 150 : 0;
    const across = Math.max(3, Math.min(90, (width - left - 110) / Math.max(1, columns.length)));
    const down = rows.length > 64 ? Math.max(6, Math.floor(900 / rows.length)) : 18;
    const perLine = Math.max(1, Math.floor((width - 10) / 220)), lines = Math.ceil(outside.length / perLine);
    const [pen] = paper($("map"), slant + rows.length * down + 12 + lines * 24 + 6);
    cells = [];
    pen.fillStyle = colour("--paper");
    pen.fillRect(0, 0, width, 5000);
    pen.textBaseline = "middle";
    pen.font = "11px ui-monospace,Menlo,Consolas,monospace";
    const ink = colour("--ink"), soft = colour("--soft");
    columns.forEach((name, x) => {
      if (across < 9 && x % Math.ceil(12 / across)) return;
      pen.save();
      pen.translate(left + (x + 0.5) * across, slant - 6);
      pen.rotate(-Math.PI / 3.4);
      pen.fillStyle = soft;
      pen.fillText(fitted(pen, name, 175), 0, 0);
      pen.restore();
    });
    rows.forEach((layer, y) => {
      const top = slant + y * down;
      if (down >= 11 || y % Math.ceil(12 / down) === 0) { pen.fillStyle = soft; pen.textAlign = "right"; pen.fillText(fitted(pen, layer, left - 10), left - 8, top + down / 2); pen.textAlign = "left"; }
      columns.forEach((name, x) => {
        const found = boxes.get(`${layer}\n${name}`);
        if (found) box(found, left + x * across, top, across, down);
      });
    });
    outside.forEach((found, n) => {
      const x = (n % perLine) * 220, y = slant + rows.length * down + 12 + Math.floor(n / perLine) * 24;
      box(found, x, y, 18, 18);
      pen.fillStyle = ink;
      pen.fillText(fitted(pen, found[0].fqn, 190), x + 24, y + 9);
    });
    function box(found, x, y, w, h) {
      const edge = w > 6 && h > 6 ? 1 : 0;
      pen.fillStyle = shade(found[0]);
      pen.fillRect(x, y, w - edge, h - edge);
      if (!isMeasured(found[0]) && w > 12) { pen.fillStyle = "#fff"; pen.textAlign = "center"; pen.fillText(found[0].kind === "shape" ? "S" : found[0].kind === "dtype" ? "T" : found[0].status, x + w / 2, y + h / 2); pen.textAlign = "left"; }
      if (found.includes(chosen)) { pen.strokeStyle = ink; pen.lineWidth = 2; pen.strokeRect(x, y, w - edge, h - edge); }
      cells.push([x, y, w, h, found]);
    }
  }
  const redrawMap = redrawn(drawMap);
  function cellAt(event) {
    const edge = $("map").getBoundingClientRect(), x = event.clientX - edge.left, y = event.clientY - edge.top;
    const found = cells.find(([left, top, w, h]) => left <= x && x < left + w && top <= y && y < top + h);
    return found && found[4];
  }
  const state = (one) => (one.kind === "shape" || one.kind === "dtype" ? `another ${one.kind}: ${one.a} in A, ${one.b} in B` : STATES[one.status]);
  function about(found) {
    const one = found[0];
    const words = [one.fqn + (found.length > 1 ? `\nthe furthest of ${found.length}` : ""), state(one)];
    if (one.change) words.push(`relative error ${number(one.change.relative)}, cosine ${one.change.cosine === null ? "?" : one.change.cosine.toFixed(6)}`, `largest change ${number(one.change.largest)} at [${one.change.index.join(", ")}]`);
    if (isOdd(one)) words.push("has NaN or infinite elements");
    return words.join("\n");
  }
  $("map").addEventListener("mousemove", (event) => { const found = cellAt(event); tip(event, found && about(found)); });
  $("map").addEventListener("mouseleave", (event) => tip(event, ""));
  $("map").addEventListener("click", (event) => { const found = cellAt(event); if (found) choose(found[0]); });

  // -- the list ---------------------------------------------------------------------------------------------------------
  let order = ["relative", -1];
  const keys = { name: (one) => one.fqn, state: state, relative: weight, cosine: (one) => (one.change && one.change.cosine !== null ? one.change.cosine : 1),
    largest: (one) => (one.change ? Number(one.change.largest) : 0), changed: (one) => (one.change ? one.change.num_changed / one.change.numel : 0) };
  const list = new List($("list"), [["name", "name"], ["state", "state"], ["changed", "changed", true], ["relative", "relative", true], ["cosine", "cosine", true], ["largest", "largest", true]], {
    widths: "minmax(0,3fr) minmax(0,1fr) 70px 90px 90px 90px",
    fill(one, cells) {
      const c = one.change, share = c ? `${((100 * c.num_changed) / Math.max(1, c.numel)).toPrecision(3)} %` : "";
      const texts = [one.fqn, state(one), share, c ? number(c.relative) : "", c && c.cosine !== null ? c.cosine.toFixed(6) : "", c ? number(c.largest) : ""];
      texts.forEach((text, at) => { cells[at].textContent = text; });
      cells[0].className = `mono${isOdd(one) || one.status === "!" ? " bad" : one.status === "=" ? "" : " odd"}`;
      cells[0].title = one.fqn;
    },
    chosen: (one) => choose(one),
    sorted(key) { order = [key, order[0] === key ? -order[1] : key === "name" || key === "state" || key === "cosine" ? 1 : -1]; list.show(sortedItems()); },
  });
  function sortedItems() {
    const key = keys[order[0]], values = new Map(matching.map((one) => [one, key(one)]));
    return [...matching].sort((a, b) => { const [x, y] = [values.get(a), values.get(b)]; return (x < y ? -1 : x > y ? 1 : 0) * order[1]; });
  }
  function choose(one) {
    chosen = one;
    list.pick(one);
    redrawMap();
    card();
  }
  function card() {
    if (!chosen) { $("card").replaceChildren(make("span", "soft", "Choose a tensor, in the map or in the list.")); return; }
    const facts = make("dl"), { change, difference } = chosen;
    const pairs = [["role", chosen.role], ["state", state(chosen)], ["in B", chosen.b_fqn], ["rounded to", chosen.cast], ["error", chosen.error]];
    if (change) pairs.push(["elements", change.numel.toLocaleString("en")], ["changed", change.num_changed.toLocaleString("en")], ["relative error", number(change.relative)],
      ["cosine", change.cosine], ["largest change", number(change.largest)], ["at", `[${change.index.join(", ")}]`], ["NaN or infinite", `${change.not_finite[0]} in A, ${change.not_finite[1]} in B`]);
    if (difference) for (const [side, x] of [["A", difference.a], ["B", difference.b]]) pairs.push([`first, ${side}`, `[${difference.index.join(", ")}] is ${x.value} (0x${x.bits}), at byte ${x.offset} of ${x.file}${x.rank === null ? "" : `, rank ${x.rank}`}`]);
    for (const [name, text] of pairs) if (text !== undefined && text !== null) facts.append(make("dt", "", name), make("dd", "", String(text)));
    $("card").replaceChildren(make("h3", "", chosen.fqn), facts);
  }
  function search() {
    const fits = $("search").value.split(/\s+/).filter(Boolean).map(matcher), onlyOdd = $("odd").getAttribute("aria-pressed") === "true";
    matching = tensors.filter((one, i) => isWanted(one) && (!onlyOdd || one.status !== "=") && fits.every((fit) => fit(lower[i])));
    const differing = matching.filter((one) => one.status !== "=").length;
    $("count").textContent = `${counted(matching.length, "tensor")}, ${differing.toLocaleString("en")} not equal`;
    arrange();
    list.show(sortedItems());
    redrawMap();
  }
  function legend() {
    const [, low, high] = measures[$("by").value], steps = [];
    for (let at = low; at <= high; at += Math.max(1, Math.round((high - low) / 5))) steps.push([`1e${at}`, ramp(10 ** at)]);
    const entries = [["no change", colour("--track")], ...steps, ["NaN or infinite", NAN], ["other shape (S), dtype (T), or on one side (- +)", MISSING]];
    $("legend").replaceChildren(...entries.map(([name, of]) => { const one = make("span", "", name); one.style.setProperty("--of", of); return one; }));
  }
  let wait = 0;
  $("search").addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(search, 80); });
  $("odd").addEventListener("click", () => { $("odd").setAttribute("aria-pressed", String($("odd").getAttribute("aria-pressed") !== "true")); search(); });
  $("by").addEventListener("change", () => { legend(); search(); });
  $("role").addEventListener("change", search);
  addEventListener("keydown", (event) => { if (event.key === "/" && document.activeElement !== $("search")) { event.preventDefault(); $("search").focus(); } });

  document.title = all.title;
  $("sides").textContent = `A: ${all.a.path} (${all.a.format})   B: ${all.b.path} (${all.b.format})`;
  for (const [sign, words, style] of [["=", "equal", "good"], ["*", "different", "odd"], ["-", "only in A", "odd"], ["+", "only in B", "odd"], ["!", "not readable", "bad"]]) {
    if (all.counts[sign]) $("badges").append(make("span", `badge ${style}`, `${all.counts[sign].toLocaleString("en")} ${words}`));
  }
  const numOdd = tensors.filter(isOdd).length;
  if (numOdd) $("badges").append(make("span", "badge bad", `${counted(numOdd, "tensor")} with NaN or infinity`));
  for (const one of all.not_compared) $("notes").append(make("div", "soft", `not compared: ${one.role} of ${counted(one.count, "tensor")} of ${one.side}: ${one.why}`));
  for (const note of all.notes) $("notes").append(make("div", "soft", note));
  $("made").textContent = "layers" in all ? "Made by ckpt diff --html." : "Made by ckpt verify --html: every bit was compared, and what differs was measured.";
  legend();
  search();
  card();
  drawMap();
  ready(0);
}
start();
