// Memory over the step: one chart, or two with the same scales, the strip below them, and what is alive at the call
// that is pointed at. Without one that is the call that was chosen, and without that the peak.

const ALIVE_ROWS = 10;
const FEWEST_CALLS = 8; // as far as zooming in goes

class Timeline {
  /** tracks: [{step, label}], the one that the report is of last. */
  constructor(root, tracks) {
    this.tracks = tracks;
    this.main = tracks.at(-1);
    this.axis = "calls";
    this.chosen = null;
    this.hidden = new Set();
    const { categories } = this.main.step;
    this.present = categories.map((_, kind) => tracks.some(({ step }) => this.isPresent(step, kind)));
    tracks.forEach((track) => {
      track.chart = new Chart(track.step, track.label, this.listenersOf(track));
      if (track.step.transfers.start.length) track.links = new Links(track.step);
    });
    this.overview = new Overview(tracks.map(({ step }) => step), (range) => this.zoom(range));
    this.charts = make("div", { class: "charts" });
    this.point = oncePerFrame((at) => this.show(at));
    this.build(root);
    this.range = [0, this.end];
    this.show(this.rest());
    onWidth(this.charts, () => this.draw());
  }

  isPresent(step, kind) {
    return step.byCategory[kind].some((bytes) => bytes > 0) || step.held_by_category[kind] > 0;
  }

  build(root) {
    this.where = make("div", { class: "where" });
    this.legend = make("ul", { class: "legend", "aria-label": "By category; click one to hide it" });
    this.alive = make("tbody");
    this.aliveTitle = make("h3");
    const panel = make("aside", { class: "panel", "aria-label": "At this call" }, this.where, this.legend);
    this.tracks.forEach(({ label, chart }) => {
      this.charts.append(...(label ? [make("h3", { class: "track" }, label)] : []), chart.element);
    });
    const hint = "Drag to zoom. Click to pin a call, Escape to unpin it. Arrow keys move, P goes to the peak.";
    const links = this.tracks.flatMap(({ links: own }) => (own ? [own.element] : []));
    this.charts.append(...links, this.overview.element, make("p", { class: "hint" }, hint));
    const head = ["Size", "Tensor", "Made in", "By", "Line"].map((text) => make("th", { scope: "col" }, text));
    const caption = make("caption", { class: "unseen" }, "Tensors in memory at this call");
    const table = make("table", { class: "alive" }, caption, make("thead", {}, make("tr", {}, ...head)), this.alive);
    root.append(
      this.makeTools(),
      make("div", { class: "timeline" }, this.charts, panel),
      this.aliveTitle,
      make("div", { class: "table" }, table),
    );
  }

  makeTools() {
    const button = (label, onclick) => make("button", { type: "button", onclick }, label);
    this.tools = {
      in: button("Zoom in", () => this.scale(0.5)),
      out: button("Zoom out", () => this.scale(2)),
      whole: button("Whole step", () => this.zoom(null)),
      peak: button("To the peak", () => this.choose(this.main, this.main.step.peak.call)),
    };
    const parts = [make("div", { class: "group", role: "group", "aria-label": "Zoom" }, ...Object.values(this.tools))];
    if (this.tracks.every(({ step }) => step.hasTimes)) {
      this.axes = ["calls", "time"].map((axis) => {
        const text = axis === "calls" ? "By call" : "By time";
        return make("button", { type: "button", "data-axis": axis, onclick: () => this.turn(axis) }, text);
      });
      parts.push(make("div", { class: "group", role: "group", "aria-label": "Horizontal axis" }, ...this.axes));
    }
    return make("div", { class: "tools" }, ...parts);
  }

  listenersOf(track) {
    return {
      onpoint: (call) => this.point({ track, call, isPointed: true }),
      onleave: () => this.point(this.rest()),
      onchoose: (call) => this.choose(track, call),
      onzoom: (range) => this.zoom(range),
      onkey: (event, call) => this.key(event, track, call),
    };
  }

  /** What is shown while nothing is pointed at. */
  rest() {
    return this.chosen ?? { track: this.main, call: this.main.step.peak.call, isPointed: false };
  }

  choose(track, call) {
    if (call < 0) return;
    this.chosen = { track, call, isPointed: true };
    track.chart.call = call; // at once: the next key may come before the next frame
    this.reveal(track, call);
    this.point(this.chosen);
  }

