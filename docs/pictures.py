"""Makes the pictures of reports and plans in these pages again: ``python docs/pictures.py``.

Both show the step of the small GPT that ``recollect demo`` trains, on this machine's CPU. Needs matplotlib, scipy, and
Chromium on PATH for the page of the plan.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import recollect
from recollect._cli.demo import ATTENTION, BUDGET_PERCENT, PLAIN, fit_run, make_rules, profile_run
from recollect._cli.planned import PlanFiles
from recollect._cli.small_gpt import train, use_one_thread

IMAGES = Path(__file__).parent / "images"
WIDTH, HEIGHT = 1200, 962
NO_NETWORK = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")


def main() -> None:
    use_one_thread()
    rules = make_rules()
    runs = train({name: rules[name] for name in (PLAIN, ATTENTION)})
    before = profile_run(runs[PLAIN], PLAIN)
    after = profile_run(runs[ATTENTION], "A small GPT, attention kept")
    recollect.report(after, IMAGES / "report.png", against=before)
    fitted = fit_run(runs[PLAIN], before.peak_bytes * BUDGET_PERCENT // 100, lambda *_: None)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        PlanFiles.check(Path("-"), page, quiet=True).write_page(fitted.plan, fitted.profile)
        photograph(page, IMAGES / "plan.png", profile=Path(folder) / "browser")


def photograph(page: Path, picture: Path, *, profile: Path) -> None:
    """Save what a browser shows of a page, from its top."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no chromium on PATH: the page of the plan cannot be photographed")
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *NO_NETWORK)
    size = (f"--window-size={WIDTH},{HEIGHT}", "--force-prefers-color-scheme=light", f"--user-data-dir={profile}")
    subprocess.run([browser, *flags, *size, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main()
