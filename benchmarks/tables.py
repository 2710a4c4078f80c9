"""Writes the figures of a benchmark into a page of the docs: one table, between two comments.

    python benchmarks/tables.py real.json docs/benchmarks.md

The page says where with ``<!-- table: real_models -->`` and ``<!-- end -->``; what lies between is replaced.
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
}


def shown(column: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if column.endswith("_bytes"):
        return f"{value / 2**20:,.0f}"
    return f"{value:.1f}" if column in {"best_ms", "compile_s"} else f"{value:.2f}"


def table(found: dict[str, Any]) -> str:
    """All cases as one table; a model's name stands once."""
    rows = [row for case in found["cases"] for row in case["rows"]]
    columns = [column for column in COLUMNS if any(row.get(column) is not None for row in rows)]
    lines = [
        "| model | way | " + " | ".join(COLUMNS[column] for column in columns) + " |",
        "|---|---|" + "--:|" * len(columns),
    ]
    for case in found["cases"]:
        for number, row in enumerate(case["rows"]):
            name = case["title"].partition(":")[0] if number == 0 else ""
            if "failed" in row:
                said = row["failed"].replace("|", "/")
                lines.append(f"| {name} | {row['candidate']} | {said} |" + " |" * (len(columns) - 1))
                continue
            figures = " | ".join(shown(column, row.get(column)) for column in columns)
            lines.append(f"| {name} | {row['candidate']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", type=Path, help="what a benchmark wrote with --json")
    parser.add_argument("page", type=Path)
    parser.add_argument("--table", default="real_models", help="which one of the page's")
    options = parser.parse_args()
    found = json.loads(options.figures.read_text("utf-8"))
    where = found["environment"]
    said = f"{where['device']}, torch {where['torch']}, Python {where['python']}; the best of {found['rounds']} rounds."
    page = options.page.read_text("utf-8")
    place = re.compile(rf"(<!-- table: {re.escape(options.table)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(page):
        parser.error(f"{options.page} has no place for it: <!-- table: {options.table} --> ... <!-- end -->")
    filled = place.sub(lambda match: f"{match[1]}\n{said}\n\n{table(found)}\n\n{match[2]}", page)
    options.page.write_text(filled, "utf-8")


if __name__ == "__main__":
    main()
