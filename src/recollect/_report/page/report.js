// Puts the page of a profile together: reads the data, fills the head, and gives each section its view.

const { steps: given, gains, answer, ...shared } = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const steps = given.map((data) => new Step(data, shared));
const step = steps.at(-1);
const before = steps.length > 1 ? steps[0] : null;

function showHead() {
  byId("name").append(makeName(step.name || "A training step"));
  const subject = [
    step.device && `on ${step.device}`,
    step.optimizer && `with ${step.optimizer}`,
    step.is_dry && "estimated: nothing was run",
  ];
  byId("subject").textContent = subject.filter(Boolean).join(", ");
  byId("share").append(makePictureButton(step, before, answer));
  const parts = { fit: byId("fit"), facts: byId("facts"), suggestions: byId("suggestions") };
  showAnswer(parts, answer, step, before);
}

function showWhy() {
  byId("why").hidden = !step.verdict.length && !step.notes.length;
  for (const id of ["verdict", "notes"]) {
    byId(id).hidden = !step[id].length;
    byId(id).append(...step[id].map((sentence) => make("li", {}, make("bdi", {}, sentence))));
  }
}

function showTimeline() {
  const phases = step.phases.filter((_, at) => step.calls.phase.includes(at));
  const lead = `${formatNoun(step.count, "call")} of operators: ${phases.join(", ")}.`;
  byId("timeline-lead").textContent = step.count ? lead : "The profile has no calls.";
  const after = { step, label: before ? "After" : "" };
  new Timeline(byId("timeline-view"), before ? [{ step: before, label: "Before" }, after] : [after]);
}

/** The tree map and the table of tensors, both with identical layers as one or each for itself. */
function showModules() {
  const isFolded = byId("fold").querySelector("input").checked;
  const modules = step.rows(step.modules, ["path", "family", "kind"]);
  const saved = step.rows(step.saved, ["tensor", "op", "module", "family", "source", "holders"]);
  byId("fold").hidden = modules.every((row) => row.path === row.family);
  const tensors = isFolded ? foldTensors(saved) : saved.map((row) => ({ ...row, count: 1, members: [] }));
  for (const id of ["modules-view", "saved-view"]) byId(id).replaceChildren();
  const table = showSaved(tensors, saved.length);
  const tiles = tensors.map((row) => (isFolded ? { ...row, module: row.family } : row));
  new TreeMap(byId("modules-view"), isFolded ? foldModules(modules) : modules, tiles, (path) => {
    table.filter(path);
    byId("saved").scrollIntoView();
    table.input.focus({ preventScroll: true });
  });
}

function showSaved(rows, count) {
  const categoryOf = (row) => step.categories[row.category];
  const kinds = [...new Set(rows.map(categoryOf))];
  const sum = (some) => formatBytes(some.reduce((bytes, row) => bytes + row.bytes, 0));
  const times = (row) => (row.count > 1 ? make("span", { class: "faint" }, ` \u00d7 ${row.count}`) : null);
  const owner = (row) => make("span", {}, makePath(row.module || step.name), times(row));
  return new SortedTable(byId("saved-view"), {
    caption: "Tensors that forward leaves for backward",
    rows,
    columns: [
      numberColumn("Size", (row) => row.bytes, formatBytes, "size"),
      textColumn("Tensor", "tensor", (row) => row.tensor, (row) => makeName(row.tensor)),
      textColumn("Module", "module", (row) => row.module, owner),
      textColumn("Made by", "op", (row) => row.op),
      textColumn("Line", "line", (row) => row.source, (row) => makeName(row.source)),
      textColumn("Category", "category", categoryOf, categoryOf),
      textColumn("Kept by", "holders", (row) => row.holders),
    ],
    search: (row) => [row.module, row.family, row.op, row.source, row.tensor, row.holders, ...row.members].join("\n"),
    choices: kinds.length > 1 ? { label: "Category", values: kinds, of: categoryOf } : null,
    total: (found, all) =>
      `${formatCount(counted(found))} of ${formatNoun(count, "tensor")}, ${sum(found)} of ${sum(all)}`,
    empty: "Forward leaves nothing for backward in this step.",
  });
}

function showGains() {
  const rows = foldGains(step.rows(gains, ["path", "family", "kind", "policy"]));
  byId("gains").hidden = !rows.length;
  if (!rows.length) return;
  const hasTimes = rows.every((row) => row.recompute_s !== null);
  const perGiB = (price) => formatSeconds(price * 2 ** 30);
  const costs = hasTimes
    ? [
        numberColumn("Costs", (row) => row.recompute_s, formatSeconds),
        numberColumn("Per GiB", (row) => row.price, perGiB),
      ]
    : [numberColumn("Costs", (row) => row.recompute_flops, (flops) => `${(flops / 1e9).toPrecision(3)} GFLOP`)];
  const kind = (row) => (row.count > 1 ? `${row.count} \u00d7 ${row.kind}` : row.kind);
  const how = (row) => [row.policy === "full" ? "" : row.policy, row.every > 1 ? "every 2nd" : ""].filter(Boolean);
  const named = (row) => make("span", {}, makePath(row.path || step.name), ...how(row).map((word) => `, ${word}`));
  const changed = (row) => row.peak_bytes - step.peak.bytes;
  new SortedTable(byId("gains-view"), {
    caption: "What recomputing modules would gain",
    rows,
    columns: [
      textColumn("Module", "module", (row) => row.path, named),
      textColumn("Class", "op", (row) => row.kind, (row) => makeName(kind(row))),
      numberColumn("Peak then", (row) => row.peak_bytes, formatBytes),
      numberColumn("Change", (row) => -changed(row), (_, row) => formatDifference(changed(row))),
      numberColumn("Frees", (row) => row.freed_bytes, formatBytes),
      ...costs,
    ],
    sort: [2, 1],
    limit: 10,
    empty: "",
  });
}

function showRules() {
  const rows = step.rows(step.rules, ["region", "rule", "decision"]);
  byId("rules").hidden = !rows.length;
  if (!rows.length) return;
  const others = (row) => (row.regions > 1 ? make("span", { class: "faint" }, ` and ${row.regions - 1} more`) : null);
  new SortedTable(byId("rules-view"), {
    caption: "What each entry of the policy decided",
    rows,
    columns: [
      textColumn("Region", "module", (row) => row.region, (row) => make("span", {}, makePath(row.region), others(row))),
      textColumn("Entry", "op", (row) => row.rule),
      textColumn("Decision", "decision", (row) => row.decision, (row) => row.decision),
      numberColumn("Values", (row) => row.values, formatCount),
      numberColumn("Size", (row) => row.bytes, formatBytes),
    ],
    sort: [4, -1],
    empty: "",
  });
}

function showSections() {
  const titles = {
    comparison: "Before and after",
    timeline: "Timeline",
    why: "Why",
    gains: "Gains",
    modules: "Modules",
    saved: "Tensors",
    rules: "Policy",
  };
  const links = Object.entries(titles).filter(([id]) => !byId(id).hidden);
  byId("sections").append(...links.map(([id, title]) => make("a", { href: `#${id}` }, title)));
  const torch = step.torch ? ` from a step in torch ${step.torch}` : "";
  byId("colophon").textContent = `Written by recollect${torch}. This file is self-contained: it loads nothing.`;
}

showHead();
byId("comparison").hidden = !before;
if (before) showComparison(before, step);
showTimeline();
showWhy();
showGains();
showModules();
byId("fold").addEventListener("change", showModules);
showRules();
showSections();
