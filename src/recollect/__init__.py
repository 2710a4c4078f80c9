"""Make training fit in memory: forget activations in forward, recollect them in backward.

Start here:
    - `fit(model, batch, budget="40GiB")` makes a training step stay within a memory budget.
    - `apply(model)` recomputes a model's repeated blocks; `remove(model)` undoes it.
    - `checkpoint(fn)` does the same for one function or module; `offload()` moves activations to host memory or disk.
    - `profile(model, *inputs)` measures where the memory goes; `report(profile)` shows it and suggests what would help.
    - `with on_oom():` says what was in memory when it ran out.
    - `recollect.policies` says which values to keep, and `recollect.compat` has the names and signatures of
      torch.utils.checkpoint.

The command line does the same for a training script: `recollect --help`.
"""

# If torch is not loaded yet, names are loaded on first use: importing torch takes seconds, and `recollect --help` does
# not need it.

import importlib
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

_ON_FIRST_USE = ("compat", "integrations")

if TYPE_CHECKING or "torch" in sys.modules:
    from recollect._public import *  # noqa: F403
    from recollect._public import __all__ as __all__


def __getattr__(name: str) -> object:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"recollect.{name}")
    if name == "_public":  # asked for by the import below, while it is loaded
        raise AttributeError(name)
    from recollect import _public

    if name != "__all__" and name not in _public.__all__:
        message = f"module 'recollect' has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])
    globals().update({known: getattr(_public, known) for known in _public.__all__}, __all__=_public.__all__)
    return globals()[name]


def __dir__() -> list[str]:
    from recollect import _public

    own = (name for name in globals() if name.startswith("_"))  # not what this file imports
    return sorted({*own, *_public.__all__, *_ON_FIRST_USE})
