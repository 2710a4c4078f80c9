"""`import recollect`, and the first region after it, load nothing but the standard library on top of torch."""

import functools
import json
import subprocess
import sys

# Modules of other packages that recollect may load, by how their names begin, each with why it cannot be avoided.
ALLOWED = (
    # torch loads NumPy, but not its generator: a region must know where that stands before it is drawn from first.
    "numpy.random",
    "_cython_",
    "cython_runtime",
)

PLAIN_STEP = """
x = torch.ones(2, requires_grad=True)
def function(x): return x.sin().cos()
function(x).backward(torch.ones(2))  # torch itself loads sympy when it is given gradients, as the reentrant engine does
"""

FIRST_CALLS = {
    "native": "recollect.checkpoint(function)(x).sum().backward()",
    "compat": "recollect.compat.checkpoint(function, x, use_reentrant=False).sum().backward()",
    "compat reentrant": "recollect.compat.checkpoint(function, x, use_reentrant=True).sum().backward()",
}


def modules_loaded_by(*actions: str) -> list[list[str]]:
    """Names, from a fresh interpreter that has imported torch, the foreign modules that each action loads."""
    program = ["import json, sys, torch", "found = []"]
    for action in actions:
        program += ["before = set(sys.modules)", action, "found.append(sorted(set(sys.modules) - before))"]
    program.append("print(json.dumps(found))")
    done = subprocess.run([sys.executable, "-c", "\n".join(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [[name for name in names if is_foreign(name)] for names in json.loads(done.stdout)]


def is_foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return top != "recollect" and top not in sys.stdlib_module_names and not module.startswith(ALLOWED)


@functools.cache
def loaded() -> dict[str, list[str]]:
    """What each loads, one after another in one process; the last two are foreign, so the check can fail."""
    actions = {
        "import": "import recollect, recollect.compat",
        "plain step": PLAIN_STEP,
        **FIRST_CALLS,
        "part of torch": "import torch.utils.benchmark",
        "package": "import rich",
    }
    return dict(zip(actions, modules_loaded_by(*actions.values()), strict=True))


def test_import_and_the_first_regions_load_nothing_foreign() -> None:
    names = ["import", *FIRST_CALLS]
    assert {name: loaded()[name] for name in names} == {name: [] for name in names}


def test_the_check_can_fail() -> None:
    assert "torch.utils.benchmark" in loaded()["part of torch"]
    assert "rich" in loaded()["package"]
