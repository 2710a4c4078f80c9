"""Make training fit in memory: forget activations in forward, recollect them in backward.

If torch is not loaded yet, names are loaded on first use: importing torch takes seconds, and `recollect --help` does
not need it.
"""

import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

if TYPE_CHECKING or "torch" in sys.modules:
    from recollect._public import *  # noqa: F403
    from recollect._public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        if name == "_public":  # asked for by the import below, while it is loaded
            raise AttributeError(name)
        from recollect import _public

        if name != "__all__" and name not in _public.__all__:
            message = f"module 'recollect' has no attribute {name!r}"
            raise AttributeError(message, name=name)
        globals().update({known: getattr(_public, known) for known in _public.__all__}, __all__=_public.__all__)
        return globals()[name]

    def __dir__() -> list[str]:
        from recollect import _public

        return sorted({*globals(), *_public.__all__})
