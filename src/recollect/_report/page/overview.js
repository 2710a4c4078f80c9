// The whole step in a strip, and on it the part that the charts show: dragged to move it, by its ends to resize it, and
// beside it to choose another.

const STRIP = 40; // height
const GRIP = 12; // pixels around an end that take hold of it; a finger is not more exact

class Overview {
  constructor(steps, onzoom) {
    Object.assign(this, { steps, onzoom });
    this.layers = draw("g");
    this.shades = [draw("rect", { class: "shade" }), draw("rect", { class: "shade" })];
    this.window = draw("rect", { class: "window", y: 0.5, height: STRIP - 1 });
    this.frame = draw("svg", {}, this.layers, ...this.shades, this.window);
    this.element = make(
      "div",
      {
        class: "overview",
        "aria-hidden": "true",
        onpointerdown: (event) => this.press(event),
        onpointermove: (event) => this.move(event),
        onpointerup: () => (this.held = null),
        onpointercancel: () => (this.held = null),
      },
      this.frame,
    );
  }

  /** view: {axis, range, end (of the axis), most} */
  draw(view, width) {
    Object.assign(this, { view, width });
    this.columns = Math.max(1, Math.round(width - EDGE.left - EDGE.right));
    this.frame.setAttribute("viewBox", `0 0 ${width} ${STRIP}`);
    const outlines = this.steps.map((step, at) => {
      const picked = pickCalls(step.positions[view.axis], step.totals, [0, view.end], this.columns);
      const d = outline(picked, (call) => STRIP - (step.totals[call] / view.most) * STRIP, STRIP);
      return draw("path", { class: at === this.steps.length - 1 ? "whole" : "other", d });
    });
    this.layers.setAttribute("transform", `translate(${EDGE.left} 0)`);
    this.layers.replaceChildren(...outlines);
    this.drawWindow();
  }

  drawWindow() {
    const [left, right] = this.view.range.map((place) => this.x(place));
    const end = EDGE.left + this.columns;
    const place = (rect, x, width) => {
      rect.setAttribute("x", x);
      rect.setAttribute("width", Math.max(0, width));
      rect.setAttribute("height", STRIP);
    };
    place(this.shades[0], EDGE.left, left - EDGE.left);
    place(this.shades[1], right, end - right);
    this.window.setAttribute("x", left + 0.5);
    this.window.setAttribute("width", Math.max(1, right - left - 1));
  }

  x(place) {
    return EDGE.left + (place / this.view.end) * this.columns;
  }

  placeOf(event) {
    const box = this.frame.getBoundingClientRect();
    const x = ((event.clientX - box.left) * this.width) / box.width - EDGE.left;
    return (Math.min(Math.max(x, 0), this.columns) / this.columns) * this.view.end;
  }

  press(event) {
    if (!this.view.end) return;
    const [from, to] = this.view.range;
    const place = this.placeOf(event);
    const grip = (GRIP / this.columns) * this.view.end;
    const isWhole = from <= 0 && to >= this.view.end;
    if (Math.abs(place - from) < grip) this.held = { anchor: to };
    else if (Math.abs(place - to) < grip) this.held = { anchor: from };
    else if (place > from && place < to && !isWhole) this.held = { offset: place - from, width: to - from };
    else this.held = { anchor: place };
    this.element.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.held) return;
    const place = this.placeOf(event);
    const { anchor, offset, width } = this.held;
    if (anchor === undefined) {
      const from = Math.min(Math.max(place - offset, 0), this.view.end - width);
      this.onzoom([from, from + width]);
    } else if (Math.abs(place - anchor) * this.columns > DRAG * this.view.end) {
      this.onzoom([Math.min(place, anchor), Math.max(place, anchor)]);
    }
  }
}
