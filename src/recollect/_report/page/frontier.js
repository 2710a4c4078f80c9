// Step time against peak memory: the plans as a staircase of points to choose from, standard policies and the plain step
// as marks with letters, what was measured as a cross.

const FRONTIER_HEIGHT = 320;
const LABEL_WIDTH = 130;
const LINE = 16;
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";

class FrontierChart {
  /** points, policies: [{peak_bytes, step_s}]; plain and measured likewise, or null. onchoose(index of a point). */
  constructor(root, { points, policies, plain, measured }, onchoose) {
    Object.assign(this, { points, policies, plain, measured, onchoose });
    this.chosen = 0;
    this.budget = null;
    this.frame = draw("svg", { role: "img", "aria-label": "Step time against peak memory", onclick: (event) => this.click(event) });
    this.element = make("div", { class: "curves frontier" }, this.frame);
    root.append(this.element);
    onWidth(this.element, (width) => this.draw(width));
  }

  /** Marks a point as chosen for a budget of so many bytes. */
  choose(at, budget) {
    Object.assign(this, { chosen: at, budget });
    const { peak_bytes: peak, step_s: seconds } = this.points[at];
    const label = `Step time against peak memory; chosen: ${formatBytes(peak)}, ${formatSeconds(seconds)}`;
    this.frame.setAttribute("aria-label", label);
    if (this.width) this.draw(this.width);
  }

  draw(width) {
    this.width = width;
    this.setScales(width);
    this.frame.setAttribute("viewBox", `0 0 ${width} ${FRONTIER_HEIGHT}`);
    this.frame.replaceChildren(
      ...this.drawAxes(),
      ...this.drawBudget(),
      draw("path", { class: "curve after", d: this.staircase() }),
      ...this.points.map((point) => draw("circle", { class: "dot after", ...this.center(point), r: 3 }, this.title(point))),
      ...this.policies.map((policy, at) => this.drawLetter(policy, LETTERS[at % LETTERS.length], "policy")),
      ...(this.plain ? [this.drawLetter(this.plain, "P", "plain")] : []),
      ...this.drawChosen(),
      ...(this.measured ? this.drawMeasured() : []),
    );
  }

  setScales(width) {
    const all = [...this.points, ...this.policies, this.plain, this.measured].filter(Boolean);
    const [peaks, times] = [all.map((one) => one.peak_bytes), all.map((one) => one.step_s)];
    const spread = (values) => Math.max(Math.max(...values) - Math.min(...values), 0.02 * Math.max(...values)) || 1;
    const [wide, high] = [spread(peaks), spread(times)];
    this.bytes = [Math.max(0, Math.min(...peaks) - 0.06 * wide), Math.max(...peaks) + 0.06 * wide];
    this.seconds = [Math.max(0, Math.min(...times) - 0.1 * high), Math.max(...times) + 0.14 * high];
    const [left, right] = [EDGE.left + 10, width - EDGE.right];
    const [top, ground] = [24, FRONTIER_HEIGHT - 2 * EDGE.bottom];
    const place = (value, [from, to], start, end) => start + ((value - from) / (to - from)) * (end - start);
    this.x = (bytes) => place(bytes, this.bytes, left, right);
    this.y = (seconds) => place(seconds, this.seconds, ground, top);
    Object.assign(this, { left, right, top, ground });
  }

  drawAxes() {
    const parts = ticksOfDecimals(...this.seconds, 5, 0).flatMap((seconds) => [
      draw("line", { class: "grid", x1: this.left, x2: this.right, y1: this.y(seconds), y2: this.y(seconds) }),
      draw(
        "text",
        { class: "tick", x: this.left - 8, y: this.y(seconds) + 4, "text-anchor": "end" },
        formatTickOfSeconds(seconds, this.seconds[1]),
      ),
    ]);
    const wanted = Math.max(2, Math.floor((this.right - this.left) / 110));
    const step = 2 ** Math.ceil(Math.log2((this.bytes[1] - this.bytes[0]) / wanted));
    for (let bytes = Math.ceil(this.bytes[0] / step) * step; bytes <= this.bytes[1]; bytes += step) {
      const x = this.x(bytes);
      const anchor = x > this.right - 30 ? "end" : "middle";
      parts.push(
        draw("line", { class: "grid", x1: x, x2: x, y1: this.top, y2: this.ground }),
        draw("text", { class: "tick", x, y: this.ground + 17, "text-anchor": anchor }, formatTickOfBytes(bytes)),
      );
    }
    const middle = (this.left + this.right) / 2;
    parts.push(
      draw("text", { class: "tick", x: this.left - 8, y: 12, "text-anchor": "end" }, "step time"),
      draw("text", { class: "tick", x: middle, y: FRONTIER_HEIGHT - 6, "text-anchor": "middle" }, "peak memory"),
    );
    return parts;
  }

