// A tree map of what forward leaves for backward: modules within modules, and at the bottom the tensors themselves.
// Tiles are as square as they can be (Bruls, Huizing and van Wijk, "Squarified Treemaps", 2000).

const HEADING = 19; // height of the line in which an open tile has its name
const SMALLEST = { width: 54, height: 46 }; // what a tile must have to be opened
const LEAST = 2; // pixels: what is smaller cannot be seen
const TINTS = 7;
const MOST_TENSORS = 80; // of one module

/** Modules as a tree, with the tensors that each leaves as leaves. */
function growTree(modules, saved) {
  const byPath = new Map();
  const open = [];
  modules.forEach((row) => {
    const node = { ...row, bytes: row.saved_bytes, parts: [], above: open[row.depth - 1] ?? null };
    open[row.depth] = node;
    byPath.set(row.path, node);
    node.above?.parts.push(node);
  });
  saved.forEach((row) => {
    const node = byPath.get(row.module);
    node.tensors ??= [];
    node.tensors.push({ ...row, above: node, parts: [], isTensor: true });
  });
  byPath.forEach((node) => {
    const tensors = node.tensors ?? [];
    const rest = tensors.splice(MOST_TENSORS);
    if (rest.length) {
      const bytes = rest.reduce((sum, row) => sum + row.bytes, 0);
      const tensor = formatNoun(rest.length, "smaller tensor");
      tensors.push({ bytes, tensor, op: "", source: "", above: node, parts: [], isTensor: true });
    }
    node.parts = [...node.parts, ...tensors].filter((part) => part.bytes > 0);
    node.parts.sort((one, other) => other.bytes - one.bytes);
  });
  return byPath.get("");
}

/** Rectangles for parts, largest first, that fill a box. Returns [part, box] pairs. */
function squarify(parts, box) {
  const placed = [];
  let { x, y, width, height } = box;
  let left = parts.reduce((sum, part) => sum + part.bytes, 0);
  let at = 0;
  while (at < parts.length && left > 0 && width > 0 && height > 0) {
    const side = Math.min(width, height);
    const perByte = (width * height) / left;
    let end = at;
    let sum = 0;
    let worst = Infinity;
    while (end < parts.length) {
      const next = sum + parts[end].bytes;
      const depth = (next * perByte) / side;
      // The first of a row is its largest and the last its smallest, so no other can be further from square.
      const ratios = [parts[at], parts[end]].map((part) => (part.bytes * perByte) / depth ** 2);
      const ratio = Math.max(...ratios.map((one) => Math.max(one, 1 / one)));
      if (ratio > worst) break;
      [sum, worst, end] = [next, ratio, end + 1];
    }
    const depth = (sum * perByte) / side;
    const isWide = width >= height;
    let along = isWide ? y : x;
    for (const part of parts.slice(at, end)) {
      const length = (part.bytes * perByte) / depth;
      const column = { x, y: along, width: depth, height: length };
      placed.push([part, isWide ? column : { x: along, y, width: length, height: depth }]);
      along += length;
    }
    if (isWide) [x, width] = [x + depth, width - depth];
    else [y, height] = [y + depth, height - depth];
    left -= sum;
    at = end;
  }
  return placed;
}

class TreeMap {
  /** onlist(path): asked to list the tensors of a module. */
  constructor(root, modules, saved, onlist) {
    this.top = growTree(modules, saved);
    this.tints = this.chooseTints(modules);
    this.crumbs = make("ol", { class: "crumbs" });
    const list = make("button", { type: "button", class: "quiet" }, "List its tensors");
    list.addEventListener("click", () => onlist(this.node.path));
    this.tiles = make("div", { class: "tiles", role: "group", "aria-label": "Modules, by memory saved for backward" });
    this.info = make("p", { class: "tile-info", role: "status" });
    const bar = make("div", { class: "tools" }, make("nav", { "aria-label": "Module" }, this.crumbs), list);
    root.append(bar, this.tiles, this.info, this.makeKey());
    this.node = this.top;
    this.go(this.top);
    onWidth(this.tiles, () => this.draw());
  }

  // Classes of modules that keep most get a tint each; all else is neutral.
  chooseTints(modules) {
    const bytes = new Map();
    modules.forEach(({ kind, own_saved_bytes: own }) => own && bytes.set(kind, (bytes.get(kind) ?? 0) + own));
    const kinds = [...bytes.keys()].sort((one, other) => bytes.get(other) - bytes.get(one));
    return new Map(kinds.slice(0, TINTS).map((kind, at) => [kind, at]));
  }

  makeKey() {
    const entries = [...this.tints].map(([kind, tint]) =>
      make("li", {}, make("span", { class: `swatch t${tint}` }), kind ? makeName(kind) : "class unknown"),
    );
    return make("ul", { class: "key", "aria-label": "Classes of modules" }, ...entries);
  }

  go(node) {
    const hadFocus = this.tiles.contains(document.activeElement) || this.crumbs.contains(document.activeElement);
    this.node = node;
    const path = [];
    for (let above = node; above; above = above.above) path.unshift(above);
    this.crumbs.replaceChildren(
      ...path.map((part) => {
        const text = part === this.top ? part.kind || "the whole step" : lastName(part);
        const name = makeName(text);
        if (part === node) return make("li", {}, make("span", { "aria-current": "location", tabindex: "-1" }, name));
        return make("li", {}, make("button", { type: "button", class: "link", onclick: () => this.go(part) }, name));
      }),
    );
    this.say(node);
    this.draw();
    // What was pressed is gone; without this, keys would start again at the top of the page.
    if (hadFocus) this.crumbs.querySelector("[aria-current]").focus({ preventScroll: true });
  }

