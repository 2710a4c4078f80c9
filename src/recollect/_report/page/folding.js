// Identical layers as one: modules by the name of their family (`layers.*.mlp`), sums in place of 32 equal rows.

/** Modules of one family as one row, in the order of the tree. rows: with `path` and `family`. */
function foldModules(rows) {
  const folded = new Map();
  const sums = ["saved_bytes", "own_saved_bytes", "parameter_bytes", "forward_s", "backward_s", "recompute_s"];
  rows.forEach((row) => {
    const known = folded.get(row.family);
    if (!known) {
      folded.set(row.family, { ...row, path: row.family, count: 1 });
      return;
    }
    known.count += 1;
    sums.forEach((key) => (known[key] = row[key] === null ? known[key] : known[key] + row[key]));
  });
  return inOrder(folded);
}

/** Parts that only later members of a family have come right after their parents. */
function inOrder(folded) {
  const children = new Map();
  folded.forEach((row) => {
    const parent = parentOf(row.path, folded);
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(row);
  });
  const found = [];
  const visit = (row) => {
    found.push(row);
    (children.get(row.path) ?? []).forEach(visit);
  };
  (children.get(null) ?? []).forEach(visit);
  return found;
}

function parentOf(path, known) {
  if (!path) return null;
  let above = path;
  while (above) {
    above = above.includes(".") ? above.slice(0, above.lastIndexOf(".")) : "";
    if (known.has(above)) return above;
  }
  return null;
}

/** Tensors of one family, operator, shape and line as one row, with how many they are. */
function foldTensors(rows) {
  const folded = new Map();
  rows.forEach((row) => {
    const key = JSON.stringify([row.family, row.op, row.tensor, row.source, row.category, row.holders]);
    const known = folded.get(key);
    if (!known) {
      folded.set(key, { ...row, count: 1, members: [row.module] });
      return;
    }
    known.count += 1;
    known.bytes += row.bytes;
    known.module = known.family;
    known.members.push(row.module);
  });
  return [...folded.values()].sort((one, other) => other.bytes - one.bytes);
}

/** Gains of families, and of modules that have none. */
function foldGains(rows) {
  const together = new Set(rows.filter((row) => row.count > 1).map((row) => row.path));
  return rows.filter((row) => row.count > 1 || row.every > 1 || !together.has(row.family));
}

function counted(rows) {
  return rows.reduce((count, row) => count + row.count, 0);
}
