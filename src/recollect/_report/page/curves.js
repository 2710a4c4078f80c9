// Two steps as two curves on one scale, with a limit, such as the device's capacity, as a line: what a change did, at a
// glance.

const CURVES_HEIGHT = 250;

class Curves {
  /** tracks: [{step, label}], before and after. capacity: bytes, 0 if it is not known; called what `word` says. */
  constructor(root, tracks, capacity, word = "capacity") {
    Object.assign(this, { tracks, capacity, word });
    this.axis = tracks.every(({ step }) => step.hasTimes) ? "time" : "calls";
    this.frame = draw("svg", { role: "img", "aria-label": this.say() });
    this.element = make("div", { class: "curves" }, this.frame);
    root.append(this.element);
    onWidth(this.element, (width) => this.draw(width));
  }

  /** Draws other steps, on scales of their own. */
  show(tracks, capacity) {
    Object.assign(this, { tracks, capacity });
    this.frame.setAttribute("aria-label", this.say());
    if (this.width) this.draw(this.width);
  }

  say() {
    const [before, after] = this.tracks.map(({ step }) => formatBytes(step.peak.bytes));
    return `Memory over the step, two curves: at most ${before} before, ${after} after`;
  }

  draw(width) {
    this.width = width;
    const columns = Math.max(1, Math.round(width - EDGE.left - EDGE.right));
    const end = Math.max(...this.tracks.map(({ step }) => step.positions[this.axis].at(-1)), 0) || 1;
    const highest = Math.max(1, ...this.tracks.map(({ step }) => step.peak.bytes));
    const most = (isNear(this.capacity, highest) ? Math.max(highest, this.capacity) : highest) * 1.12;
    const ground = CURVES_HEIGHT - EDGE.bottom;
    const y = (bytes) => ground - (bytes / most) * (ground - 8);
    const x = (place) => EDGE.left + (place / end) * columns;
    this.frame.setAttribute("viewBox", `0 0 ${width} ${CURVES_HEIGHT}`);
    const parts = drawAxes({ axis: this.axis, end, most, columns, ground, height: CURVES_HEIGHT, x, y });
    this.tracks.forEach(({ step, label }, at) => {
      if (!step.count) return;
      const picked = pickCalls(step.positions[this.axis], step.totals, [0, end], columns);
      const kind = at ? "after" : "before";
      const height = (call) => y(step.totals[call]);
      const shape = { transform: `translate(${EDGE.left} 0)` };
      if (at) parts.push(draw("path", { class: `area ${kind}`, d: outline(picked, height, ground), ...shape }));
      parts.push(draw("path", { class: `curve ${kind}`, d: skyline(picked, height), ...shape }));
      const { call, bytes } = step.peak;
      const place = x((step.positions[this.axis][call] + step.positions[this.axis][call + 1]) / 2);
      const isLate = place > EDGE.left + columns / 2;
      const where = { x: place + (isLate ? -8 : 8), y: y(bytes) - 6, "text-anchor": isLate ? "end" : "start" };
      parts.push(
        draw("circle", { class: `dot ${kind}`, cx: place, cy: y(bytes), r: 3.5 }),
        draw("text", { class: `mark ${kind}`, ...where }, `${label.toLowerCase()} ${formatBytes(bytes)}`),
      );
    });
    parts.push(...drawCapacity(this.capacity, most, EDGE.left, EDGE.left + columns, y, this.word));
    this.frame.replaceChildren(...parts);
  }
}

/** Grid and ticks of both axes. */
function drawAxes({ axis, end, most, columns, ground, height, x, y }) {
  const right = EDGE.left + columns;
  const parts = ticksOfBytes(most, 5).flatMap((bytes) => [
    draw("line", { class: "grid", x1: EDGE.left, x2: right, y1: y(bytes), y2: y(bytes) }),
    draw("text", { class: "tick", x: EDGE.left - 8, y: y(bytes) + 4, "text-anchor": "end" }, formatTickOfBytes(bytes)),
  ]);
  ticksOfDecimals(0, end, Math.max(2, Math.floor(columns / 90)), axis === "calls" ? 1 : 0).forEach((place) => {
    const text = axis === "calls" ? `call ${formatCount(place)}` : formatTickOfSeconds(place, end);
    const anchor = x(place) > right - 30 ? "end" : x(place) < EDGE.left + 20 ? "start" : "middle";
    parts.push(draw("text", { class: "tick", x: x(place), y: height - 5, "text-anchor": anchor }, text));
  });
  void ground;
  return parts;
}

/** Whether a capacity is worth its place on the scale: far above the peak it would press all else to the ground. */
function isNear(capacity, peak) {
  return capacity > 0 && capacity < 2.5 * peak;
}

/** The device's capacity as a line; a word at the top where it is far above. */
function drawCapacity(capacity, most, left, right, y, word = "capacity") {
  if (!capacity) return [];
  const label = `${word} ${formatBytes(Math.round(capacity))}`;
  if (capacity > most) {
    const text = `${label}, above this scale`;
    return [draw("text", { class: "mark capacity", x: left + 6, y: y(most) + 14, "text-anchor": "start" }, text)];
  }
  return [
    draw("line", { class: "capacity-line", x1: left, x2: right, y1: y(capacity), y2: y(capacity) }),
    draw("text", { class: "mark capacity", x: left + 6, y: y(capacity) - 5, "text-anchor": "start" }, label),
  ];
}

/** The tops of columns as one line. */
function skyline(picked, heightOf) {
  const parts = [];
  let last = null;
  picked.forEach((call, column) => {
    const height = call < 0 ? null : heightOf(call).toFixed(1);
    if (height !== null && height !== last) parts.push(last === null ? `M${column} ${height}` : `H${column}V${height}`);
    if (height === null && last !== null) parts.push(`H${column}`);
    last = height;
  });
  if (last !== null) parts.push(`H${picked.length}`);
  return parts.join("");
}
