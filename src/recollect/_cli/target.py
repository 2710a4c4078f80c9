"""Finding what the user names on the command line: a function in a module or a file, or a script."""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Self

from recollect._cli.screen import fail
from recollect._core.argument_text import with_article
from recollect._core.patterns import hint_nearest
from recollect._core.signatures import read_signature

_OTHERS = {
    ".ipynb": "a notebook: save it as a script (`jupyter nbconvert --to script`), or call recollect.profile in it",
    ".json": "not a script: to show a profile, use `recollect report`; to plan for one, `recollect plan`",
}
_FORMS = "expected module:function, path/to/file.py:function or path/to/script.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A file that is run as a program."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function of the user's.

    Attributes:
        name: as the user named it.
        function: itself.
        module: that it is in.
        given: whole numbers that it is called with, by the names of its parameters.
    """

    name: str
    function: Callable[..., Any]
    module: ModuleType
    given: Mapping[str, int] = field(default_factory=dict)

    @property
    def call(self) -> Callable[[], Any]:
        """The function without arguments: they are given, or variables of its module."""
        return _bind_arguments(functools.partial(self.function, **self.given), self.module, self.name)

    def give(self, given: Mapping[str, int]) -> Self:
        """The function with some of its arguments.

        Raises:
            typer.Exit: it has no such parameters; said on standard error.
        """
        takes = read_signature(self.function).parameters
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
        unknown = [name for name in given if name not in takes and not takes_all]
        if unknown:
            own = f"it takes {', '.join(takes)}" if takes else "it takes no arguments"
            fail(f"{self.name} has no parameter {unknown[0]!r}; {own}{hint_nearest(unknown[0], takes)}")
        return replace(self, given={**self.given, **given})

    def find_default(self, name: str) -> int | None:
        """The whole number that a parameter is by itself; None if it is none."""
        default = read_signature(self.function).parameters[name].default
        return default if isinstance(default, int) else None


def find_target(text: str, *, lets_open: bool = False) -> Script | Function:
    """What the text names. Imports its module, with the folder that Python itself would look in first.

    A module is looked for from the current folder on, as `python -m` does; what a file imports, from its own folder on,
    as `python file.py` does.

    Args:
        text: that names it.
        lets_open: whether a function may have arguments that are given later.

    Raises:
        typer.Exit: there is no such thing; said on standard error.
    """
    if Path(text).is_file():
        _check_ending(Path(text))
        return Script(path=Path(text))
    where, colon, name = text.rpartition(":")
    if Path(where).is_file():
        _check_ending(Path(where))
    if not colon or not where or not all(part.isidentifier() for part in name.split(".")):
        if text.endswith(".py"):
            _refuse_path(Path(text))
        fail(f"target {text!r}: {_FORMS}{_guess(text)}")
    is_file = where.endswith(".py") or len(Path(where).parts) > 1 or Path(where).is_file()
    module = _load_file(Path(where)) if is_file else _load_module(where)
    found = Function(name=text, function=_find_function(module, name, where), module=module)
    if not lets_open:
        _ = found.call  # refuses what it cannot be called with
    return found


def _guess(text: str) -> str:
    """What to end an error with that refuses a text: the target that it may stand for, if there is such a file."""
    if Path(f"{text}.py").is_file():
        return f"; did you mean '{text}.py', or a function in it, '{text}:function'?"
    where, dot, name = text.rpartition(".")
    if dot and name.isidentifier() and Path(f"{where.replace('.', '/')}.py").is_file():
        return f"; did you mean '{where}:{name}'?"
    return ""


def _check_ending(path: Path) -> None:
    what = _OTHERS.get(path.suffix)
    if what is not None:
        fail(f"{path} is {what}")


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        here = [path.stem for path in Path().iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
        near = hint_nearest(error.name or name, here)
        fail(f"no module named {error.name!r}, neither in {Path.cwd()} nor installed{near}")
    return module


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        _refuse_path(path)
    sys.path.insert(0, str(path.resolve().parent))
    name = path.stem if path.stem not in sys.modules and path.stem.isidentifier() else f"_file_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        fail(f"{path} is not a Python file: {_FORMS}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


def _find_function(module: ModuleType, name: str, where: str) -> Any:
    found: Any = module
    for count, part in enumerate(name.split(".")):
        if not hasattr(found, part):
            if count:
                where = f"{where}:{'.'.join(name.split('.')[:count])}"
            its = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            own = [key for key in its if getattr(vars(found)[key], "__module__", None) == module.__name__]
            near = hint_nearest(part, its) or (f"; it has {', '.join(own)}" if own else "")
            fail(f"{where} has no {part!r}{near}")
        found = getattr(found, part)
    if not callable(found):
        kind = with_article(type(found).__name__)
        fail(f"{name!r} of {where} is {kind}; expected a function that can be called without arguments")
    return found


def _bind_arguments(function: Callable[..., Any], module: ModuleType, text: str) -> Callable[[], Any]:
    """The function without arguments; those that it needs are variables of its module: ``train_step(model, batch)``."""
    from torch import nn  # not at import: help does not wait for torch

    raw = function.func if isinstance(function, functools.partial) else function
    if isinstance(raw, nn.Module):
        kind = with_article(type(raw).__name__)
        fail(f"{text} is a model, {kind}, without its inputs: name a function that returns (model, *inputs)")
    try:
        signature = read_signature(function)
    except ValueError:  # built in, without a signature
        return raw
    try:
        signature.bind()
    except TypeError:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [one for one in signature.parameters.values() if one.default is one.empty and one.kind in kinds]
        missing = [one.name for one in needed if not hasattr(module, one.name)]
        if missing or inspect.isclass(raw):
            lacks = f", and {module.__name__} has no {' and no '.join(map(repr, missing))}" if missing else ""
            fail(
                f"{text} takes arguments, {signature}{lacks}: define module variables with these names, or name a "
                "function without arguments that makes the model and its inputs and either returns them or runs the "
                "step"
            )
        return functools.partial(function, *(getattr(module, one.name) for one in needed))
    return function


def _refuse_path(path: Path) -> NoReturn:
    folder = path.parent
    if not folder.is_dir():
        fail(f"there is no file {path}, nor a folder {folder}")
    fail(f"there is no file {path}{hint_nearest(path.name, [entry.name for entry in folder.glob('*.py')])}")
