"""Where in the user's code an operator runs: the module, by path, and the source line, read off the Python stack."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType
from weakref import ref

import torch
from torch import nn

from recollect._core.authors import Role, is_a_layers, is_of_torch, is_of_user, role_of
from recollect._core.patterns import plain_path
from recollect._core.torch_private.composites import CODES
from recollect._core.torch_private.engine import ENGINE_CODE

_TORCH_CHECKPOINT = str(PurePath(torch.__file__).parent / "utils" / "checkpoint.py")
_DYNAMO = str(PurePath("_dynamo", "eval_frame.py"))
_CONTEXT_LINES = 4
_ASSIGNS_TO_PART = frozenset(dis.opmap[name] for name in ("STORE_SUBSCR", "STORE_SLICE") if name in dis.opmap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in the user's code an operator runs."""

    module: str
    line: str
    stack: tuple[str, ...]

    def __str__(self) -> str:
        """Where, to follow the name of an operator: `` in layers.3.mlp, model.py:41``."""
        return f"{f' in {self.module}' if self.module else ''}{f', {self.line}' if self.line else ''}"


@functools.lru_cache(maxsize=2**12)
def _name_of(file: str) -> str:
    return PurePath(file).name


def is_recomputed_by_torch(depth: int) -> bool:
    """Whether ``torch.utils.checkpoint`` is recomputing, `depth` frames above this call; asked inside of backward."""
    frame: FrameType | None = sys._getframe(depth + 1)  # noqa: SLF001
    while frame is not None and frame.f_code is not ENGINE_CODE:
        if frame.f_code.co_filename == _TORCH_CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def calling_instruction(depth: int) -> tuple[int, int]:
    """Which instruction of which function calls torch, `depth` frames above this call, while that function runs.

    Functions of torch that are written in Python, such as those of ``torch.nn.functional``, are looked through, but for
    attention, whose calls count for themselves.
    """
    frame = _calling_frame(sys._getframe(depth + 1))  # noqa: SLF001
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


def uses_torchscript(depth: int) -> bool:
    """Whether the same function knows functions of TorchScript by name: nobody sees the calls of torch inside of them.

    Those that it reaches otherwise, as attributes of something, are not found.
    """
    frame = _calling_frame(sys._getframe(depth + 1))  # noqa: SLF001
    if frame is None:
        return False
    known = frame.f_globals
    return any(isinstance(known.get(name), torch.jit.ScriptFunction) for name in frame.f_code.co_names)


def assigns_to_part(depth: int) -> bool:
    """Whether the same function is at ``x[index] = y``, which gives nothing back."""
    frame = _calling_frame(sys._getframe(depth + 1))  # noqa: SLF001
    return frame is not None and frame.f_code.co_code[frame.f_lasti] in _ASSIGNS_TO_PART


def _calling_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        code = frame.f_code
        if code in CODES or is_a_layers(code.co_filename) or is_of_user(code, frame.f_globals):
            return frame
        frame = frame.f_back
    return None


class Places:
    """Finds places within one region; remembers the paths of modules it has met, by the modules' ids.

    Args:
        prefix: what stands before each path.
        roots: the region's own modules, whose paths are `prefix` itself; by default the outermost module met.

    Attributes:
        saw_compiled: whether a place was inside a function compiled by torch.compile.
    """

    __slots__ = ("_has_roots", "_known", "_paths", "_prefix", "saw_compiled")

    def __init__(self, prefix: str = "", roots: Iterable[nn.Module] = ()) -> None:
        self._prefix = prefix
        self._paths: dict[int, str] = {}
        self._known: dict[int, ref[nn.Module]] = {}
        self.saw_compiled = False
        for root in roots:
            self.learn(root, prefix)
        self._has_roots = bool(self._paths)

    def find(self, depth: int) -> Place:
        """The place of whoever called `depth` frames above this call; stops at the region's own frames."""
        frame: FrameType | None = sys._getframe(depth + 1)  # noqa: SLF001
        modules: list[nn.Module] = []
        stack: list[str] = []
        while frame is not None:
            code = frame.f_code
            if code.co_name == "_call_impl" and isinstance(owner := frame.f_locals.get("self"), nn.Module):
                modules.append(owner)
            elif role_of(frame) is Role.REGION:
                break
            elif is_of_torch(code.co_filename):
                self.saw_compiled = self.saw_compiled or code.co_filename.endswith(_DYNAMO)
            elif len(stack) < _CONTEXT_LINES and is_of_user(code, frame.f_globals):
                stack.append(f"{_name_of(code.co_filename)}:{frame.f_lineno} in {code.co_qualname}")
            frame = frame.f_back
        line = stack[0].split(" in ")[0] if stack else ""
        return Place(module=self._path(modules), line=line, stack=tuple(stack))

    def locate(self, depth: int) -> tuple[str, str]:
        """The path of the module and the line of whoever called `depth` frames above this call, wherever that is.

        Unlike `find` it looks through regions, up to the step itself, and stops at what it has found. Inside of
        backward it stops at the engine: who started the pass did not call this. Outside of it it stops at what runs
        the step, such as `recollect.profile`: the line that asked for the profile is not part of the step.
        """
        frame: FrameType | None = sys._getframe(depth + 1)  # noqa: SLF001
        modules: list[nn.Module] = []
        line = ""
        while frame is not None and not (line and modules and id(modules[-1]) in self._paths):
            code = frame.f_code
            if code is ENGINE_CODE or role_of(frame) is Role.RUNNER:
                break
            if code.co_name == "_call_impl":
                if isinstance(owner := frame.f_locals.get("self"), nn.Module):
                    modules.append(owner)
            elif not line and is_of_user(code, frame.f_globals):
                line = f"{_name_of(code.co_filename)}:{frame.f_lineno}"
            frame = frame.f_back
        return self._path(modules), line

    def _path(self, modules: list[nn.Module]) -> str:
        """The path of the innermost of these modules, which come innermost first.

        One that is not part of the others, such as an activation that all models share, has its class's name behind
        the path of the innermost one that is known.
        """
        if not modules:
            return ""
        if not self._has_roots and not any(id(module) in self._paths for module in modules):
            self.learn(modules[-1], self._prefix)
        path = next((self._paths[id(module)] for module in modules if id(module) in self._paths), self._prefix)
        if id(modules[0]) in self._paths:
            return path
        name = type(modules[0]).__name__
        return f"{path}.{name}" if path else name

    def path_of(self, number: int) -> str | None:
        """The path of the module with this id; None if it is not known."""
        return self._paths.get(number)

    def learn(self, root: nn.Module, prefix: str) -> None:
        """Remember a module and its parts by their paths, which begin with a prefix; who is known keeps its path."""
        for name, module in root.named_modules():
            name = plain_path(name)  # noqa: PLW2901
            path = f"{prefix}.{name}" if prefix and name else name or prefix
            if self._paths.setdefault(id(module), path) == path:
                self._known.setdefault(id(module), ref(module))

    def modules(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules that are known and alive, with their paths."""
        for key, weak in self._known.items():
            module = weak()
            if module is not None:
                yield module, self._paths[key]
