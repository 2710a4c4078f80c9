"""The error where the package that an integration needs is not installed."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(package: str, *, extra: str) -> ModuleType:
    """The package.

    Args:
        package: its name.
        extra: the extra of ours that installs it.

    Raises:
        ImportError: it cannot be imported.

    >>> require("transformer", extra="transformers")
    Traceback (most recent call last):
    ...
    ImportError: recollect.integrations.transformers needs transformer, which cannot be imported (No module named
    'transformer'). Run: pip install "recollect[transformers]"
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        message = (
            f"recollect.integrations.{extra} needs {package.partition('.')[0]}, which cannot be imported ({error}). "
            f'Run: pip install "recollect[{extra}]"'
        )
        raise ImportError(message, name=package) from error