  say(node) {
    const whole = this.top.bytes;
    const share = `${formatBytes(node.bytes)}, ${formatShare(node.bytes, whole)} of all that is saved`;
    if (node.isTensor) {
      const made = [node.op, node.source].filter(Boolean).join(", ");
      const owner = makePath(node.above.path || node.above.kind || "the step itself");
      const faint = make("span", { class: "faint" }, makePath(made || "\u00a0"));
      this.info.replaceChildren(makeName(node.tensor), " in ", owner, `: ${share}`, make("br"), faint);
      return;
    }
    const kind = node.kind ? [" (", makeName(node.kind), ")"] : [];
    const timed = (label, seconds) => (seconds ? `${label} ${formatSeconds(seconds)}` : "");
    const facts = [
      node.parameter_bytes ? `parameters ${formatBytes(node.parameter_bytes)}` : "",
      timed("forward", node.forward_s),
      timed("backward", node.backward_s),
      timed("recomputation", node.recompute_s),
      node.tensors?.length ? `${formatNoun(node.tensors.length, "tensor")} of its own` : "",
    ];
    this.info.replaceChildren(
      makePath(node.path || node.kind || "the whole step"),
      ...(node.path ? kind : []),
      `: ${share}`,
      make("br"),
      make("span", { class: "faint" }, facts.filter(Boolean).join(", ") || "\u00a0"),
    );
  }

  draw() {
    const width = this.tiles.clientWidth;
    const height = width < 520 ? 420 : 460;
    if (!width) return;
    this.size = { width, height };
    this.tiles.style.setProperty("aspect-ratio", `${width} / ${height}`);
    const found = [];
    this.lay(this.node.parts, { x: 0, y: 0, width, height }, 0, found);
    this.tiles.replaceChildren(...found);
    if (!found.length) {
      const who = this.node === this.top ? "Forward" : "It";
      this.tiles.append(make("p", { class: "nothing" }, `${who} leaves nothing for backward in this step.`));
    }
  }

  lay(parts, box, depth, found) {
    for (const [part, place] of squarify(parts, box)) {
      if (place.width < LEAST || place.height < LEAST) continue;
      const [node, name] = unfold(part);
      const isOpen = node.parts.length > 1 && place.width >= SMALLEST.width && place.height >= SMALLEST.height;
      found.push(this.makeTile({ node, name, place, depth, isOpen }));
      if (isOpen) {
        const [x, y] = [place.x + 3, place.y + HEADING];
        const inner = { x, y, width: place.width - 6, height: place.height - HEADING - 3 };
        this.lay(node.parts, inner, depth + 1, found);
      }
    }
  }

  // In hundredths of the map, so that it still fits where it is scaled, as on paper.
  makeTile({ node, name, place, depth, isOpen }) {
    const { width, height } = this.size;
    const module = node.isTensor ? node.above : node;
    const isLeaf = !node.parts.some((part) => !part.isTensor);
    const tint = isLeaf && !isOpen ? this.tints.get(module.kind) : undefined;
    const where = node.isTensor ? `${node.tensor} in ${module.path || module.kind}` : node.path;
    const style = {
      left: `${(100 * place.x) / width}%`,
      top: `${(100 * place.y) / height}%`,
      width: `${(100 * place.width) / width}%`,
      height: `${(100 * place.height) / height}%`,
    };
    const hasRoom = place.width > 30 && place.height > 14;
    const classes = [
      "tile",
      isOpen ? "open" : "",
      hasRoom ? "" : "bare",
      node.isTensor ? "tensor" : "",
      tint === undefined ? "" : `t${tint}`,
    ];
    const attributes = {
      type: "button",
      class: classes.filter(Boolean).join(" "),
      style,
      title: `${where}: ${formatBytes(node.bytes)}`,
      "aria-label": `${where}, ${formatBytes(node.bytes)}`,
      tabindex: depth ? "-1" : "0",
      onmouseenter: () => this.say(node),
      onmouseleave: () => this.say(this.node),
      onfocus: () => this.say(node),
      onclick: () => module !== this.node && this.go(module),
    };
    const hasMoreRoom = isOpen ? place.width > 150 : place.width > 78 && place.height > 32;
    const size = hasMoreRoom ? make("span", { class: "size" }, formatBytes(node.bytes)) : null;
    return make("button", attributes, hasRoom ? makeName(name, "label") : null, size);
  }
}

/** A module that holds just one other is shown with it, as one tile: `model.layers`. */
function unfold(part) {
  let node = part;
  while (node.parts.length === 1 && !node.parts[0].isTensor) [node] = node.parts;
  if (node.isTensor) return [node, shortenOp(node.op) || node.tensor];
  const from = part.above.path;
  return [node, from ? node.path.slice(from.length + 1) : node.path];
}

function lastName(node) {
  const from = node.above.path;
  return from ? node.path.slice(from.length + 1) : node.path;
}
