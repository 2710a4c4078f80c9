// One step drawn over calls or time: what is in use, stacked by category, its phases above it, and a cursor. It knows
// nothing of the page around it; whoever owns it hears of what is pointed at, chosen and dragged over.

const EDGE = { left: 58, right: 10, top: 30, bottom: 22 };
const BAND = 14; // height of the strip of phases
const DRAG = 5; // pixels that make a drag out of a click

class Chart {
  /** listeners: {onpoint(call), onleave(), onchoose(call), onzoom(range), onkey(event, call) -> handled} */
  constructor(step, label, listeners) {
    Object.assign(this, { step, label, listeners });
    this.call = step.peak.call;
    this.layers = draw("g");
    this.cursor = draw("g", { class: "cursor" });
    this.selection = draw("rect", { class: "selection", y: EDGE.top, width: 0 });
    this.frame = draw("svg", { "aria-hidden": "true" }, this.layers, this.cursor, this.selection);
    this.element = make(
      "div",
      {
        class: "chart",
        role: "slider",
        tabindex: "0",
        "aria-label": `${label ? `${label}: ` : ""}memory over the step, call by call`,
        "aria-valuemin": "0",
        "aria-valuemax": String(Math.max(0, step.count - 1)),
        onpointerdown: (event) => this.press(event),
        onpointermove: (event) => this.move(event),
        onpointerup: (event) => this.release(event),
        onpointercancel: () => this.dropSelection(),
        onpointerleave: (event) => event.pointerType === "mouse" && !this.pressed && listeners.onleave(),
        ondblclick: () => listeners.onzoom(null),
        onkeydown: (event) => this.step.count && listeners.onkey(event, this.call) && event.preventDefault(),
        onfocus: () => this.element.matches(":focus-visible") && listeners.onpoint(this.call),
      },
      this.frame,
    );
    this.say();
  }

  /** view: {axis, range, most (bytes at the top), heights, visible (by category), capacity, marks: [{bytes, label}]} */
  draw(view, width) {
    this.view = view;
    this.width = width;
    this.height = width < 520 ? 250 : 300;
    this.columns = Math.max(1, Math.round(width - EDGE.left - EDGE.right));
    this.ground = this.height - EDGE.bottom;
    this.frame.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.picked = pickCalls(this.step.positions[view.axis], view.heights, view.range, this.columns);
    this.layers.replaceChildren(
      ...this.drawGrid(),
      draw("g", { transform: `translate(${EDGE.left} 0)` }, ...this.drawStack(), ...this.drawPhases()),
      ...this.drawMarks(),
    );
    this.drawCursor();
  }

  x(place) {
    const [from, to] = this.view.range;
    return EDGE.left + ((place - from) / (to - from)) * this.columns;
  }

  y(bytes) {
    return this.ground - (bytes / this.view.most) * (this.ground - EDGE.top - BAND);
  }

  drawGrid() {
    const { axis, range, most } = this.view;
    const right = EDGE.left + this.columns;
    const parts = ticksOfBytes(most, 6).flatMap((bytes) => {
      const y = this.y(bytes);
      const place = { x: EDGE.left - 8, y: y + 4, "text-anchor": "end" };
      return [
        draw("line", { class: "grid", x1: EDGE.left, x2: right, y1: y, y2: y }),
        draw("text", { class: "tick", ...place }, formatTickOfBytes(bytes)),
      ];
    });
    const wanted = Math.max(2, Math.floor(this.columns / 90));
    const ticks = ticksOfDecimals(range[0], range[1], wanted, axis === "calls" ? 1 : 0);
    ticks.forEach((place) => {
      const text = axis === "calls" ? `call ${formatCount(place)}` : formatTickOfSeconds(place, range[1]);
      const x = this.x(place);
      const anchor = x > right - 30 ? "end" : x < EDGE.left + 20 ? "start" : "middle";
      parts.push(draw("text", { class: "tick", x, y: this.height - 5, "text-anchor": anchor }, text));
    });
    return parts;
  }

  // Each layer is painted down to the ground, the topmost first, so that neighbours leave no seam between them.
  drawStack() {
    const sums = new Float64Array(this.step.count);
    const paths = this.step.byCategory.map((bytes, kind) => {
      if (!this.view.visible[kind]) return "";
      for (let call = 0; call < sums.length; call += 1) sums[call] += bytes[call];
      return draw("path", { class: `c${kind}`, d: outline(this.picked, (call) => this.y(sums[call]), this.ground) });
    });
    return paths.filter(Boolean).reverse();
  }

  drawPhases() {
    return runsOfPhase(this.picked, this.step.calls.phase).flatMap(([phase, first, end]) => {
      const place = { x: first, y: EDGE.top - BAND - 4, width: end - first, height: BAND };
      const bar = draw("rect", { class: `phase p${phase}`, ...place }, draw("title", {}, this.step.phases[phase]));
      const name = this.step.phases[phase];
      if (end - first < 8 * name.length) return [bar];
      return [bar, draw("text", { class: "phase-name", x: first + 5, y: EDGE.top - 7.5 }, name)];
    });
  }

