"use strict";
// What both pages share.  Texts of the checkpoint come in as JSON and become text nodes or canvas text, never markup.
const $ = (id) => document.getElementById(id);

function make(tag, className, text) {
  const one = document.createElement(tag);
  if (className) one.className = className;
  if (text !== undefined) one.textContent = text;
  return one;
}

async function content() {
  const packed = Uint8Array.from(atob($("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

const UNITS = ["B", "kB", "MB", "GB", "TB"];
function size(count) {
  let unit = 0;
  for (; unit < 4 && Math.round(count * 10) >= 10000; unit++) count /= 1000;
  return unit ? `${count.toFixed(count < 10 ? 2 : 1)} ${UNITS[unit]}` : `${count} B`;
}
const grouped = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, ",");
const counted = (n, what) => `${grouped(n)} ${what}${n === 1 ? "" : "s"}`;
// A number of the JSON, which has infinity as a text.
const numeric = (x) => (x === "inf" ? Infinity : Number(x ?? 0));
const number = (x) => (x === null || x === undefined ? "?" : x === 0 ? "0" : x === "inf" ? x : Number(x).toPrecision(3));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function tip(event, text) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const right = event.clientX + 16 + box.offsetWidth > innerWidth;
  const below = event.clientY + 18 + box.offsetHeight > innerHeight;
  box.style.left = `${Math.max(4, right ? event.clientX - box.offsetWidth - 12 : event.clientX + 16)}px`;
  box.style.top = `${Math.max(4, below ? event.clientY - box.offsetHeight - 12 : event.clientY + 18)}px`;
}

// A canvas of its element's width and of `height`, in device pixels; drawing is in those of CSS.
function paper(canvas, height) {
  const ratio = devicePixelRatio || 1,
    width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return [pen, width, height];
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let low = 0,
    high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pen.measureText(text.slice(0, middle) + "…").width <= width) low = middle;
    else high = middle - 1;
  }
  return low ? text.slice(0, low) + "…" : "";
}

// Draw anew, at most once a frame, whenever the width or the colours change.
function redrawn(draw) {
  let asked = 0;
  const ask = () => {
    if (!asked)
      asked = requestAnimationFrame(() => {
        asked = 0;
        draw();
      });
  };
  addEventListener("resize", ask);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ask);
  return ask;
}

// A list of any length: only the rows that can be seen are elements.
class List {
  constructor(box, heads, numbers, { widths, texts, style, chosen, sorted }) {
    Object.assign(this, { texts, style, chosen, widths, items: [], pool: [], picked: null });
    this.kinds = heads.map((name) => (numbers.includes(name) ? "num" : ""));
    const head = make("div", "head");
    head.style.gridTemplateColumns = widths;
    heads.forEach((name, at) => {
      const button = make("button", this.kinds[at], name);
      button.addEventListener("click", () => sorted(name));
      head.append(button);
    });
    this.view = make("div", "rows");
    this.view.tabIndex = 0;
    this.inner = make("div");
    this.view.append(this.inner);
    box.replaceChildren(head, this.view);
    this.view.addEventListener("scroll", () => this.draw());
    this.view.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step || !this.items.length) return;
      event.preventDefault();
      this.chosen(this.items[Math.max(0, Math.min(this.items.length - 1, this.items.indexOf(this.picked) + step))]);
    });
  }
  show(items) {
    this.items = items;
    this.inner.style.height = `${items.length * 26}px`;
    this.view.style.height = `${Math.min(480, Math.max(4, items.length) * 26)}px`;
    this.view.scrollTop = 0;
    this.draw();
  }
  pick(item) {
    this.picked = item;
    const at = this.items.indexOf(item) * 26,
      top = this.view.scrollTop,
      height = this.view.clientHeight;
    if (at >= 0 && (at < top || at + 26 > top + height)) this.view.scrollTop = at - height / 2;
    this.draw();
  }
  draw() {
    const first = Math.floor(this.view.scrollTop / 26);
    const count = Math.min(this.items.length - first, Math.ceil(this.view.clientHeight / 26) + 1);
    while (this.pool.length < count) {
      const row = make("div", "row");
      row.style.gridTemplateColumns = this.widths;
      row.append(...this.kinds.map((kind) => make("span", kind)));
      row.addEventListener("click", () => this.chosen(row.item));
      this.pool.push(row);
      this.inner.append(row);
    }
    this.pool.forEach((row, i) => {
      row.hidden = i >= count;
      if (row.hidden) return;
      row.item = this.items[first + i];
      row.style.top = `${(first + i) * 26}px`;
      row.classList.toggle("on", row.item === this.picked);
      const texts = this.texts(row.item);
      texts.forEach((text, at) => (row.children[at].textContent = text));
      row.children[0].className = `mono ${this.style(row.item)}`;
      row.children[0].title = texts[0];
    });
  }
}

function sortedBy(items, key, sign) {
  const values = new Map(items.map((one) => [one, key(one)]));
  return [...items].sort((a, b) => {
    const [x, y] = [values.get(a), values.get(b)];
    return (x < y ? -1 : x > y ? 1 : 0) * sign;
  });
}

// -- parts of pages ------------------------------------------------------------------------------------------------------
function facts(pairs) {
  const found = make("dl");
  for (const [name, text] of pairs) found.append(make("dt", "", name), make("dd", "", String(text)));
  return found;
}

function legend(box, entries) {
  const made = entries.map(([name, shade]) => {
    const one = make("span", "", name);
    one.style.setProperty("--of", shade);
    return one;
  });
  box.replaceChildren(...made);
}

const isPressed = (button) => button.getAttribute("aria-pressed") === "true";
function toggled(button, changed) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(!isPressed(button)));
    changed();
  });
}

// A button for each value; the values whose buttons are not pressed.
function chips(box, values, changed) {
  const off = new Set();
  for (const value of values) {
    const one = make("button", "chip", value);
    one.setAttribute("aria-pressed", "true");
    toggled(one, () => {
      if (isPressed(one)) off.delete(value);
      else off.add(value);
      changed();
    });
    box.append(one);
  }
  return off;
}

// Search while somebody types; `/` begins.
function searched(search) {
  let wait = 0;
  $("search").addEventListener("input", () => {
    clearTimeout(wait);
    wait = setTimeout(search, 80);
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || document.activeElement === $("search")) return;
    event.preventDefault();
    $("search").focus();
  });
}

// `*` and `?` as in a shell, `/…/` as an expression, and otherwise words that all have to be there.
function matcher(text) {
  if (/^\/.+\/$/.test(text)) {
    try {
      const found = new RegExp(text.slice(1, -1), "i");
      return (name) => found.test(name);
    } catch {
      return () => false;
    }
  }
  if (/[*?]/.test(text)) {
    const parts = text
      .replace(/[.+^${}()|[\]\\]/g, "\\$&")
      .replace(/\*/g, ".*")
      .replace(/\?/g, ".");
    const found = new RegExp(`^${parts}$`, "i");
    return (name) => found.test(name);
  }
  const low = text.toLowerCase();
  return (name) => name.includes(low);
}

// Milliseconds since the page was asked for.
function ready() {
  document.documentElement.dataset.ready = Math.round(performance.now());
}