  drawBudget() {
    if (this.budget === null || this.budget > this.bytes[1] || this.budget < this.bytes[0]) return [];
    const x = this.x(this.budget);
    const isLate = x > (this.left + this.right) / 2;
    const place = { x: x + (isLate ? -6 : 6), y: this.ground - 8, "text-anchor": isLate ? "end" : "start" };
    return [
      draw("line", { class: "capacity-line budget-line", x1: x, x2: x, y1: this.top, y2: this.ground }),
      draw("text", { class: "mark capacity", ...place }, `budget ${formatBytes(this.budget)}`),
    ];
  }

  /** With less memory the time stays as it is until the next plan is needed. */
  staircase() {
    const [first, ...rest] = this.points;
    const parts = [`M${this.right} ${this.y(first.step_s).toFixed(1)}H${this.x(first.peak_bytes).toFixed(1)}`];
    rest.forEach((point) => parts.push(`V${this.y(point.step_s).toFixed(1)}H${this.x(point.peak_bytes).toFixed(1)}`));
    return parts.join("");
  }

  center({ peak_bytes: peak, step_s: seconds }) {
    return { cx: this.x(peak), cy: this.y(seconds) };
  }

  title({ name, peak_bytes: peak, step_s: seconds }) {
    return draw("title", {}, `${name ? `${name}: ` : ""}${formatBytes(peak)}, ${formatSeconds(seconds)}`);
  }

  drawLetter(one, letter, kind) {
    const { cx, cy } = this.center(one);
    return draw(
      "g",
      { class: `letter ${kind}` },
      draw("circle", { cx, cy, r: 8 }),
      draw("text", { x: cx, y: cy + 4, "text-anchor": "middle" }, letter),
      this.title(one),
    );
  }

  drawChosen() {
    const point = this.points[this.chosen];
    const { cx, cy } = this.center(point);
    const isLate = cx > (this.left + this.right) / 2;
    const above = { x: cx + (isLate ? -12 : 12), y: cy - 10, "text-anchor": isLate ? "end" : "start" };
    const below = { x: cx - 12, y: cy + 20, "text-anchor": "end" }; // the staircase goes down to the right
    const hasRoom = cx - 12 - LABEL_WIDTH > this.left;
    const place = hasRoom && this.countMarks(above) > this.countMarks(below) ? below : above;
    this.labelAt = place.y;
    return [
      draw("circle", { class: "chosen", cx, cy, r: 6.5 }),
      draw("text", { class: "mark after", ...place }, `${formatBytes(point.peak_bytes)}, ${formatSeconds(point.step_s)}`),
    ];
  }

  /** How many marks a label at this place would lie on. */
  countMarks({ x, y, "text-anchor": anchor }) {
    const [from, to] = anchor === "end" ? [x - LABEL_WIDTH, x] : [x, x + LABEL_WIDTH];
    const marks = [...this.policies, this.plain, this.measured].filter(Boolean).map((one) => this.center(one));
    return marks.filter(({ cx, cy }) => cx > from - 10 && cx < to + 10 && Math.abs(cy - (y - 4)) < 16).length;
  }

  drawMeasured() {
    const { cx, cy } = this.center(this.measured);
    const [above, below] = [cy - 8, cy + 14];
    const far = (y) => Math.abs(y - this.labelAt); // from the chosen plan's label
    const isLow = cy > this.ground - 40; // where the budget is written
    const isAbove = far(above) > far(below) || (isLow && far(above) > LINE);
    const near = isAbove ? above : below;
    const y = far(near) < LINE ? this.labelAt + (isAbove ? -LINE : LINE) : near;
    return [
      draw("path", { class: "cross", d: `M${cx - 6} ${cy - 6}l12 12m0 -12l-12 12` }, this.title({ ...this.measured, name: "measured" })),
      draw("text", { class: "mark cross-label", x: cx + 10, y }, "measured"),
    ];
  }

  click(event) {
    const box = this.frame.getBoundingClientRect();
    const scale = this.width / box.width;
    const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    const far = this.points.map((point) => Math.hypot(this.x(point.peak_bytes) - x, this.y(point.step_s) - y));
    const nearest = far.indexOf(Math.min(...far));
    if (far[nearest] < 24) this.onchoose(nearest);
  }
}
