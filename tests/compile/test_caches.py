"""Compiled code that was stored is found again by the same policy, and never by another."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision, compat, policies
from recollect._compile import keys
from recollect._policy.base import PolicyLike, as_policy
from recollect._policy.presets import selective
from tests.compile.caching import ADDMM, MM, Bounded, f, named, run, save_products, under

# Dynamo looks at the .grad of every tensor that it meets.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:policy .* this step"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def in_region(word: str) -> Callable[..., Tensor]:
    @recollect.region(word)
    def first(x: Tensor, a: Tensor) -> Tensor:
        return torch.mm(x.detach(), a)

    def g(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.mm(torch.addmm(x, first(x, a), b), c)

    return recollect.checkpoint(g, policy=policies.save_names("kept"), name="g")


def larger_than(bound: int) -> PolicyLike:
    return lambda site: Decision.SAVE if site.bytes > bound else Decision.RECOMPUTE


def saving(*ops: str) -> PolicyLike:
    """By a closed-over container."""
    return lambda site: Decision.SAVE if site.op in ops else Decision.RECOMPUTE


def with_default(bound: int) -> PolicyLike:
    def policy(site: recollect.Site, bound: int = bound) -> Decision:
        return Decision.SAVE if site.bytes > bound else Decision.RECOMPUTE

    return policy


def torchs(policy: Any) -> Callable[..., Tensor]:
    """A policy of torch's kind, a list or a function."""

    def call(*args: Tensor) -> Tensor:
        contexts = functools.partial(compat.create_selective_checkpoint_contexts, policy)
        return compat.checkpoint(f, *args, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    return call


def saves(op: Any) -> Callable[..., bool]:
    return lambda _ctx, func, *_args, **_kwargs: func is op


def calling_another(bound: int) -> PolicyLike:
    def inner(site: recollect.Site) -> bool:
        return site.bytes > bound

    return lambda site: Decision.SAVE if inner(site) else Decision.RECOMPUTE


def written(source: str) -> PolicyLike:
    """A policy as a user's file has it, who then edits the file."""
    names: dict[str, Any] = {"SAVE": Decision.SAVE, "RECOMPUTE": Decision.RECOMPUTE, "__name__": "policies_of_a_user"}
    exec(textwrap.dedent(source), names)
    policy: PolicyLike = names["policy"]
    return policy


class Block(nn.Module):
    """A class that a policy may name."""


Other: type[nn.Module] = type("Block", (nn.Module,), {"__module__": "elsewhere"})

GLOBAL = """
bound = {bound}
def policy(site):
    return SAVE if site.bytes > bound else RECOMPUTE
"""
HELPER = """
def is_large(site):
    return site.bytes > {bound}
def policy(site):
    return SAVE if is_large(site) else RECOMPUTE
"""
SETTINGS = """
class Settings:
    bound = {bound}
def policy(site):
    return SAVE if site.bytes > Settings.bound else RECOMPUTE
"""
TABLE = """
bounds = {{"all": [{bound}]}}
def policy(site):
    return SAVE if site.bytes > bounds["all"][0] else RECOMPUTE
"""
PARTIAL = """
import functools
def judge(bound, site):
    return SAVE if site.bytes > bound else RECOMPUTE
policy = functools.partial(judge, {bound})
"""
METHOD = """
class Judge:
    def __init__(self, bound):
        self.bound = bound
    def judge(self, site):
        return SAVE if site.bytes > self.bound else RECOMPUTE
policy = Judge({bound}).judge
"""
INNER = """
def policy(site):
    return SAVE if any(size > {bound} for size in [site.bytes]) else RECOMPUTE
"""
SOURCES = {"global": GLOBAL, "helper": HELPER, "class": SETTINGS, "table": TABLE, "partial": PARTIAL}
SOURCES |= {"method": METHOD, "inner code": INNER}

CHANGES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "another of the catalogue": (under(policies.save_matmuls), under(policies.save_all)),
    "none": (under(None), under(policies.save_matmuls)),
    "another value closed over": (under(larger_than(0)), under(larger_than(10**6))),
    "another object": (under(Bounded(0)), under(Bounded(10**6))),
    "another list of torch's kind": (torchs([MM]), torchs([ADDMM])),
    "another function of torch's kind": (torchs(saves(MM)), torchs(saves(ADDMM))),
    "another name of a value": (named("kept"), named("other")),
    "another name of a block": (in_region("kept"), in_region("other")),
    "another region": (
        under(policies.per_region({"a": policies.save_all}), name="a"),
        under(policies.per_region({"a": policies.save_all}), name="b"),
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.usefixtures("folder")
def test_a_changed_policy_is_compiled_anew(kind: str) -> None:
    before, after = CHANGES[kind]
    assert run(before) == "miss"
    assert run(after) == "miss"  # what is found again, the next test shows


POLICIES: dict[str, tuple[PolicyLike, PolicyLike]] = {
    "another threshold": (policies.save_larger_than("1 KiB"), policies.save_larger_than("1 B")),
    "another predicate": (policies.save_if(policies.flops > 1), policies.save_if(policies.flops > 10**9)),
    "another operator": (policies.save_ops("aten.mm.default"), policies.save_ops("aten.addmm.default")),
    "another number": (policies.save_every("aten.mm.default", 2), policies.save_every("aten.mm.default", 1)),
    "another part": (
        policies.first_match(policies.save_random, policies.save_matmuls),
        policies.first_match(policies.save_random, policies.save_attention),
    ),
    "another class of that name": (policies.save_modules(Block), policies.save_modules(Other)),
    "another kind of block": (selective(), selective(holds_little=True, has_one_product=True)),
    "another value closed over": (larger_than(0), larger_than(10**6)),
    "another container closed over": (saving("aten.mm.default"), saving("aten.addmm.default")),
    "another default": (with_default(0), with_default(10**6)),
    "another function closed over": (calling_another(0), calling_another(10**6)),
    "another predicate function": (
        policies.save_if(lambda site: site.bytes > 0),
        policies.save_if(lambda site: site.bytes < 0),
    ),
    **{
        f"another {kind} in the user's file": (written(text.format(bound=0)), written(text.format(bound=10**6)))
        for kind, text in SOURCES.items()
    },
}


@pytest.mark.parametrize("kind", POLICIES)
def test_a_changed_policy_has_another_key(kind: str) -> None:
    """A graph holds it, and caches go by what a graph holds: the tests around this one show that."""
    before, after = (keys.key_of(as_policy(policy)) for policy in POLICIES[kind])
    assert before != after


SAME: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "catalogue": lambda: under(policies.save_matmuls),
    "made by a function": lambda: under(policies.save_larger_than("1 KiB")),
    "combined": lambda: under(policies.first_match(policies.save_matmuls, policies.save_larger_than(10))),
    "function": lambda: under(larger_than(5)),
    "container": lambda: under(saving("aten.mm.default")),
    "name": lambda: named("kept"),
    "class": lambda: under(policies.save_modules(Block)),
    "ready-made": lambda: under(selective()),
    "list of torch's kind": lambda: torchs([MM]),
    "function of torch's kind": lambda: torchs(save_products),
}


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.usefixtures("folder")
def test_an_equal_policy_finds_the_code_again(kind: str) -> None:
    assert run(SAME[kind]()) == "miss"
    assert run(SAME[kind]()) == "hit"


@pytest.mark.usefixtures("folder")
def test_code_that_was_compiled_by_other_rules_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in (None, policies.save_matmuls):
        assert run(under(policy)) == "miss"
        assert run(under(policy)) == "hit"
        with monkeypatch.context() as patch:
            patch.setattr(keys, "_RULES", "other")
            patch.setattr(keys, "_known", {})
            assert run(under(policy)) == "miss"


PROGRAM = """
import json
from recollect import Decision, policies
from tests.compile import caching as t
{made}
print(json.dumps([t.run(call) for call in calls]))
"""
MADE = """
def bounded(bound):
    return lambda site: Decision.SAVE if site.bytes > bound else Decision.RECOMPUTE
calls = [
    t.under(policies.save_larger_than({size!r})), t.under(bounded({bound})), t.named({word!r}),
    t.under(t.Bounded({bound})),
]
"""


def program_of(*values: dict[str, Any]) -> str:
    """Compiles each step once for each set of values, and prints what the cache had."""
    return "".join(PROGRAM.format(made=MADE.format(**one)) for one in values)


def read_found(printed: str) -> list[list[str]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("[")]


def run_elsewhere(program: str) -> list[list[str]]:
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return read_found(done.stdout)


@pytest.mark.usefixtures("folder")
def test_processes_share_code_by_equal_policies_and_by_no_others() -> None:
    same = {"size": "1 KiB", "bound": 5, "word": "kept"}
    changed = {"size": "1 B", "bound": 10**6, "word": "other"}
    assert run_elsewhere(program_of(same)) == [["miss"] * 4]
    # An object may read anything, so no process takes another's code for its own.
    assert run_elsewhere(program_of(same, changed)) == [["hit", "hit", "hit", "miss"], ["miss"] * 4]


def test_a_process_that_makes_policies_without_end_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_MOST", 4)
    for table in ("_policies", "_known"):
        monkeypatch.setattr(keys, table, {})
    made = [policies.save_if(policies.nbytes > n) for n in range(8)]
    known = [keys.key_of(policy) for policy in made]
    assert len(keys._policies) == len(keys._known) == 4
    assert keys.policy_of(known[-1]) is made[-1]
    with pytest.raises(recollect.CompileError, match="which is not known here"):
        keys.policy_of(known[0])
