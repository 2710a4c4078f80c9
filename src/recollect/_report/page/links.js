// The links to other tiers: a track for what leaves the device, and one for what comes back, on the charts' own axis.

const LANE = 14; // height of one track
const LANES = ["link out", "link back"];

class Links {
  constructor(step) {
    this.step = step;
    this.frame = draw("svg", { role: "img", "aria-label": this.describe() });
    this.element = make("div", { class: "links" }, this.frame);
  }

  describe() {
    const { is_out: isOut, bytes } = this.step.transfers;
    const sums = [0, 0];
    bytes.forEach((size, at) => (sums[isOut[at] ? 0 : 1] += size));
    return `Offloaded: ${formatBytes(sums[0])} out, ${formatBytes(sums[1])} back`;
  }

  /** view: {axis, range} */
  draw({ axis, range: [from, to] }, width) {
    const columns = Math.max(1, Math.round(width - EDGE.left - EDGE.right));
    const positions = this.step.positions[axis];
    const x = (place) => EDGE.left + ((Math.min(Math.max(place, from), to) - from) / (to - from)) * columns;
    const { is_out: isOut, bytes, start, end, tier } = this.step.transfers;
    const parts = LANES.map((text, lane) =>
      draw("text", { class: "lane", x: EDGE.left - 6, y: lane * LANE + LANE - 4, "text-anchor": "end" }, text),
    );
    for (let at = 0; at < start.length; at += 1) {
      const [first, last] = [positions[start[at]], positions[end[at]]];
      if (last < from || first > to) continue;
      const lane = isOut[at] ? 0 : 1;
      const rect = draw("rect", {
        class: `c${this.step.categories.indexOf("offloaded")} copy`,
        x: x(first),
        y: lane * LANE + 2,
        width: Math.max(1, x(last) - x(first)),
        height: LANE - 4,
      });
      const way = isOut[at] ? "to" : "from";
      rect.append(draw("title", {}, `${formatBytes(bytes[at])} ${way} ${this.step.strings[tier[at]]}`));
      parts.push(rect);
    }
    this.frame.setAttribute("viewBox", `0 0 ${width} ${LANE * LANES.length}`);
    this.frame.replaceChildren(...parts);
  }
}
