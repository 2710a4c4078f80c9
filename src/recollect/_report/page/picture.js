// The step as a picture to be shared: a title, its numbers and the curve, in the colours that the page has now. It is
// drawn anew, with colours and fonts written out, because a picture has no style sheet.

const PICTURE = { width: 1200, height: 630, edge: 56, sharp: 2 };

/** An SVG that needs nothing else. */
function drawPicture(step, before, answer) {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const { width, height, edge } = PICTURE;
  const font = 'system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", Arial, sans-serif';
  const text = (x, y, size, fill, content, more = {}) =>
    draw("text", { x, y, fill, "font-size": size, "font-family": font, ...more }, content);
  const [left, right, top, ground] = [edge + 64, width - edge, 190, height - 104];
  const columns = right - left;
  const axis = before && step.hasTimes && before.hasTimes ? "time" : "calls";
  const all = before ? [before, step] : [step];
  const end = Math.max(...all.map((one) => one.positions[axis].at(-1)), 0) || 1;
  const highest = Math.max(1, ...all.map((one) => one.peak.bytes));
  const most = (isNear(step.capacity_bytes, highest) ? Math.max(highest, step.capacity_bytes) : highest) * 1.1;
  const y = (bytes) => ground - (bytes / most) * (ground - top);
  const parts = [
    draw("rect", { width, height, fill: colour("paper") }),
    text(edge, 76, 40, colour("ink"), clipText(step.name || "A training step", 46), { "font-weight": 600 }),
    text(edge, 118, 21, colour("soft"), describeStep(step, before)),
    text(edge, 150, 19, colour("faint"), clipText(answer.fits === null ? step.peak.sentence : answer.fit, 108)),
    text(right, 76, 19, colour("faint"), "recollect", { "text-anchor": "end" }),
  ];
  ticksOfBytes(most, 5).forEach((bytes) => {
    parts.push(
      draw("line", { x1: left, x2: right, y1: y(bytes), y2: y(bytes), stroke: colour("rule") }),
      text(left - 12, y(bytes) + 6, 17, colour("faint"), formatTickOfBytes(bytes), { "text-anchor": "end" }),
    );
  });
  parts.push(...drawLayers(step, { axis, end, columns, left, ground, y, colour }));
  if (before?.count) {
    const picked = pickCalls(before.positions[axis], before.totals, [0, end], columns);
    const d = skyline(picked, (call) => y(before.totals[call]));
    const line = { fill: "none", stroke: colour("ink"), "stroke-width": 2.5, transform: `translate(${left} 0)` };
    parts.push(draw("path", { d, ...line }));
  }
  if (step.capacity_bytes && step.capacity_bytes <= most) {
    const at = y(step.capacity_bytes);
    const dashes = { stroke: colour("more"), "stroke-width": 2, "stroke-dasharray": "8 6" };
    parts.push(
      draw("line", { x1: left, x2: right, y1: at, y2: at, ...dashes }),
      text(left + 8, at - 8, 17, colour("more"), `capacity ${formatBytes(step.capacity_bytes)}`),
    );
  }
  parts.push(...drawKey(step, before, { edge, y: height - 50, colour, text }));
  return draw("svg", { xmlns: SVG, viewBox: `0 0 ${width} ${height}`, width, height }, ...parts);
}

function drawLayers(step, { axis, end, columns, left, ground, y, colour }) {
  if (!step.count) return [];
  const picked = pickCalls(step.positions[axis], step.totals, [0, end], columns);
  const sums = new Float64Array(step.count);
  const layers = step.byCategory.map((bytes, kind) => {
    for (let call = 0; call < sums.length; call += 1) sums[call] += bytes[call];
    const d = outline(picked, (call) => y(sums[call]), ground);
    return draw("path", { d, fill: colour(`c${kind}`), transform: `translate(${left} 0)` });
  });
  return layers.reverse();
}

function drawKey(step, before, { edge, y, colour, text }) {
  const parts = [];
  let x = edge;
  const add = (mark, label) => {
    parts.push(mark(x), text(x + 24, y + 14, 17, colour("soft"), label));
    x += 24 + 9.1 * label.length + 20;
  };
  step.categories.forEach((label, kind) => {
    const isThere = step.byCategory[kind].some((bytes) => bytes > 0);
    if (isThere) add((at) => draw("rect", { x: at, y, width: 16, height: 16, rx: 3, fill: colour(`c${kind}`) }), label);
  });
  if (before) {
    const line = { stroke: colour("ink"), "stroke-width": 2.5, y1: y + 8, y2: y + 8 };
    add((at) => draw("line", { x1: at, x2: at + 18, ...line }), "before");
  }
  return parts;
}

function describeStep(step, before) {
  const change = (now, then) => (then ? ` (${now <= then ? "\u2212" : "+"}${formatShare(Math.abs(now - then), then)})` : "");
  const parts = [`peak ${formatBytes(step.peak.bytes)}${before ? change(step.peak.bytes, before.peak.bytes) : ""}`];
  if (step.seconds !== null) {
    parts.push(`step ${formatSeconds(step.seconds)}${before?.seconds ? change(step.seconds, before.seconds) : ""}`);
  }
  parts.push(`${formatBytes(step.totals_saved.most_bytes)} saved for backward`);
  if (step.device) parts.push(`on ${step.device}`);
  return clipText(parts.join("  \u00b7  "), 90);
}

function clipText(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}\u2026`;
}

/** The picture as a PNG, twice as sharp as it is large: a promise of a blob. */
async function makePicture(step, before, answer) {
  const { width, height, sharp } = PICTURE;
  const text = new XMLSerializer().serializeToString(drawPicture(step, before, answer));
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = make("canvas", { width: width * sharp, height: height * sharp });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function makePictureButton(step, before, answer) {
  const save = async () => {
    const canvas = await makePicture(step, before, answer);
    const link = make("a", { href: canvas.toDataURL("image/png"), download: "recollect.png" });
    link.click();
  };
  return make("button", { type: "button", class: "quiet", onclick: save }, "Save as picture");
}
