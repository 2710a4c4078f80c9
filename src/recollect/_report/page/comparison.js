// Before and after: what two steps differ in, by category at their peaks, and by module in what is saved for backward.

function showComparison(before, step) {
  const difference = step.peak.bytes - before.peak.bytes;
  const size = formatBytes(Math.abs(difference));
  const words = difference ? `${size} ${difference < 0 ? "less" : "more"} than before` : "the same as before";
  document.getElementById("comparison-lead").append(
    `The peak is ${words}: ${formatBytes(before.peak.bytes)} then, `,
    makePath(before.peak.sentence),
    `; ${formatBytes(step.peak.bytes)} now, `,
    makePath(step.peak.sentence),
    ".",
    describeClocks(before, step),
  );
  const tracks = [{ step: before, label: "Before" }, { step, label: "After" }];
  new Curves(document.getElementById("comparison-curves"), tracks, step.capacity_bytes);
  const categories = step.categories.map((name, at) => ({
    name,
    then: before.peak.by_category[at],
    now: step.peak.by_category[at],
  }));
  const present = categories.filter((row) => row.then || row.now);
  const modules = pairModules(before, step).filter((row) => row.then !== row.now);
  const plain = textColumn("Category", "module", (row) => row.name, (row) => row.name);
  showDifferences("comparison-categories", "At the peak, by category", plain, present);
  const path = textColumn("Module", "module", (row) => row.name);
  showDifferences("comparison-modules", "Saved for backward, by module", path, modules);
}

/** A warning where times are not of one kind. */
function describeClocks(before, step) {
  if (before.clock === step.clock) return "";
  const [then, now] = [before, step].map(({ clock }) => clock || "not there");
  return ` Times before are ${then}, after ${now}.`;
}

/** Modules of both steps by their paths, identical layers as one, with what each keeps, its children's included. */
function pairModules(before, step) {
  const rows = new Map();
  for (const [of, key] of [[before, "then"], [step, "now"]]) {
    for (const { path, kind, saved_bytes: saved } of foldModules(of.rows(of.modules, ["path", "family", "kind"]))) {
      if (!rows.has(path)) rows.set(path, { name: path || kind || "the whole step", then: 0, now: 0 });
      rows.get(path)[key] = saved;
    }
  }
  return [...rows.values()];
}

function showDifferences(id, title, named, rows) {
  const most = Math.max(1, ...rows.map((row) => Math.abs(row.now - row.then)));
  const bar = (size, row) => {
    const width = `${(100 * size) / most}%`;
    const text = formatDifference(row.now - row.then);
    return make("span", { class: `delta ${changeOf(row.now - row.then)}` }, make("span", { style: { width } }), text);
  };
  const root = document.getElementById(id);
  root.append(make("h3", {}, title));
  new SortedTable(root, {
    caption: title,
    rows,
    columns: [
      named,
      numberColumn("Before", (row) => row.then, formatBytes),
      numberColumn("After", (row) => row.now, formatBytes),
      numberColumn("Difference", (row) => Math.abs(row.now - row.then), bar),
    ],
    sort: [3, -1],
    empty: "No difference.",
  });
}
