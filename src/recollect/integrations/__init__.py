"""Integrations with training tools, each loaded when it is first used; `import recollect` loads none of them."""

import importlib
import pkgutil


def __getattr__(name: str) -> object:
    if name in __dir__():
        return importlib.import_module(f"{__name__}.{name}")
    message = f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__dir__())}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return [info.name for info in pkgutil.iter_modules(__path__) if info.name != "extras"]
