// Axes, and a step drawn as one column per pixel. Each column shows the call with the most memory among those that fall
// into it, so that no peak is lost however many calls there are.

/** Ticks at whole powers of two of bytes, for then their labels are short. */
function ticksOfBytes(most, wanted) {
  if (most <= 0) return [0];
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(most / wanted)));
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, at) => at * step);
}

/** Ticks at 1, 2 or 5 times a power of ten. */
function ticksOfDecimals(from, to, wanted, smallest) {
  const rough = Math.max((to - from) / wanted, Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(smallest, power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999));
  const first = Math.ceil(from / step - 1e-9);
  const ticks = [];
  for (let at = first; at * step <= to && ticks.length <= 2 * wanted + 1; at += 1) ticks.push(at * step || 0); // no -0
  return ticks;
}

function formatTickOfBytes(count) {
  return count ? formatBytes(count).replace(/\.0+ /u, " ") : "0";
}

function formatTickOfSeconds(seconds, most) {
  const [factor, unit] = most >= 1 ? [1, "s"] : most >= 1e-3 ? [1e3, "ms"] : [1e6, "\u00b5s"];
  return `${Number((seconds * factor).toPrecision(6))} ${unit}`;
}

/** For each pixel column of a range of the axis the call that is drawn there; -1 where the step is over. */
function pickCalls(positions, heights, [from, to], columns) {
  const picked = new Int32Array(columns).fill(-1);
  const perUnit = columns / (to - from);
  for (let call = findCall(positions, from); call < heights.length && positions[call] < to; call += 1) {
    // Calls that take no time at all still get the column that they are in.
    const first = Math.max(0, Math.floor((positions[call] - from) * perUnit));
    const last = Math.max(first, Math.ceil((positions[call + 1] - from) * perUnit) - 1);
    for (let column = first; column <= last && column < columns; column += 1) {
      if (picked[column] < 0 || heights[call] > heights[picked[column]]) picked[column] = call;
    }
  }
  return picked;
}

/** The last call that starts at or before a place on the axis. */
function findCall(positions, place) {
  let low = 0;
  let high = positions.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (positions[middle] <= place) low = middle;
    else high = middle - 1;
  }
  return Math.max(0, low);
}

/** The outline of one layer: up from the ground, along the tops of its columns, and down again. */
function outline(picked, heightOf, ground) {
  const parts = [];
  let last = null;
  picked.forEach((call, column) => {
    const height = call < 0 ? null : heightOf(call).toFixed(1);
    if (height === last) return;
    if (last === null) parts.push(`M${column} ${ground}V${height}`);
    else parts.push(height === null ? `H${column}V${ground}Z` : `H${column}V${height}`);
    last = height;
  });
  if (last !== null) parts.push(`H${picked.length}V${ground}Z`);
  return parts.join("");
}

/** Runs of columns with one phase, as [phase, first column, one past the last]. */
function runsOfPhase(picked, phaseOf) {
  const runs = [];
  picked.forEach((call, column) => {
    const phase = call < 0 ? -1 : phaseOf[call];
    const last = runs.at(-1);
    if (last && last[0] === phase) last[2] = column + 1;
    else runs.push([phase, column, column + 1]);
  });
  return runs.filter(([phase]) => phase >= 0);
}
