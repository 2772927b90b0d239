// What a checkpoint's page knows of its tensors: columns of numbers, and tables of what these stand for.
const SEVERAL = "#8a93a3";
const WHEEL = "#0072b2 #e69f00 #009e73 #cc79a7 #56b4e9 #b8a800 #8e3fa0 #7c9217 #16a4b5 #604730".split(" ");
const wheel = (n) => WHEEL[n % WHEEL.length];
const SHORT = { bf16: "bfloat16", fp16: "float16", fp32: "float32", fp64: "float64" };

class Tensors {
  constructor(all) {
    Object.assign(this, all);
    [this.nameOf, this.roleOf, this.dtypeOf, this.shapeOf, this.lookOf] = all.tensors.map((one) =>
      Int32Array.from(one),
    );
    this.total = this.nameOf.length;
    this.elements = all.shapes.map((shape) => shape.reduce((a, b) => a * b, 1));
    this.bytes = Float64Array.from({ length: this.total }, (_, i) => this.numel(i) * all.dtypes[this.dtypeOf[i]][1]);
    this.lower = all.names.map((name) => name.toLowerCase());
    this.isRank = all.holders.map(([name]) => typeof name === "number");
    this.numHolders = all.looks.map(([, runs]) => {
      let count = 0;
      for (let at = 0; at < runs.length; at += 2) count += runs[at + 1] - runs[at] + 1;
      return count;
    });
    // Names that differ in numbers only have one pattern.
    const patterns = new Map();
    this.patternOf = Int32Array.from(all.names, (name) => {
      const pattern = name.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
      if (!patterns.has(pattern)) patterns.set(pattern, patterns.size);
      return patterns.get(pattern);
    });
    this.patterns = [...patterns.keys()];
    this.reasons = this.unusual();
    this.isBad = Uint8Array.from(this.lookOf, (look) => all.looks[look][4].length > 0);
    this.isOdd = new Uint8Array(this.total);
    for (const i of this.reasons.keys()) this.isOdd[i] = 1;
  }
  name(i) {
    return this.names[this.nameOf[i]];
  }
  role(i) {
    return this.roles[this.roleOf[i]];
  }
  dtype(i) {
    return this.dtypes[this.dtypeOf[i]][0];
  }
  shape(i) {
    return `[${this.shapes[this.shapeOf[i]].join(", ")}]`;
  }
  numel(i) {
    return this.elements[this.shapeOf[i]];
  }
  // How it is cut: [copies, holders, what runs to the right, what runs downwards, faults, remarks, slices].
  look(i) {
    return this.looks[this.lookOf[i]];
  }
  copies(i) {
    return this.look(i)[0];
  }
  faults(i) {
    return this.look(i)[4];
  }
  ranks(i) {
    return this.numHolders[this.lookOf[i]];
  }

  // -- ranks and files; `runs` are the first and the last number of each run of neighbours ------------------------------
  holder(n) {
    return this.isRank[n] ? `rank ${this.holders[n][0]}` : String(this.holders[n][0]);
  }
  heldBy(runs, most = 6) {
    const texts = [];
    for (let at = 0; at < runs.length; at += 2) {
      const [first, last] = [runs[at], runs[at + 1]];
      const [one, other] = [this.holders[first][0], this.holders[last][0]];
      if (this.isRank[first]) texts.push(first === last ? one : `${one}-${other}`);
      else for (let n = first; n <= last && texts.length <= most; n++) texts.push(this.holders[n][0]);
    }
    return texts.length > most ? `${texts.slice(0, most).join(", ")} … (${texts.length})` : texts.join(", ");
  }
  isHeldBy(i, n) {
    const runs = this.look(i)[1];
    for (let at = 0; at < runs.length; at += 2) if (runs[at] <= n && n <= runs[at + 1]) return true;
    return false;
  }
  where(i) {
    const ranks = this.isRank[this.look(i)[1][0]] ? (this.ranks(i) === 1 ? "rank " : "ranks ") : "";
    return (this.copies(i) > 1 ? `${this.copies(i)} copies: ` : "") + ranks + this.heldBy(this.look(i)[1]);
  }
  about(i) {
    const facts = [this.role(i), `${this.dtype(i)} ${this.shape(i)}`, size(this.bytes[i]), this.where(i)];
    return [this.name(i), facts.join(" · "), ...(this.reasons.get(i) || [])].join("\n");
  }

