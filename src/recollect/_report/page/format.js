// Numbers for people, and elements for the page. What comes from the user's model goes in as text nodes and attributes
// that cannot run, never as markup: `make` is the only maker of elements.

const PREFIXES = ["B", "KiB", "MiB", "GiB", "TiB"];
const SVG = "http://www.w3.org/2000/svg";

/** Bytes with a binary prefix, written as the text report writes them. */
function formatBytes(count) {
  let value = count;
  let prefix = 0;
  while (Math.abs(value) >= 1024 && prefix < PREFIXES.length - 1) {
    value /= 1024;
    prefix += 1;
  }
  return `${prefix ? value.toFixed(2) : value} ${PREFIXES[prefix]}`;
}

/** A difference of bytes, its sign always there: a true minus, as wide as the plus. */
function formatDifference(count) {
  if (count === 0) return "0 B";
  return `${count > 0 ? "+" : "\u2212"}${formatBytes(Math.abs(count))}`;
}

function formatSeconds(seconds) {
  if (seconds === null) return "";
  if (seconds === 0) return "0 s";
  const [value, unit] =
    seconds >= 1 ? [seconds, "s"] : seconds >= 1e-3 ? [seconds * 1e3, "ms"] : [seconds * 1e6, "\u00b5s"];
  return `${value >= 100 ? value.toFixed(0) : value.toPrecision(3)} ${unit}`;
}

function formatCount(count) {
  return count.toLocaleString("en");
}

function formatNoun(count, noun) {
  return `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function capitalize(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function formatShare(part, whole) {
  if (!whole) return "0%";
  const share = (100 * part) / whole;
  return share > 0 && share < 1 ? "<1%" : `${share.toFixed(0)}%`;
}

/** An element with attributes (`on...` are listeners, `style` an object) and children; text stays text. */
function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, text]) => element.style.setProperty(key, text));
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

/** A name from the model: set apart, so that neither its spaces nor its writing direction reach the text around it. */
function makeName(text, className = "") {
  return make("bdi", { class: `name ${className}`.trim() }, text);
}

/** A name that may break after its dots and underscores, where it is too long for its column. */
function makePath(text, className = "") {
  const parts = text.split(/(?<=[._/])/u);
  return make(
    "bdi",
    { class: `name ${className}`.trim() },
    ...parts.flatMap((part, at) => (at ? [make("wbr"), part] : [part])),
  );
}

/** An operator without what nearly all have in their names, for where there is little room. */
function shortenOp(op) {
  return op.replace(/^aten\./u, "").replace(/\.default$/u, "");
}

/** Calls `work` once per frame at most, with the latest arguments. */
function oncePerFrame(work) {
  let latest = null;
  return (...given) => {
    const isWaiting = latest !== null;
    latest = given;
    if (isWaiting) return;
    requestAnimationFrame(() => {
      const args = latest;
      latest = null;
      work(...args);
    });
  };
}

/** Calls `work` when the element's width changes. Only its width: what `work` draws may change the height. */
function onWidth(element, work) {
  let width = 0;
  const settle = oncePerFrame(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    if (width) work(width);
  });
  new ResizeObserver(settle).observe(element);
}
