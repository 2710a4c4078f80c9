"""An operator is named by overload; a name of several or of none is refused, with those that are near."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect._policy.ops import Op, parse_op, parse_ops


class Twice(torch.autograd.Function):
    pass


@torch.library.custom_op("rcl_policy_ops::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    return x / 2


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (torch.ops.aten.mm.default, "aten.mm.default"),
        (torch.ops.aten.add.Tensor, "aten.add.Tensor"),
        ("aten.mm.default", "aten.mm.default"),
        ("aten::mm.default", "aten.mm.default"),
        ("aten::add.Tensor", "aten.add.Tensor"),
        (torch.ops.higher_order.cond, "cond"),
        ("flex_attention", "flex_attention"),
        ("higher_order.flex_attention", "flex_attention"),
        (halve, "rcl_policy_ops.halve.default"),
        ("rcl_policy_ops::halve.default", "rcl_policy_ops.halve.default"),
    ],
)
def test_an_operator_has_many_spellings_and_one_name(op: Any, name: str) -> None:
    assert parse_op(op) == Op(name)
    assert repr(parse_op(op)) == repr(name)


def test_a_function_is_an_operator_by_its_class() -> None:
    assert parse_op(Twice) == Op("Twice", Twice)
    assert repr(parse_op(Twice)) == "Twice"


def test_operators_are_counted_once() -> None:
    assert parse_ops(["aten.mm.default", torch.ops.aten.mm.default, Twice, Twice]) == (
        Op("aten.mm.default"),
        Op("Twice", Twice),
    )


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (torch.ops.aten.add, "'aten.add' has the overloads Tensor, Scalar, Scalar_out, out: write 'aten.add.Tensor'"),
        ("aten.add", "'aten.add' has the overloads Tensor, Scalar, Scalar_out, out: write 'aten.add.Tensor'"),
        ("aten::add", "'aten::add' has the overloads Tensor, Scalar, Scalar_out, out: write 'aten.add.Tensor'"),
        (
            "rcl_policy_ops::halve",
            "'rcl_policy_ops::halve' has the overload default: write 'rcl_policy_ops.halve.default'",
        ),
        (
            "aten.add.tensor",
            "aten.add has no overload 'tensor', only Tensor, Scalar, Scalar_out, out: write 'aten.add.Tensor'",
        ),
        (
            "rcl_policy_ops.halv.default",
            "no operator is named 'rcl_policy_ops.halv.default'; did you mean 'rcl_policy_ops.halve.default'?",
        ),
        (
            "rcl_policy_ops.zzz.default",
            "no operator is named 'rcl_policy_ops.zzz.default'; none under 'rcl_policy_ops' has a similar name",
        ),
        (
            "rcl_policy_op.halve.default",
            (
                "no operator is named 'rcl_policy_op.halve.default': nothing is registered under "
                "'rcl_policy_op' (did you mean 'rcl_policy_ops'?).\n"
                "If a package registers it, import that package first."
            ),
        ),
        (
            "zzz::halve",
            (
                "no operator is named 'zzz::halve': nothing is registered under 'zzz'.\n"
                "If a package registers it, import that package first."
            ),
        ),
    ],
)
def test_a_name_of_several_or_of_none_is_refused(op: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared whole)
        parse_op(op)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("aten.mmm.default", "'aten.mm.default'"),
        ("mm", "'aten.mm.default'"),
        ("flex_atention", "'flex_attention'"),
        ("aten.mm.default.default", "'aten.mm.default'"),
    ],
)
def test_the_nearest_name_comes_first(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"no operator is named '{name}'; did you mean {near}"):
        parse_op(name)


@pytest.mark.parametrize("name", ["", ".", "aten.", ".mm", "aten..", "::", "aten"])
def test_half_a_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no operator is named"):
        parse_op(name)


EXPECTED = (
    "expected an operator as torch.ops.aten.mm.default, by its name 'aten.mm.default', or as a subclass of "
    "torch.autograd.Function; not "
)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (3, f"{EXPECTED}int 3"),
        (torch.autograd.Function, f"{EXPECTED}the class Function"),
        (nn.Linear, f"{EXPECTED}the class Linear.\nTo keep modules, use save_modules."),
        (
            torch.mm,
            f"{EXPECTED}builtin_function_or_method mm.\nThe operator beneath it may be 'aten.mm.default'.",
        ),
        (Twice.apply, f"{EXPECTED}method apply"),
        (["aten.mm.default"], "expected operators one by one, not as a list: write save_ops(*ops)"),
    ],
)
def test_what_is_no_operator_is_refused(op: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        parse_op(op)
    assert str(caught.value) == text
