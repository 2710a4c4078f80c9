// Puts the page of a plan together: a budget to slide, and what it gives: peak, time, memory over the step, regions.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const { alternatives, plain, policies, measured } = data;
policies.sort((one, other) => other.peak_bytes - one.peak_bytes); // so that the table lists their letters in order

/** Memory over a step as the curves want it: when each stretch begins and ends, and the most in use in it. */
function makeTrack({ peak_bytes: peak, ends_s: ends, kib }) {
  const totals = Float64Array.from(kib, (size) => size * 1024);
  const highest = totals.indexOf(Math.max(...totals));
  totals[highest] = peak;
  const positions = { time: Float64Array.from([0, ...ends]) };
  return { count: totals.length, hasTimes: true, totals, positions, peak: { bytes: peak, call: highest } };
}

/** The quickest plan that stays within a budget, with what is kept free below it. */
function findWithin(budget) {
  const found = alternatives.findIndex(({ peak_bytes: peak }) => peak <= budget * (1 - data.margin_share));
  return found < 0 ? alternatives.length - 1 : found;
}

/** A budget as one would write it, with two digits behind the point, and never less than a plan of this peak needs. */
function writeBudget(budget, peak) {
  const needed = peak / (1 - data.margin_share);
  const [unit, name] = needed >= 2 ** 30 ? [2 ** 30, "GiB"] : needed >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
  const hundredths = Math.max(Math.ceil((100 * needed) / unit), Math.round((100 * budget) / unit));
  return `${(hundredths / 100).toFixed(2)}${name}`;
}

function showHead() {
  byId("name").append(makeName(data.name));
  const subject = [
    data.device && `on ${data.device}`,
    data.optimizer && `with ${data.optimizer}`,
    data.is_dry && "estimated: nothing was run",
  ];
  byId("subject").textContent = subject.filter(Boolean).join(", ");
}

function showPolicies() {
  const rows = [{ ...plain, name: "plain step" }, ...policies].map((row, at) => {
    const ours = alternatives.find(({ peak_bytes: peak }) => peak <= row.peak_bytes);
    return { ...row, letter: at ? LETTERS[(at - 1) % LETTERS.length] : "P", ours: ours?.step_s ?? null };
  });
  const over = (seconds) => (plain.step_s ? `${signed(seconds / plain.step_s - 1)} over plain` : "");
  new SortedTable(byId("policies-view"), {
    caption: "Standard policies and the plain step",
    rows,
    columns: [
      textColumn("Mark", "op", (row) => row.letter, (row) => row.letter),
      textColumn("Policy", "module", (row) => row.name, (row) => row.name),
      numberColumn("Peak", (row) => row.peak_bytes, formatBytes),
      numberColumn("Step", (row) => row.step_s, formatSeconds),
      numberColumn("Costs", (row) => row.step_s, over),
      numberColumn("A plan at that peak", (row) => row.ours ?? Infinity, (seconds) => (seconds < Infinity ? over(seconds) : "none")),
      textColumn("Figures", "op", () => "", (row) => (row.name === "plain step" ? data.source : "simulated")),
    ],
    sort: [2, -1],
    empty: "",
  });
}

function signed(share) {
  return `${share < 0 ? "\u2212" : "+"}${(100 * Math.abs(share)).toFixed(1)}%`;
}

const before = { step: makeTrack(plain), label: "Before" };
const curves = new Curves(byId("timeline-view"), [before, before], 0, "budget");
const chart = new FrontierChart(byId("frontier-view"), { points: alternatives, policies, plain, measured }, (at) => {
  slideTo(alternatives[at].peak_bytes / (1 - data.margin_share));
});
const slider = byId("budget");

/** Shows what a budget gives; where it is what was asked for, the plan that was made for it, tightened or not. */
function show(budget, at = findWithin(budget)) {
  const { peak_bytes: peak, step_s: seconds } = alternatives[at];
  chart.choose(at, budget);
  byId("budget-text").textContent = formatBytes(Math.round(budget));
  slider.setAttribute("aria-valuetext", formatBytes(Math.round(budget)));
  const isAsked = at === data.chosen;
  const fits = peak <= budget;
  byId("fit").className = `fit ${fits ? "fits" : "fails"}`;
  const longer = plain.step_s ? seconds / plain.step_s - 1 : 0;
  const cost = longer > 0 ? `takes ${(100 * longer).toFixed(1)}% longer than the plain one` : "takes no longer than the plain one";
  byId("fit").textContent = fits
    ? `Within ${formatBytes(Math.round(budget))}: the step ${cost}.`
    : `No plan fits ${formatBytes(Math.round(budget))}; this is the smallest.`;
  showFacts(alternatives[at], isAsked);
  const after = isAsked && data.is_outline ? "at most what the plan takes at its peak" : "as the plan is predicted to run";
  byId("timeline-lead").textContent = `Before: the plain step, ${data.source}. After: ${after}.`;
  byId("code").replaceChildren(makePaste(`recollect.fit(model, batch, budget="${writeBudget(budget, peak)}")`));
  curves.show([before, { step: makeTrack(alternatives[at]), label: "After" }], budget);
  showRegions(alternatives[at].regions, isAsked ? data.levers : []);
}