  // What is wrong, what has no elements, and what is not as three quarters of the tensors are whose names differ in
  // numbers only: the reasons by tensor.
  unusual() {
    const found = new Map(),
      families = new Map();
    const say = (i, text) => found.set(i, [...(found.get(i) || []), text]);
    for (let i = 0; i < this.total; i++) {
      if (this.faults(i).length) say(i, "damaged");
      if (!this.bytes[i]) say(i, "no elements");
      const key = this.patternOf[this.nameOf[i]] * this.roles.length + this.roleOf[i];
      if (families.has(key)) families.get(key).push(i);
      else families.set(key, [i]);
    }
    const traits = { shape: (i) => this.shapeOf[i], dtype: (i) => this.dtypeOf[i] };
    traits["number of copies"] = (i) => this.copies(i);
    traits["number of ranks"] = (i) => this.ranks(i);
    for (const family of families.values()) {
      if (family.length < 4) continue;
      for (const [what, of] of Object.entries(traits)) {
        const counts = new Map();
        for (const i of family) counts.set(of(i), (counts.get(of(i)) || 0) + 1);
        const most = Math.max(...counts.values());
        if (counts.size === 1 || most < family.length * 0.75) continue;
        const text = `another ${what} than ${most} of its ${family.length} siblings`;
        for (const i of family) if (counts.get(of(i)) < most) say(i, text);
      }
    }
    return found;
  }

  // -- colours: of each scheme that of a tensor, and the entries of a legend ---------------------------------------------
  schemes() {
    const parts = this.parts.map(([name, text, shade]) => [name, text && new RegExp(text), shade]);
    const norms = parts.find(([name]) => name === "norms");
    const partOf = this.patterns.map((name) => {
      if (norms[1].test(name.split(".").slice(-2).join("."))) return norms;
      return parts.find(([, found]) => !found || found.test(name));
    });
    const numbered = (names) => names.map((name, n) => [name, wheel(n)]);
    const holders = this.holders.slice(0, WHEEL.length).map((_, n) => this.holder(n));
    return {
      "part of the model": [
        (i) => partOf[this.patternOf[this.nameOf[i]]][2],
        parts.map(([name, , shade]) => [name, shade]),
      ],
      dtype: [(i) => wheel(this.dtypeOf[i]), numbered(this.dtypes.map(([name]) => name))],
      role: [(i) => wheel(this.roleOf[i]), numbered(this.roles)],
      "rank or file": [
        (i) => (this.ranks(i) === 1 ? wheel(this.look(i)[1][0]) : SEVERAL),
        [["several", SEVERAL], ...numbered(holders)],
      ],
      copies: [(i) => wheel(this.copies(i) > 1 ? 1 : 0), numbered(["one copy", "several copies"])],
    };
  }

  // -- the search: words, patterns, and rank:3 role:exp_avg dtype:bf16 file:0 ---------------------------------------------
  // The tests of a tensor, and the number of the rank or file that is asked for, -1 where none is.
  search(text) {
    const names = [],
      tests = [];
    let asked = -1;
    for (const word of text.split(/\s+/).filter(Boolean)) {
      const [, kind, value] = /^(rank|file|role|dtype):(.+)$/.exec(word) || [];
      if (kind === "rank" || kind === "file") {
        const n = kind === "file" ? Number(value) : this.holders.findIndex(([name]) => String(name) === value);
        asked = n;
        tests.push((i) => n >= 0 && this.isHeldBy(i, n));
      } else if (kind === "role") {
        const fits = matcher(value);
        tests.push((i) => fits(this.role(i).toLowerCase()));
      } else if (kind === "dtype") tests.push((i) => this.dtype(i).includes(SHORT[value] || value));
      else names.push(matcher(word));
    }
    if (names.length) {
      const named = this.lower.map((name) => names.every((fits) => fits(name)));
      tests.unshift((i) => named[this.nameOf[i]]);
    }
    return [tests, asked];
  }
}
