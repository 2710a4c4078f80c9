"""`import recollect`, and the first region after it, load nothing but the standard library on top of torch."""

import json
import subprocess
import sys

import pytest

# Modules of other packages that recollect may load by name. Add one with the reason why it cannot be avoided.
ALLOWED: frozenset[str] = frozenset()

PLAIN_STEP = """
import torch
x = torch.ones(2, requires_grad=True)
def function(x): return x.sin().cos()
function(x).backward(torch.ones(2))  # torch itself loads sympy when it is given gradients, as the reentrant engine does
"""

FIRST_CALLS = {
    "native": "import recollect; recollect.checkpoint(function)(x).sum().backward()",
    "compat": "import recollect.compat as c; c.checkpoint(function, x, use_reentrant=False).sum().backward()",
    "compat reentrant": "import recollect.compat as c; c.checkpoint(function, x, use_reentrant=True).sum().backward()",
}


def modules_loaded_by(action: str, *, after: str) -> list[str]:
    """Names, from a fresh interpreter, the foreign modules that `action` loads and `after` has not."""
    program = "\n".join(
        [
            "import json, sys",
            after,
            "before = set(sys.modules)",
            action,
            "print(json.dumps(sorted(set(sys.modules) - before)))",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [name for name in json.loads(done.stdout) if is_foreign(name)]


def is_foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return top != "recollect" and top not in sys.stdlib_module_names and module not in ALLOWED


def test_import_loads_nothing_foreign() -> None:
    assert modules_loaded_by("import recollect, recollect.compat", after="import torch") == []


@pytest.mark.parametrize("call", FIRST_CALLS.values(), ids=FIRST_CALLS.keys())
def test_first_region_loads_nothing_foreign(call: str) -> None:
    assert modules_loaded_by(call, after=PLAIN_STEP) == []


@pytest.mark.parametrize("heavy", ["torch._dynamo", "rich"])
def test_the_check_can_fail(heavy: str) -> None:
    assert heavy in modules_loaded_by(f"import {heavy}", after="import torch")
