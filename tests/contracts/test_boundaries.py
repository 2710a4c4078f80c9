"""Borders that import-linter cannot draw, checked on the syntax tree of every module in src.

The guards see imports and dotted uses of imported names. They do not see strings given to `getattr` or `import_module`.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

REPLACED = ("torch.utils.checkpoint", "torch.distributed.algorithms._checkpoint", "torch.distributed._composable")
SHARED_WITH_COMPAT = {"torch.utils.checkpoint.CheckpointPolicy"}
MAY_TOUCH_PRIVATE = ("recollect._core.torch_private", "recollect._compile")
FREE_OF_TORCH = (
    "recollect._plan",
    "recollect._report",
    "recollect._core.argument_text",
    "recollect._core.alternatives",
    "recollect._core.calls",
    "recollect._core.decisions",
    "recollect._core.documents",
    "recollect._core.errors",
    "recollect._core.families",
    "recollect._core.forecasts",
    "recollect._core.gains",
    "recollect._core.held",
    "recollect._core.levers",
    "recollect._core.numbers",
    "recollect._core.pace",
    "recollect._core.plan_text",
    "recollect._core.profile_text",
    "recollect._core.profiles",
    "recollect._core.patterns",
    "recollect._core.plans",
    "recollect._core.queues",
    "recollect._core.spelling",
    "recollect._core.timeline",
    "recollect._core.timetables",
    "recollect._core.units",
)

Guard = Callable[[str, str], list[str]]


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def used_names(source: str) -> Iterator[str]:
    """Yields the dotted name of everything imported and of every attribute chain that starts at an import."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            # Relative imports are ruff's to refuse.
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = []
            value: ast.expr = node
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in bound:
                yield ".".join([bound[value.id], *reversed(parts)])


def uses_of_what_we_replace(module: str, source: str) -> list[str]:
    if module == "recollect._bench.rivals":  # which measures it
        return []
    shares = is_within(module, "recollect.compat", "recollect._core.torch_private.partitioner")
    allowed = SHARED_WITH_COMPAT if shares else set()
    return [name for name in used_names(source) if is_within(name, *REPLACED) and not is_within(name, *allowed)]


def private_uses_of_torch(module: str, source: str) -> list[str]:
    if is_within(module, *MAY_TOUCH_PRIVATE):
        return []
    return [name for name in used_names(source) if is_within(name, "torch") and is_private(name)]


def ways_to_torch(module: str, source: str) -> list[str]:
    """Imports of torch, or of a module of ours that may import it, in a module that must not."""
    if not is_within(module, *FREE_OF_TORCH):
        return []
    return [
        name
        for name in used_names(source)
        if is_within(name, "torch") or (is_within(name, "recollect") and not is_within(name, *FREE_OF_TORCH))
    ]


GUARDS: list[Guard] = [uses_of_what_we_replace, private_uses_of_torch, ways_to_torch]


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_the_walk_finds_the_package() -> None:
    assert {"recollect", "recollect._core"} <= {module for module, _ in modules()}


@pytest.mark.parametrize("guard", GUARDS)
def test_no_module_crosses_the_border(guard: Guard) -> None:
    crossings = [f"{path}: {name}" for module, path in modules() for name in guard(module, path.read_text("utf-8"))]
    assert crossings == []


@pytest.mark.parametrize(
    ("guard", "module", "source"),
    [
        (uses_of_what_we_replace, "recollect._apply", "import torch.utils.checkpoint"),
        (uses_of_what_we_replace, "recollect._apply", "import torch.utils.checkpoint as c"),
        (uses_of_what_we_replace, "recollect._apply", "from torch.utils import checkpoint"),
        (uses_of_what_we_replace, "recollect._apply", "import torch\nf = torch.utils.checkpoint.checkpoint"),
        (uses_of_what_we_replace, "recollect._apply", "from torch.utils.checkpoint import CheckpointPolicy"),
        (uses_of_what_we_replace, "recollect.compat", "from torch.utils.checkpoint import checkpoint"),
        (uses_of_what_we_replace, "recollect.compat", "from torch.utils.checkpoint import *"),
        (uses_of_what_we_replace, "recollect.compat", "def f():\n  import torch.distributed._composable"),
        (private_uses_of_torch, "recollect._recompute", "import torch._C"),
        (private_uses_of_torch, "recollect._recompute", "from torch import _C"),
        (private_uses_of_torch, "recollect._recompute", "from torch.utils._pytree import tree_map"),
        (private_uses_of_torch, "recollect._recompute", "import torch as t\nt._C._get_tracing_state()"),
        (private_uses_of_torch, "recollect._recompute", "from torch import utils\nutils._pytree.tree_map"),
        (private_uses_of_torch, "recollect._core.pytree", "import torch\ntorch.autograd._enable_record_function"),
        (ways_to_torch, "recollect._plan.solvers.greedy", "import torch"),
        (ways_to_torch, "recollect._core.errors", "def f():\n    from torch.nn import Module"),
        (ways_to_torch, "recollect._report.table", "from recollect._core import scope"),
    ],
)
def test_each_guard_can_fail(guard: Guard, module: str, source: str) -> None:
    assert guard(module, source) != []


@pytest.mark.parametrize(
    ("guard", "module", "source"),
    [
        (uses_of_what_we_replace, "recollect.compat", "from torch.utils.checkpoint import CheckpointPolicy"),
        (uses_of_what_we_replace, "recollect._apply", "import torch.utils.checkpointing_of_another_kind"),
        (private_uses_of_torch, "recollect._core.torch_private.rng", "import torch._C"),
        (private_uses_of_torch, "recollect._compile", "import torch._higher_order_ops"),
        (private_uses_of_torch, "recollect._recompute", "import torch\ntorch.__version__\ntorch.nn.Linear(1, 1)._x"),
        (ways_to_torch, "recollect._plan.budget", "import math\nfrom recollect._core import plans"),
        (ways_to_torch, "recollect._recompute.region", "import torch"),
    ],
)
def test_each_guard_lets_the_rest_pass(guard: Guard, module: str, source: str) -> None:
    assert guard(module, source) == []
