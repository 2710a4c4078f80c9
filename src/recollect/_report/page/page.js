// Puts the page together: reads the data, fills the head, and gives each section its view.

const { steps: given, gains, ...shared } = JSON.parse(document.getElementById("data").textContent);
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
  showPeak();
  if (step.seconds !== null) {
    const change = changeSince(step.seconds, before?.seconds, formatSeconds);
    addFact("Step", [formatSeconds(step.seconds)], [step.clock, change]);
  }
  const kept = changeSince(keptBytes(step), before && keptBytes(before), formatBytes);
  addFact("Saved for backward", [formatBytes(keptBytes(step))], [formatNoun(step.saved_count, "tensor"), kept]);
  for (const id of ["verdict", "notes"]) {
    byId(id).hidden = !step[id].length;
    byId(id).append(...step[id].map((sentence) => make("li", {}, make("bdi", {}, sentence))));
  }
}

function showPeak() {
  const { bytes, sentence } = step.peak;
  const estimated = step.is_dry ? make("em", { class: "estimated" }, "estimated") : null;
  const change = changeSince(bytes, before?.peak.bytes, formatBytes);
  addFact("Peak", [formatBytes(bytes), estimated], [makePath(sentence), change]);
}

function addFact(term, figure, detail) {
  const [value, more] = [make("dd", { class: "figure" }, ...figure), make("dd", { class: "detail" }, ...detail)];
  byId("facts").append(make("div", {}, make("dt", {}, term), value, more));
}

/** What became of a number since before, on a line of its own; null where there is no before. */
function changeSince(now, then, format) {
  if (then === null || then === undefined) return null;
  const difference = now - then;
  const sign = difference < 0 ? "\u2212" : "+";
  const share = then ? ` (${sign}${formatShare(Math.abs(difference), then)})` : "";
  const text = difference ? `${sign}${format(Math.abs(difference))}${share}` : "as";
  return make("span", { class: `change ${changeOf(difference)}` }, `${text} ${difference ? "since " : ""}before`);
}

function keptBytes(of) {
  return of.modules.saved_bytes[0];
}

function showTimeline() {
  const phases = step.phases.filter((_, at) => step.calls.phase.includes(at));
  const lead = `${formatNoun(step.count, "call")} of operators: ${phases.join(", ")}.`;
  byId("timeline-lead").textContent = step.count ? lead : "The profile has no calls.";
  const after = { step, label: before ? "After" : "" };
  new Timeline(byId("timeline-view"), before ? [{ step: before, label: "Before" }, after] : [after]);
}

function showSaved(rows) {
  const categoryOf = (row) => step.categories[row.category];
  const kinds = [...new Set(rows.map(categoryOf))];
  const sum = (some) => formatBytes(some.reduce((bytes, row) => bytes + row.bytes, 0));
  return new SortedTable(byId("saved-view"), {
    caption: "Tensors that forward leaves for backward",
    rows,
    columns: [
      numberColumn("Size", (row) => row.bytes, formatBytes, "size"),
      textColumn("Tensor", "tensor", (row) => row.tensor, (row) => makeName(row.tensor)),
      textColumn("Module", "module", (row) => row.module, (row) => makePath(row.module || step.name)),
      textColumn("Made by", "op", (row) => row.op),
      textColumn("Line", "line", (row) => row.source, (row) => makeName(row.source)),
      textColumn("Category", "category", categoryOf, categoryOf),
      textColumn("Kept by", "holders", (row) => row.holders),
    ],
    search: (row) => [row.module, row.op, row.source, row.tensor, row.holders].join("\n"),
    choices: kinds.length > 1 ? { label: "Category", values: kinds, of: categoryOf } : null,
    total: (found, all) =>
      `${formatCount(found.length)} of ${formatNoun(all.length, "tensor")}, ${sum(found)} of ${sum(all)}`,
    empty: "Forward leaves nothing for backward in this step.",
  });
}

function showGains() {
  const rows = step.rows(gains, ["path", "kind"]);
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
  new SortedTable(byId("gains-view"), {
    caption: "What recomputing modules would gain",
    rows,
    columns: [
      textColumn("Module", "module", (row) => row.path, (row) => makePath(row.path || step.name)),
      textColumn("Class", "op", (row) => row.kind, (row) => makeName(kind(row))),
      numberColumn("Frees", (row) => row.freed_bytes, formatBytes),
      ...costs,
      numberColumn("Peak then", (row) => row.peak_bytes, formatBytes),
    ],
    sort: [2 + costs.length, 1],
    limit: 20,
    empty: "",
  });
}

function showRules() {
  const rows = step.rows(step.rules, ["region", "rule", "decision"]);
  byId("rules").hidden = !rows.length;
  if (!rows.length) return;
  const alike = (row) => (row.regions > 1 ? make("span", { class: "faint" }, ` and ${row.regions - 1} alike`) : null);
  new SortedTable(byId("rules-view"), {
    caption: "What each entry of the policy decided",
    rows,
    columns: [
      textColumn("Region", "module", (row) => row.region, (row) => make("span", {}, makePath(row.region), alike(row))),
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
    modules: "Modules",
    saved: "Tensors",
    gains: "Gains",
    rules: "Policy",
  };
  const links = Object.entries(titles).filter(([id]) => !byId(id).hidden);
  byId("sections").append(...links.map(([id, title]) => make("a", { href: `#${id}` }, title)));
  const torch = step.torch ? ` from a step in torch ${step.torch}` : "";
  byId("colophon").textContent = `Written by recollect${torch}. This file is complete: it loads nothing.`;
}

showHead();
byId("comparison").hidden = !before;
if (before) showComparison(before, step);
showTimeline();
const saved = step.rows(step.saved, ["tensor", "op", "module", "source", "holders"]);
const table = showSaved(saved);
new TreeMap(byId("modules-view"), step.rows(step.modules, ["path", "kind"]), saved, (path) => {
  table.filter(path);
  byId("saved").scrollIntoView();
  table.input.focus({ preventScroll: true });
});
showGains();
showRules();
showSections();
