"""Keeps the figures of real models, and writes them into the page of the docs: a table for each kind of case.

    python benchmarks/tables.py                                        # the page, from what is kept
    python benchmarks/tables.py --add real.json --add compiled.json    # keep what real_models.py wrote, then the page

Figures are kept in ``benchmarks/real_models.json``, each case with where it was measured and the commit; a case that is
measured again takes the place of the old one. The page says where its tables go with ``<!-- table: real_models eager
-->`` and ``<!-- end -->``. What lies between is replaced by the cases whose names begin with that last word; a kind
without a case stays as it is. Losses are bold: more time or memory than the package's own switch, and "selective" where
it takes longer than full recomputation.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "real_models.json"
PAGE = ROOT / "docs" / "benchmarks.md"

COLUMNS = {
    "best_ms": "ms",
    "best/plain": "/ plain",
    "best/switch": "/ switch",
    "best/full": "/ full",
    "peak_bytes": "peak MiB",
    "peak/switch": "/ switch",
    "compile_s": "compile s",
    "compile/switch": "/ switch",
    "graphs": "graphs",
}
FULL, SELECTIVE = "recollect full", "recollect selective"
SWITCHES = ("its own switch", "torch by hand")
# What each of our ways is to be no worse at; what is below half a percent is noise.
ASKED = {FULL: ("best/switch", "peak/switch", "compile/switch"), SELECTIVE: ("best/full", "compile/switch")}
WORSE = 1.005

Figures = dict[str, Any]


def kept(old: Figures, new: list[Figures], commit: str | None = None) -> Figures:
    """What is kept once new figures are added; `commit` is that of all new ones, where they do not say it."""
    cases = {case["name"]: case for case in old["cases"]}
    for file in new:
        where = file["environment"] | ({"recollect": commit} if commit else {})
        if "recollect" not in where:
            message = "these figures do not say what was measured. Give --commit"
            raise ValueError(message)
        cases |= {case["name"]: {"environment": where} | case for case in file["cases"]}
    return {"cases": list(cases.values())}


def shown(column: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if column.endswith("_bytes"):
        return f"{value / 2**20:,.0f}"
    if isinstance(value, int):
        return str(value)
    return f"{value:.1f}" if column in {"best_ms", "compile_s"} else f"{value:.2f}"


def cell(row: Figures, column: str) -> str:
    value = row.get(column)
    text = shown(column, value)
    is_loss = value is not None and column in ASKED.get(row["candidate"], ()) and value > WORSE
    return f"**{text}**" if is_loss else text


def with_ratios(rows: list[Figures]) -> list[Figures]:
    """Rows with the ratio of their peak to that of the switch, which not every run wrote."""
    peaks = {row["candidate"]: row.get("peak_bytes") for row in rows}
    switch = next((peaks[name] for name in SWITCHES if peaks.get(name)), None)
    if switch is None:
        return rows
    return [row | ({"peak/switch": row["peak_bytes"] / switch} if row.get("peak_bytes") else {}) for row in rows]


def table(cases: list[Figures]) -> str:
    """All cases as one table; a model's name stands once."""
    models = [(case["title"], with_ratios(case["rows"])) for case in cases]
    columns = [column for column in COLUMNS if any(row.get(column) is not None for _, rows in models for row in rows)]
    lines = [
        "| model | way | " + " | ".join(COLUMNS[column] for column in columns) + " |",
        "|---|---|" + "--:|" * len(columns),
    ]
    for title, rows in models:
        for number, row in enumerate(rows):
            name = title if number == 0 else ""
            if "failed" in row:
                said = row["failed"].replace("|", "/")
                lines.append(f"| {name} | {row['candidate']} | {said} |" + " |" * (len(columns) - 1))
                continue
            figures = " | ".join(cell(row, column) for column in columns)
            lines.append(f"| {name} | {row['candidate']} | {figures} |")
    return "\n".join(lines)


def described(cases: list[Figures]) -> str:
    """Where and at which commits cases were measured."""
    places = sorted({"{device}, torch {torch}, Python {python}".format(**case["environment"]) for case in cases})
    measured: dict[str, list[str]] = {}
    for case in cases:
        measured.setdefault(case["environment"]["recollect"], []).append(case["name"].split()[-1])
    commits = [
        f"`{commit}`" + (f" ({', '.join(names)})" if len(measured) > 1 else "") for commit, names in measured.items()
    ]
    return (
        f"{'; '.join(places)}; recollect at {' and '.join(commits)}. Times are those of the best round. Ratios are "
        "bold where recollect loses."
    )


def filled(page: str, figures: Figures) -> str:
    """The page with the tables of what is kept."""

    def fill(match: re.Match[str]) -> str:
        cases = [case for case in figures["cases"] if case["name"].startswith(f"{match[2]} ")]
        return f"{match[1]}\n{described(cases)}\n\n{table(cases)}\n\n{match[3]}" if cases else match[0]

    place = re.compile(r"(<!-- table: real_models (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(page):
        message = "the page has no place for the tables: <!-- table: real_models KIND --> ... <!-- end -->"
        raise ValueError(message)
    return place.sub(fill, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--add", type=Path, action="append", default=[], help="what real_models.py wrote with --json")
    parser.add_argument("--commit", help="what was measured, for files that do not say it or not rightly")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where figures are kept")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    old = json.loads(options.kept.read_text("utf-8")) if options.kept.exists() else {"cases": []}
    try:
        figures = kept(old, [json.loads(path.read_text("utf-8")) for path in options.add], options.commit)
        page = filled(options.page.read_text("utf-8"), figures)
    except ValueError as error:
        parser.error(str(error))
    if options.add:
        options.kept.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    options.page.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
