"""The modules of a model as rules see them: by name, whatever wrappers stand around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import jit, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from recollect._apply.forwards import forward_of, is_called
from recollect._core.patterns import did_you_mean, nearest_paths, plain_path

_COMPILED = "_orig_mod"
_CHECKPOINTED = "_checkpoint_wrapped_module"
_MOST_SHOWN = 3
_MOST_NAMES = 8  # of one module: where modules refer to each other, there are exponentially many


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A place in a model: one module, or one and the wrappers around it."""

    names: tuple[str, ...]
    """Where it is found, without wrappers; several if it is shared."""
    chain: tuple[nn.Module, ...]
    """The wrappers, outermost first, and the module itself."""

    @property
    def name(self) -> str:
        """Where it is found first."""
        return self.names[0]

    @property
    def module(self) -> nn.Module:
        """The module that a region is made of: within FSDP's wrapper, around torch.compile's."""
        for module in self.chain:
            if _COMPILED in _children_of(module):
                return module
        return self.chain[-1]

    @property
    def is_called(self) -> bool:
        """Whether its calls can be seen: a list of modules has none."""
        return is_called(self.chain[-1])

    @property
    def is_compiled(self) -> bool:
        """Whether its inside is code of torch.compile, in which calls of modules cannot be seen."""
        return any(_COMPILED in _children_of(module) for module in self.chain)

    @property
    def refusal(self) -> str | None:
        """Why no region can be made of it; None if one can."""
        if any(_CHECKPOINTED in _children_of(module) for module in self.chain):
            wrapper = next(type(m).__name__ for m in self.chain if _CHECKPOINTED in _children_of(m))
            return f"it is already wrapped in a {wrapper}: remove the wrapper, or leave this module out"
        if isinstance(self.chain[-1], jit.ScriptModule):
            return "it is compiled by TorchScript and has no Python code to run again: use the original module"
        for path, part in self.chain[-1].named_modules():
            if isinstance(part, jit.ScriptModule):
                return f"its part '{path}' is compiled by TorchScript: use the original module there"
        if hasattr(type(forward_of(type(self.chain[-1]))), "__set__"):
            return "its class defines forward as a property, which cannot be replaced on an instance"
        return None

    def inside(self, others: Mapping[str, Target]) -> Iterator[tuple[Target, str]]:
        """The others, given by name, that it is a part of, each with its path as seen from there."""
        for name in self.names:
            for end in _ends_of_parts(name):
                around = others.get(name[:end])
                if around is not None and around is not self:
                    yield around, name[end:].removeprefix(".")


def _ends_of_parts(name: str) -> Iterator[int]:
    """Where the paths of the modules end that a name leads through, from the model itself on."""
    if name:
        yield 0
    yield from (place for place, character in enumerate(name) if character == ".")


def by_name(targets: Iterable[Target]) -> dict[str, Target]:
    """Each target under each of its names."""
    return {name: target for target in targets for name in target.names}


def find_targets(model: nn.Module) -> list[Target]:
    """All modules of a model, in its own order."""
    chains: dict[str, list[nn.Module]] = {}
    visits: Counter[nn.Module] = Counter()
    for name, module in _walk(model, "", (), visits):
        chains.setdefault(name, []).append(module)
    names: dict[nn.Module, list[str]] = {}
    for name, chain in chains.items():
        names.setdefault(chain[-1], []).append(name)
    return [Target(names=tuple(found), chain=tuple(chains[found[0]])) for found in names.values()]


def _walk(
    module: nn.Module, name: str, around: tuple[nn.Module, ...], visits: Counter[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Each module with its name, under some of its names if there are very many; not again inside itself."""
    visits[module] += 1
    if module in around or visits[module] > _MOST_NAMES:
        return
    yield name, module
    is_replicated = isinstance(module, DistributedDataParallel | DataParallel)
    for part, child in _children_of(module).items():
        if child is not None:
            plain = "" if is_replicated and part == "module" else plain_path(part)
            yield from _walk(child, ".".join(filter(None, (name, plain))), (*around, module), visits)


def _children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """What a module holds by which name. What TorchScript compiled keeps its own elsewhere, and is seen as one."""
    return {} if isinstance(module, jit.ScriptModule) else vars(module)["_modules"]


def describe_unmatched(pattern: str, model: nn.Module, targets: list[Target]) -> str:
    """What to say of a pattern that matches no module."""
    names = [name for target in targets if target.is_called for name in target.names if name]
    near = nearest_paths(_generalise(pattern.replace("\\", "")), map(_generalise, names))
    found = f"; {did_you_mean(near[:_MOST_SHOWN])}" if near else ", which has no modules inside"
    if pattern in (type(target.chain[-1]).__name__ for target in targets):
        found = "; to match the class, pass it without quotes"
    return f"pattern {pattern!r} matches no module of {type(model).__name__}{found}"


def _generalise(name: str) -> str:
    """``layers.3.attn`` -> ``layers.*.attn``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