  key(event, track, call) {
    const last = track.step.count - 1;
    const page = Math.max(1, Math.round(this.callsShown(track) / 20));
    const moves = {
      ArrowLeft: call - 1,
      ArrowDown: call - 1,
      ArrowRight: call + 1,
      ArrowUp: call + 1,
      PageDown: call - page,
      PageUp: call + page,
      Home: 0,
      End: last,
      p: track.step.peak.call,
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    if (event.key === "Escape") {
      this.chosen = null;
      this.zoom(null);
      this.point(this.rest());
    } else if (event.key === "+" || event.key === "=") this.scale(0.5);
    else if (event.key === "-") this.scale(2);
    else if (event.key in moves) this.choose(track, Math.min(Math.max(moves[event.key], 0), last));
    else return false;
    return true;
  }

  callsShown(track) {
    const positions = track.step.positions[this.axis];
    return findCall(positions, this.range[1]) - findCall(positions, this.range[0]) + 1;
  }

  get end() {
    return Math.max(...this.tracks.map(({ step }) => step.positions[this.axis].at(-1)), 0);
  }

  /** Shows a range of the axis; null for all of it. */
  zoom(range) {
    const { end } = this;
    let [from, to] = range ?? [0, end];
    const least = Math.min(end, (end * FEWEST_CALLS) / Math.max(1, this.main.step.count));
    if (to - from < least) {
      const middle = Math.min(Math.max((from + to) / 2, least / 2), end - least / 2);
      [from, to] = [middle - least / 2, middle + least / 2];
    }
    this.range = [Math.max(0, from), Math.min(end, to)];
    this.draw();
  }

  scale(factor) {
    const { track, call } = this.shown;
    const [from, to] = this.range;
    const at = call < 0 ? (from + to) / 2 : track.step.positions[this.axis][call];
    const middle = at >= from && at <= to ? at : (from + to) / 2;
    this.zoom([middle - (middle - from) * factor, middle + (to - middle) * factor]);
  }

  /** Moves the range so that a call is in it. */
  reveal(track, call) {
    const place = track.step.positions[this.axis][call];
    const [from, to] = this.range;
    if (place >= from && place <= to) return;
    const start = Math.min(Math.max(place - (to - from) / 2, 0), this.end - (to - from));
    this.zoom([start, start + to - from]);
  }

  /** Changes the axis; the calls that are in view stay there. */
  turn(axis) {
    const { positions } = this.main.step;
    const isWhole = this.range[0] <= 0 && this.range[1] >= this.end;
    const calls = this.range.map((place) => findCall(positions[this.axis], place));
    this.axis = axis;
    this.zoom(isWhole ? null : [positions[axis][calls[0]], positions[axis][calls[1] + 1]]);
  }

  draw() {
    const width = this.charts.clientWidth;
    if (!width) return;
    const visible = this.present.map((isThere, kind) => isThere && !this.hidden.has(kind));
    this.tracks.forEach((track) => (track.heights = this.heightsOf(track.step, visible)));
    const tallest = this.tracks.map(({ heights, step }) => (step.count ? maxOf(heights) : step.peak.bytes));
    const capacity = this.main.step.capacity_bytes;
    const highest = Math.max(1, ...tallest);
    const top = isNear(capacity, highest) ? Math.max(highest, capacity) : highest;
    const most = top * 1.1; // room for the label of the peak
    const view = { axis: this.axis, range: this.range[1] > 0 ? this.range : [0, 1], most, visible, capacity };
    this.tracks.forEach((track) => {
      const others = this.tracks.filter((other) => other !== track && !this.hidden.size);
      const marks = others.map(({ step: { peak }, label }) => ({
        bytes: peak.bytes,
        label: `peak ${label.toLowerCase()} ${formatBytes(peak.bytes)}`,
      }));
      track.chart.draw({ ...view, heights: track.heights, marks }, width);
      track.links?.draw(view, width);
    });
    const totals = Math.max(1, ...this.tracks.map(({ step }) => step.peak.bytes));
    this.overview.draw({ axis: this.axis, range: view.range, end: this.end || 1, most: totals }, width);
    const isWhole = this.range[0] <= 0 && this.range[1] >= this.end;
    this.tools.out.disabled = this.tools.whole.disabled = isWhole;
    this.tools.in.disabled = this.main.step.count <= FEWEST_CALLS;
    this.tools.peak.disabled = this.main.step.peak.call < 0;
    this.axes?.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.axis === this.axis)));
  }

  heightsOf(step, visible) {
    if (!this.hidden.size) return step.totals;
    const heights = new Float64Array(step.count);
    step.byCategory.forEach((bytes, kind) => visible[kind] && bytes.forEach((size, call) => (heights[call] += size)));
    return heights;
  }

  /** at: {track, call, isPointed} */
  show(at) {
    this.shown = at;
    const { track, call, isPointed } = at;
    this.tracks.forEach((other) => {
      const isThis = other === track;
      other.chart.point(isThis ? call : other.chart.call, { isPointed: isThis && isPointed });
    });
    this.showWhere(track, call);
    this.showLegend(track.step, call);
    this.showAlive(track.step, call);
  }

  showWhere({ step, label }, call) {
    const title = this.nameMoment(step, call);
    const bytes = call < 0 ? step.peak.bytes : step.totals[call];
    const lines = [
      make("h3", {}, label ? `${label}, ${title}` : capitalize(title)),
      make("p", { class: "figure" }, formatBytes(bytes)),
    ];
    if (call >= 0) {
      const { op, module, source, phase, region, seconds } = step.call(call);
      const of = module ? [" of ", makePath(module)] : [];
      const number = `call ${formatCount(call)} of ${formatCount(step.count)}`;
      const rest = seconds === null ? number : `${number}, ${formatSeconds(seconds)}`;
      lines.push(
        make("p", {}, phase, ...of),
        make("p", {}, makePath(op), ...(source ? [", ", makeName(source)] : [])),
        make("p", { class: "faint" }, rest, ...(region ? [", region ", makePath(region)] : [])),
      );
    }
    this.where.replaceChildren(...lines);
  }

  showLegend(step, call) {
    const sizes = call < 0 ? step.held_by_category : step.byCategory.map((bytes) => bytes[call]);
    const most = Math.max(1, ...sizes);
    if (!this.entries) this.entries = this.makeLegend(step);
    this.entries.forEach(({ kind, size, bar }) => {
      size.textContent = formatBytes(sizes[kind]);
      bar.style.width = `${(100 * sizes[kind]) / most}%`;
    });
  }

  // From the top of the chart to its ground, as the eye meets them.
  makeLegend(step) {
    const kinds = step.categories.map((_, kind) => kind).filter((kind) => this.present[kind]);
    const entries = kinds.reverse().map((kind) => {
      const size = make("span", { class: "size" });
      const bar = make("span", { class: `bar c${kind}` });
      const button = make(
        "button",
        { type: "button", "aria-pressed": "true", onclick: () => this.toggle(kind, button) },
        make("span", { class: `swatch c${kind}` }),
        make("span", { class: "label" }, step.categories[kind]),
        size,
        make("span", { class: "track" }, bar),
      );
      return { kind, size, bar, button };
    });
    this.legend.replaceChildren(...entries.map(({ button }) => make("li", {}, button)));
    return entries;
  }

  toggle(kind, button) {
    if (!this.hidden.delete(kind)) this.hidden.add(kind);
    button.setAttribute("aria-pressed", String(!this.hidden.has(kind)));
    this.draw();
    this.showAlive(this.shown.track.step, this.shown.call);
  }

  showAlive(step, call) {
    const { rows, more, moreBytes } = step.aliveAt(call, ALIVE_ROWS, this.hidden);
    const lines = rows.map((row) => {
      const maker = row.call < 0 ? { module: "", op: "", source: "" } : step.call(row.call);
      const owner = row.name || row.module || (row.call < 0 ? "" : step.name || "the step itself");
      const times = row.count > 1 ? make("span", { class: "faint" }, ` \u00d7 ${row.count}`) : null;
      const category = step.categories[row.category];
      const swatch = make("span", { class: `swatch c${row.category}`, title: category });
      return make(
        "tr",
        {},
        make("td", { class: "number" }, swatch, formatBytes(row.bytes)),
        make("td", {}, makeName(row.tensor)),
        make("td", {}, makePath(owner), times),
        make("td", {}, row.call < 0 ? category : makePath(maker.op)),
        make("td", { class: "line" }, makeName(maker.source)),
      );
    });
    // As many lines as ever, so that what is below does not jump while the cursor moves.
    while (lines.length < ALIVE_ROWS) lines.push(make("tr", { class: "blank" }, make("td", { colspan: 5 }, "\u00a0")));
    const rest = more ? `and ${formatCount(more)} more, ${formatBytes(moreBytes)} in all` : "\u00a0";
    lines.push(make("tr", { class: "rest" }, make("td", { colspan: 5 }, rest)));
    this.alive.replaceChildren(...lines);
    this.aliveTitle.textContent = `Alive ${this.nameMoment(step, call)}, largest first`;
  }

  nameMoment(step, call) {
    if (call < 0) return "before the first call";
    return call === step.peak.call ? "at the peak" : `at call ${formatCount(call)}`;
  }
}

// Spreading ten thousand numbers into a call of Math.max may overflow the stack.
function maxOf(numbers) {
  return numbers.reduce((most, number) => (number > most ? number : most), 0);
}
