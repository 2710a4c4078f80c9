"""The entry of the command line: it loads the commands, or says what is missing for them."""

import importlib
import sys

from recollect._cli.endings import WRONG_USAGE

_NEEDED = ("rich", "typer")


def main() -> None:
    """Run the command that the arguments of the process name, and exit with its code.

    Nothing else of the package imports this, so that `import recollect` needs neither typer nor rich.
    """
    missing = [name for name in _NEEDED if not _is_there(name)]
    if missing:
        sys.stderr.write(
            f'the command line needs {" and ".join(missing)}, not installed here: pip install "recollect[cli]"\n'
        )
        raise SystemExit(WRONG_USAGE)
    from recollect._cli.app import app

    app(prog_name="recollect")


def _is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