  drawMarks() {
    const parts = [];
    const right = EDGE.left + this.columns;
    this.view.marks.forEach(({ bytes, label }) => {
      parts.push(
        draw("line", { class: "mark-line", x1: EDGE.left, x2: right, y1: this.y(bytes), y2: this.y(bytes) }),
        draw("text", { class: "mark", x: right - 4, y: this.y(bytes) - 5, "text-anchor": "end" }, label),
      );
    });
    const { capacity } = this.view;
    parts.push(...drawCapacity(capacity, this.view.most, EDGE.left, right, (bytes) => this.y(bytes)));
    const { call, bytes } = this.step.peak;
    const place = call < 0 ? null : this.middleOf(call);
    if (place === null || place < this.view.range[0] || place > this.view.range[1]) return parts;
    const [x, y] = [this.x(place), this.y(this.view.heights[call])];
    const isLate = x > EDGE.left + this.columns / 2;
    const nudge = { x: x + (isLate ? -9 : 9), y: y - 6, "text-anchor": isLate ? "end" : "start" };
    parts.push(
      draw("path", { class: "peak-mark", d: `M${x} ${y - 2}l-5 -9h10z` }),
      draw("text", { class: "mark peak-label", ...nudge }, `peak ${formatBytes(bytes)}`),
    );
    return parts;
  }

  middleOf(call) {
    const positions = this.step.positions[this.view.axis];
    return (positions[call] + positions[call + 1]) / 2;
  }

  drawCursor() {
    this.say();
    if (!this.isPointed || this.call < 0) return this.cursor.replaceChildren();
    const place = this.middleOf(this.call);
    const [from, to] = this.view.range;
    if (place < from || place > to) return this.cursor.replaceChildren();
    const [x, y] = [this.x(place), this.y(this.view.heights[this.call])];
    const isLate = x > EDGE.left + this.columns / 2;
    const label = formatBytes(this.view.heights[this.call]);
    const width = 7.4 * label.length + 10;
    const left = isLate ? x - 8 - width : x + 8;
    const top = Math.min(Math.max(y, EDGE.top + 2), this.ground - 24);
    return this.cursor.replaceChildren(
      draw("line", { x1: x, x2: x, y1: EDGE.top, y2: this.ground }),
      draw("circle", { cx: x, cy: y, r: 3.5 }),
      draw("rect", { x: left, y: top, width, height: 20, rx: 3 }),
      draw("text", { x: left + width / 2, y: top + 14, "text-anchor": "middle" }, label),
    );
  }

  point(call, { isPointed }) {
    this.call = call;
    this.isPointed = isPointed;
    if (this.view) this.drawCursor();
  }

  say() {
    const { step, call } = this;
    this.element.setAttribute("aria-valuenow", String(Math.max(0, call)));
    this.element.setAttribute("aria-valuetext", call < 0 ? "no calls" : describeCall(step, call));
  }

  // The frame is scaled where its box is not as wide as what was drawn, as on paper.
  columnOf(event) {
    const box = this.frame.getBoundingClientRect();
    return Math.floor(((event.clientX - box.left) * this.width) / box.width - EDGE.left);
  }

  callAt(event) {
    const column = Math.min(Math.max(this.columnOf(event), 0), this.columns - 1);
    return this.picked[column] < 0 ? this.step.count - 1 : this.picked[column];
  }

  press(event) {
    if (!this.step.count || event.button !== 0) return;
    this.pressed = { column: this.columnOf(event), isDrag: false };
    this.element.setPointerCapture(event.pointerId);
    if (event.pointerType !== "mouse") this.listeners.onpoint(this.callAt(event));
  }

  // A mouse that drags chooses a range; a finger that does moves the cursor, as it cannot do that otherwise.
  move(event) {
    if (!this.step.count) return;
    if (!this.pressed || event.pointerType !== "mouse") {
      this.listeners.onpoint(this.callAt(event));
      return;
    }
    const column = this.columnOf(event);
    if (Math.abs(column - this.pressed.column) >= DRAG) this.pressed.isDrag = true;
    if (!this.pressed.isDrag) return;
    const [left, right] = this.selected(column);
    this.selection.setAttribute("x", EDGE.left + left);
    this.selection.setAttribute("width", right - left);
    this.selection.setAttribute("height", this.ground - EDGE.top);
  }

  selected(column) {
    const ends = [column, this.pressed.column].map((end) => Math.min(Math.max(end, 0), this.columns));
    return [Math.min(...ends), Math.max(...ends)];
  }

  release(event) {
    if (!this.pressed) return;
    const { isDrag } = this.pressed;
    if (isDrag) {
      const [from, to] = this.view.range;
      const range = this.selected(this.columnOf(event)).map((column) => from + (column / this.columns) * (to - from));
      this.listeners.onzoom(range);
    } else {
      this.listeners.onchoose(this.callAt(event));
    }
    this.dropSelection();
  }

  dropSelection() {
    this.pressed = null;
    this.selection.setAttribute("width", 0);
  }
}

/** A call in words: which, where and how much is in use. */
function describeCall(step, at) {
  const { op, module, source, phase } = step.call(at);
  const where = `${phase}${module ? ` of ${module}` : ""}`;
  return `call ${at}, ${[where, op, source].filter(Boolean).join(", ")}: ${formatBytes(step.totals[at])} in use`;
}
