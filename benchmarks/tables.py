"""Writes the figures of a benchmark into a page of the docs: a table between two comments for each kind of case.

    python benchmarks/tables.py real.json compiled.json docs/benchmarks.md

The page says where with ``<!-- table: real_models eager -->`` and ``<!-- end -->``; what lies between is replaced by
the cases whose names begin with that last word. Of cases that several files have, the last file's are taken. Kinds that
no file has stay as they are.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

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


def shown(column: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if column.endswith("_bytes"):
        return f"{value / 2**20:,.0f}"
    if isinstance(value, int):
        return str(value)
    return f"{value:.1f}" if column in {"best_ms", "compile_s"} else f"{value:.2f}"


def table(cases: list[dict[str, Any]]) -> str:
    """All cases as one table; a model's name stands once."""
    rows = [row for case in cases for row in case["rows"]]
    columns = [column for column in COLUMNS if any(row.get(column) is not None for row in rows)]
    lines = [
        "| model | way | " + " | ".join(COLUMNS[column] for column in columns) + " |",
        "|---|---|" + "--:|" * len(columns),
    ]
    for case in cases:
        for number, row in enumerate(case["rows"]):
            name = case["title"] if number == 0 else ""
            if "failed" in row:
                said = row["failed"].replace("|", "/")
                lines.append(f"| {name} | {row['candidate']} | {said} |" + " |" * (len(columns) - 1))
                continue
            figures = " | ".join(shown(column, row.get(column)) for column in columns)
            lines.append(f"| {name} | {row['candidate']} | {figures} |")
    return "\n".join(lines)


def filled(page: str, name: str, files: list[dict[str, Any]]) -> str:
    """The page with the tables of a benchmark."""

    def fill(match: re.Match[str]) -> str:
        kind = match[2]
        cases = {
            case["name"]: case for found in files for case in found["cases"] if case["name"].startswith(f"{kind} ")
        }
        if not cases:
            return match[0]
        last = next(found for found in reversed(files) if any(case["name"] in cases for case in found["cases"]))
        where = last["environment"]
        said = f"{where['device']}, torch {where['torch']}, Python {where['python']}; of each way its best round."
        return f"{match[1]}\n{said}\n\n{table(list(cases.values()))}\n\n{match[3]}"

    place = re.compile(rf"(<!-- table: {re.escape(name)} (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(page):
        message = f"the page has no place for it: <!-- table: {name} KIND --> ... <!-- end -->"
        raise ValueError(message)
    return place.sub(fill, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", type=Path, nargs="+", help="what a benchmark wrote with --json")
    parser.add_argument("page", type=Path)
    parser.add_argument("--table", default="real_models", help="which of the page's")
    options = parser.parse_args()
    files = [json.loads(path.read_text("utf-8")) for path in options.figures]
    try:
        page = filled(options.page.read_text("utf-8"), options.table, files)
    except ValueError as error:
        parser.error(f"{options.page}: {error}")
    options.page.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
