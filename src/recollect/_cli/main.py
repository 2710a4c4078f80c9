"""The entry of the command line: it loads the commands, or says what is missing for them."""

import importlib
import os
import sys

from recollect._cli.endings import INTERRUPTED, WRONG_USAGE, loading

_NEEDED = ("rich", "typer")


def main() -> None:
    """Run the command that the arguments of the process name, and exit with its code.

    Nothing else of the package imports this, so that `import recollect` needs neither typer nor rich.
    """
    _fill_closed_streams()
    try:
        _run()
    except KeyboardInterrupt:  # while the commands are loaded; once one runs, it says itself how it ends
        raise SystemExit(INTERRUPTED) from None


def _run() -> None:
    with loading():
        missing = [name for name in _NEEDED if not _is_there(name)]
        if missing:
            sys.stderr.write(
                f"the command line needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
                'installed. Run: pip install "recollect[cli]"\n'
            )
            raise SystemExit(WRONG_USAGE)
        from recollect._cli.app import app  # without torch, which commands load when they run

    app(prog_name="recollect")


def _fill_closed_streams() -> None:
    """Let a stream that the shell closed, as ``>&-`` does, lead nowhere: Python has None in its place.

    Nor can a file that is opened later get the stream's number, and what others write there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 (open to the end)


def _is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
