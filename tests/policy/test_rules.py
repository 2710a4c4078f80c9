"""Each rule saves what it matches, is silent about the rest, and is named by the call that makes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from recollect import policies
from recollect._core.decisions import Decision, Site
from recollect._core.torch_private.ops import higher_order_names, overload_names
from recollect._policy.base import Policy, Verdict
from recollect._policy.rules import SaveOps
from recollect.policies import flops, flops_per_byte, nbytes
from tests.policy.sites import MM, SIN, site


class Twice(torch.autograd.Function):
    pass


def is_wide(site: Site) -> bool:
    return bool(site.shape) and site.shape[-1] > 8


NAMES = {**{name: getattr(policies, name) for name in policies.__all__}, "is_wide": is_wide, "Twice": Twice}

RULES: list[tuple[Policy, str, list[Site], list[Site]]] = [
    (policies.save_all, "save_all", [MM, SIN], []),
    (policies.save_matmuls, "save_matmuls", [MM, site("aten.addmm.default")], [SIN, site("aten.convolution.default")]),
    (
        policies.save_attention,
        "save_attention",
        [site("aten._scaled_dot_product_flash_attention_for_cpu.default"), site("flex_attention")],
        [MM, site("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")],
    ),
    (
        policies.save_ops(torch.ops.aten.sin.default, "aten.cos.default"),
        "save_ops('aten.sin.default', 'aten.cos.default')",
        [SIN, site("aten.cos.default", call=3, output=1)],
        [MM, site("aten.sin.out")],
    ),
    (policies.save_ops(Twice), "save_ops(Twice)", [site("Twice")], [SIN]),
    (
        policies.save_every("aten.mm.default", 2),
        "save_every('aten.mm.default', 2)",
        [MM, site("aten.mm.default", call=2)],
        [SIN, site("aten.mm.default", call=1)],
    ),
    (
        policies.save_every(["aten.mm.default", Twice], 3),
        "save_every(('aten.mm.default', Twice), 3)",
        [MM, site("Twice", call=3)],
        [SIN, site("Twice", call=2)],
    ),
    (
        policies.save_every("aten.mm.default", 2, start=3),
        "save_every('aten.mm.default', 2, start=3)",
        [site("aten.mm.default", call=3), site("aten.mm.default", call=5)],
        [MM, SIN, site("aten.mm.default", call=1), site("aten.mm.default", call=4)],
    ),
    (policies.save_larger_than(511), "save_larger_than(511)", [MM, SIN], [site(bytes=511), site()]),
    (policies.save_larger_than("1 KiB"), "save_larger_than('1KiB')", [site(bytes=1025)], [site(bytes=1024)]),
    (policies.save_if(flops_per_byte > 1), "save_if(flops_per_byte > 1)", [MM], [SIN, site()]),
    (
        policies.save_if((flops > 1000) & (nbytes < 4096)),
        "save_if((flops > 1000) & (nbytes < 4096))",
        [MM],
        [SIN, site(flops=2000, bytes=5000)],
    ),
    (policies.save_if(is_wide), "save_if(is_wide)", [MM], [site(shape=(8,)), site()]),
    (policies.save_random, "save_random", [site(is_random=True)], [MM]),
    (policies.save_routing, "save_routing", [site(is_routing=True)], [MM]),
    (policies.save_collectives, "save_collectives", [site(is_collective=True)], [MM]),
]


@pytest.mark.parametrize(("rule", "text", "saved", "left"), RULES, ids=[text for _, text, _, _ in RULES])
class TestEveryRule:
    def test_saves_what_it_matches(self, rule: Policy, text: str, saved: list[Site], left: list[Site]) -> None:
        assert [rule.judge(one) for one in saved] == [Verdict(Decision.SAVE, by=text)] * len(saved)
        assert [rule.judge(one) for one in left] == [None] * len(left)
        assert {rule(one) for one in left} <= {Decision.RECOMPUTE}

    def test_is_named_by_its_call(self, rule: Policy, text: str, saved: list[Site], left: list[Site]) -> None:
        del saved, left
        assert repr(rule) == text
        assert rule.labels == (text,)
        again = eval(text, dict(NAMES))
        assert again == rule
        assert hash(again) == hash(rule)

    def test_is_asked_about_operators(self, rule: Policy, text: str, saved: list[Site], left: list[Site]) -> None:
        del text, saved, left
        assert rule.keeps_defaults
        assert rule.within("anywhere") is rule
        assert rule.answers_all is (rule is policies.save_all)


def test_no_two_rules_are_equal() -> None:
    rules = [rule for rule, *_ in RULES]
    assert len(set(rules)) == len(rules)


def test_save_nothing_says_nothing_and_needs_nothing() -> None:
    assert policies.save_nothing.judge(MM) is None
    assert policies.save_nothing(MM) is Decision.RECOMPUTE
    assert policies.save_nothing.labels == ()
    assert repr(policies.save_nothing) == "save_nothing"


def test_functions_are_told_to_the_engine() -> None:
    assert policies.save_ops("aten.mm.default", Twice).functions == (Twice,)
    assert policies.save_every(Twice, 2).functions == (Twice,)
    assert policies.save_matmuls.functions == ()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older versions lack some, which does no harm")
@pytest.mark.parametrize("rule", [policies.save_matmuls, policies.save_attention], ids=repr)
def test_our_own_names_are_those_of_operators(rule: SaveOps) -> None:
    import torch.nn.attention.varlen  # noqa: F401 (registers its operator)

    known = {*overload_names(), *higher_order_names()}
    assert [op.name for op in rule.ops if op.name not in known] == []


def test_every_dense_product_and_forward_attention_kernel_of_torch_is_known() -> None:
    known = {op.name for rule in (policies.save_matmuls, policies.save_attention) for op in rule.ops}
    listed = [name for name in overload_names() if name.startswith("aten.") and not name.endswith("out")]
    products = [name for name in listed if name.split(".")[1] in {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear"}]
    attention = [name for name in listed if "scaled_dot_product" in name and "backward" not in name]
    assert len(products) >= 6
    assert len(attention) >= 6
    assert {*products, *attention} - known == set()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (policies.save_ops, ValueError, "save_ops() names no operator; to save nothing, use save_nothing"),
        (
            lambda: policies.save_every([], 2),
            ValueError,
            "save_every names no operator; to save nothing, use save_nothing",
        ),
        *[
            (
                lambda n=n: policies.save_every("aten.mm.default", n),
                ValueError,
                f"save_every: n={n!r}: expected a whole number of at least 1",
            )
            for n in (0, -1, 2.0, True, "2")
        ],
        *[
            (
                lambda start=start: policies.save_every("aten.mm.default", 2, start=start),
                ValueError,
                f"save_every: start={start!r}: expected the number of a call, at least 0",
            )
            for start in (-1, 1.0, True)
        ],
        (lambda: policies.save_larger_than(-1), ValueError, "size -1: a number of bytes cannot be negative"),
        *[
            (
                lambda size=size: policies.save_larger_than(size),
                ValueError if isinstance(size, str) else TypeError,
                f"size {size!r}: expected bytes as a whole number, or as text like '512 KB' or '1.5 GiB'",
            )
            for size in ("", "1", "MiB", "-1MiB", "1 XiB", "1.MiB", "1MiB or so", 1.5, True, None)
        ],
    ],
)
def test_what_cannot_be_meant_is_refused(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == text