function showFacts({ peak_bytes: peak, step_s: seconds }, isAsked) {
  const facts = byId("facts");
  facts.replaceChildren();
  const predicted = make("em", { class: "estimated" }, "predicted");
  const less = `${formatShare(peak, plain.peak_bytes)} of the plain step\u2019s ${formatBytes(plain.peak_bytes)}`;
  const [took, lasted] =
    isAsked && measured
      ? [`measured ${formatBytes(measured.peak_bytes)}`, measured.step_s ? `measured ${formatSeconds(measured.step_s)}` : ""]
      : ["", ""];
  const line = (text) => (text ? make("span", { class: "change" }, text) : null);
  addFact(facts, "Peak", [formatBytes(peak), predicted], [less, line(took)]);
  const longer = plain.step_s ? `${signed(seconds / plain.step_s - 1)} over ${formatSeconds(plain.step_s)}` : "";
  addFact(facts, "Step", [formatSeconds(seconds), predicted.cloneNode(true)], [longer, line(lasted)]);
}

function showRegions(rows, levers) {
  const count = rows.reduce((sum, row) => sum + row.count, 0);
  const regions = count
    ? `${count === 1 ? "1 module becomes a region" : `${formatCount(count)} modules become regions`}; everything else runs as before.`
    : "Nothing: the step runs as before.";
  byId("regions-lead").textContent = levers.length ? `Levers: ${levers.join("; ")}. ${count ? regions : ""}` : regions;
  byId("regions-view").replaceChildren();
  if (!rows.length) return;
  new SortedTable(byId("regions-view"), {
    caption: "Modules that become regions",
    rows,
    columns: [
      textColumn("Modules", "module", (row) => row.path),
      textColumn("Class", "op", (row) => row.kind, (row) => makeName(row.kind)),
      textColumn("How", "op", (row) => row.way, (row) => row.way),
      textColumn("Keeps", "op", (row) => row.keeps, (row) => row.keeps || "nothing"),
      numberColumn("Holds", (row) => row.kept_bytes, formatBytes),
      numberColumn("Before", (row) => row.plain_bytes, formatBytes),
      numberColumn("Runs again", (row) => row.again_s, formatSeconds),
    ],
    sort: [0, 1],
    empty: "",
  });
}

function slideTo(budget) {
  slider.value = String(budget);
  show(budget);
}

function showSlider() {
  const free = 1 - data.margin_share;
  const [low, high] = [alternatives.at(-1).peak_bytes / free, (1.02 * plain.peak_bytes) / free];
  slider.min = String(low);
  slider.max = String(Math.max(high, data.asked_bytes ?? 0));
  slider.step = String((high - low) / 400);
  const asked = data.asked_bytes ?? alternatives[data.chosen].peak_bytes / free;
  slider.addEventListener("input", oncePerFrame(() => show(Number(slider.value))));
  const showAsked = () => {
    slider.value = String(asked);
    show(asked, data.chosen); // not the slider's value, which is rounded to its steps
  };
  byId("asked").addEventListener("click", showAsked);
  showAsked();
}

function showSections() {
  const titles = { frontier: "Budgets", timeline: "Timeline", regions: "Regions", why: "Notes" };
  const links = Object.entries(titles).filter(([id]) => !byId(id).hidden);
  byId("sections").append(...links.map(([id, title]) => make("a", { href: `#${id}` }, title)));
  byId("colophon").textContent = `Written by recollect${data.torch ? ` from a step in torch ${data.torch}` : ""}. This file is self-contained: it loads nothing.`;
}

showHead();
byId("frontier-lead").textContent =
  "Each point is a plan: choose one, or slide the budget. Between two points, the line shows the most that a budget costs. " +
  `Plans and policies are simulated from the profile${measured ? "; the cross was measured" : ""}.`;
byId("why").hidden = !data.notes.length;
byId("notes").append(...data.notes.map((sentence) => make("li", {}, make("bdi", {}, sentence))));
showPolicies();
showSlider();
showSections();
