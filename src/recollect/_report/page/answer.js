// The head of the page: would it fit, where is the peak, how long does the step take, and what would help, with the line
// of code to paste.

/** parts: {fit, facts, suggestions}, elements that are filled. answer: as the library gives it. */
function showAnswer(parts, answer, step, before) {
  parts.fit.hidden = !answer.fit;
  parts.fit.textContent = answer.fit;
  if (answer.fits !== null) parts.fit.classList.add(answer.fits ? "fits" : "fails");
  const estimated = step.is_dry ? make("em", { class: "estimated" }, "estimated") : null;
  const change = changeSince(step.peak.bytes, before?.peak.bytes, formatBytes);
  addFact(parts.facts, "Peak", [formatBytes(step.peak.bytes), estimated], [makePath(step.peak.sentence), change]);
  if (step.seconds !== null) {
    const slower = changeSince(step.seconds, before?.seconds, formatSeconds);
    addFact(parts.facts, "Step", [formatSeconds(step.seconds)], [step.clock, slower]);
  }
  const { most_bytes: most, count, bytes, passes } = step.totals_saved;
  const less = changeSince(most, before?.totals_saved.most_bytes, formatBytes);
  const all = most < bytes ? `at a time; ${formatBytes(bytes)} in ${formatNoun(count, "tensor")}` : "";
  const each = passes > 1 ? ` over ${passes} forward passes, each of which frees its own before the next` : " in all";
  const detail = all ? `${all}${each}` : formatNoun(count, "tensor");
  addFact(parts.facts, "Saved for backward", [formatBytes(most)], [detail, less]);
  parts.suggestions.hidden = !answer.suggestions.length;
  const list = make("ol", {}, ...answer.suggestions.map(makeSuggestion));
  parts.suggestions.append(make("h2", {}, "What would help, best first"), list);
}

function addFact(facts, term, figure, detail) {
  const [value, more] = [make("dd", { class: "figure" }, ...figure), make("dd", { class: "detail" }, ...detail)];
  facts.append(make("div", {}, make("dt", {}, term), value, more));
}

function makeSuggestion({ what, gives, code }) {
  return make(
    "li",
    {},
    make("p", { class: "what" }, makePath(capitalize(what), "plain")),
    make("p", { class: "gives" }, gives),
    makePaste(code),
  );
}

/** A line of code with a button that copies it. */
function makePaste(code) {
  const line = make("code", {}, code);
  const copy = make("button", { type: "button", class: "quiet", onclick: () => copyText(line, copy) }, "Copy");
  copy.setAttribute("aria-label", `Copy: ${code}`);
  return make("div", { class: "paste" }, line, copy);
}

/** Copies an element's text; where the browser does not let us, selects it. */
async function copyText(element, button) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(element);
    button.textContent = "Selected";
  }
}

/** What became of a number since before, on a line of its own; null where there is no before. */
function changeSince(now, then, format) {
  if (then === null || then === undefined) return null;
  const difference = now - then;
  const sign = difference < 0 ? "\u2212" : "+";
  const share = then ? ` (${sign}${formatShare(Math.abs(difference), then)})` : "";
  const text = difference ? `${sign}${format(Math.abs(difference))}${share} compared with before` : "the same as before";
  return make("span", { class: `change ${changeOf(difference)}` }, text);
}

/** The word by which the style sheet knows which way a number went. */
function changeOf(difference) {
  if (!difference) return "";
  return difference < 0 ? "less" : "more-of";
}
