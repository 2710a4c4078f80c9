"""Operators with several results, views and aliases of kept values, and results of blocks in all their forms."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import recollect
from recollect import Decision, policies
from recollect._policy.base import PolicyLike
from tests.selective.comparing import SIZE, assert_like_plain, square, squares

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")

# Several results


def native_layer_norm(x: Tensor) -> Tensor:
    y, mean, scale = torch.native_layer_norm(x, [SIZE], None, None, 1e-5)
    return y * mean.sin() * scale.exp()


def product_of(results: Any) -> Tensor:
    """Something that needs every result."""
    total = torch.ones(())
    for result in results:
        total = total * result.sin()
    return total


MANY: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "topk": ("aten.topk.default", lambda x: x.topk(2).values.sin()),
    "topk, both": ("aten.topk.default", lambda x: product_of(x.topk(2))),
    "sort": ("aten.sort.default", lambda x: product_of(x.sort(-1))),
    "max over a dimension": ("aten.max.dim", lambda x: product_of(x.max(-1))),
    "layer norm": ("aten.native_layer_norm.default", lambda x: F.layer_norm(x, [SIZE]).sin()),
    "layer norm, all three": ("aten.native_layer_norm.default", native_layer_norm),
    "batch norm": ("aten.native_batch_norm.default", lambda x: F.batch_norm(x, None, None, training=True).sin()),
    "variance and mean": ("aten.var_mean.correction", lambda x: product_of(torch.var_mean(x, -1))),
    "cummax": ("aten.cummax.default", lambda x: product_of(x.cummax(0))),
    "split": ("aten.split.Tensor", lambda x: torch.cat([part.sin() for part in x.split(2)])),
    "unbind": ("aten.unbind.int", lambda x: torch.stack([part.sin() for part in x.unbind()])),
    "split with copies": (
        "aten.split_copy.Tensor",
        lambda x: product_of(torch.ops.aten.split_copy.Tensor(x, 2)),
    ),
    "foreach": (
        "aten._foreach_mul.Scalar",
        lambda x: torch.stack([y.sin() for y in torch._foreach_mul([x, x.exp()], 2.0)]),
    ),
    "attention": (
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]).sin(),
    ),
    "qr": ("aten.linalg_qr.default", lambda x: product_of(torch.linalg.qr(x))),
    "lu": ("aten.linalg_lu_factor_ex.default", lambda x: torch.linalg.lu_factor(x + 4 * torch.eye(SIZE))[0].sin()),
}


@pytest.mark.parametrize("many", MANY)
@pytest.mark.parametrize("twice", [False, True])
def test_operators_with_several_results_are_kept(many: str, twice: bool) -> None:
    op, fn = MANY[many]
    assert_like_plain(lambda x, w: fn(x @ w).exp().sin(), policies.save_ops(op), squares(2), twice=twice)


@pytest.mark.parametrize("many", MANY)
@pytest.mark.parametrize("policy", [policies.save_all, policies.strictly(policies.save_matmuls)], ids=str)
def test_operators_with_several_results_under_other_policies(many: str, policy: PolicyLike) -> None:
    _, fn = MANY[many]
    assert_like_plain(lambda x, w: fn(x @ w).exp().sin(), policy, squares(2))


def test_one_kept_result_of_several_is_enough() -> None:
    def second_only(site: Any) -> Decision:
        return Decision.SAVE if site.op == "aten.sort.default" and site.output == 1 else Decision.RECOMPUTE

    assert_like_plain(lambda x, w: MANY["sort"][1](x @ w), policies.strictly(second_only), squares(2))


# Views and aliases

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "transpose": lambda h: h.t().sin(),
    "two of one": lambda h: h[:2].sin() * h[2:].cos(),
    "a view of a view": lambda h: h.view(2, -1)[0].view(SIZE, -1).sin() @ h[:2],
    "expanded": lambda h: h[:1].expand(SIZE, SIZE).sin() * h,
    "diagonal": lambda h: h.diagonal().sin() * h.exp(),
    "as strided": lambda h: h.as_strided((2, 2), (2, 1), 1).sin(),
    "detached": lambda h: h.detach().sin() * h.cos(),
    "alias": lambda h: h.view_as(h).sin() * h.alias().cos() if hasattr(h, "alias") else h.view_as(h).sin(),
    "contiguous": lambda h: h.contiguous().sin() * h.t().contiguous().cos(),
    "reshape": lambda h: h.reshape(-1).sin(),
    "real": lambda h: torch.view_as_complex(h.view(SIZE, -1, 2)).conj().imag.sin(),
    "returned too": lambda h: (h, h.t(), h.sin()),
}
KEEP_H: dict[str, PolicyLike] = {
    "operator": policies.save_matmuls,
    "all": policies.save_all,
    "name": policies.save_names("h"),
    "block": policies.save_names("product"),
    "views": policies.save_ops("aten.t.default", "aten.view.default", "aten.slice.Tensor", "aten.alias.default"),
    "block and operators": policies.first_match(policies.save_names("product"), policies.save_ops("aten.sin.default")),
}


@recollect.region("product")
def product(x: Tensor, w: Tensor) -> Tensor:
    return recollect.name(x @ w, "h")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("policy", KEEP_H.values(), ids=KEEP_H)
@pytest.mark.parametrize("twice", [False, True])
def test_views_of_kept_values(view: str, policy: PolicyLike, twice: bool) -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        return VIEWS[view](product(x.tanh(), w))

    assert_like_plain(fn, policy, squares(2), twice=twice)


@pytest.mark.parametrize("policy", KEEP_H.values(), ids=KEEP_H)
def test_kept_blocks_that_return_what_they_were_given_or_a_view_of_it(policy: PolicyLike) -> None:
    same = recollect.region("product")(lambda x: x)
    turned = recollect.region("product")(lambda x: x.t())
    both = recollect.region("product")(lambda x: (x, x[0], x.exp()))

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = turned(same(x.sin() @ w)).tanh()
        a, b, c = both(y)
        z: Tensor = (a * b + c).sin() * same(w).exp()
        return z

    assert_like_plain(fn, policy, squares(2))


# Forms of results


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda h: (h.sin(), h.exp()),
    "list in dict": lambda h: {"a": [h.sin()], "b": h.exp(), "n": 3},
    "named tuple": lambda h: Pair(h.sin(), None),
    "without grad": lambda h: (h.sin(), h.detach().exp(), (h > 0)),
    "one tensor twice": lambda h: [h.sin()] * 2,
    "numbers": lambda h: (h.sin(), 2, 0.5, "text", None, True),
    "half": lambda h: h.bfloat16().sin(),
    "sum": lambda h: h.sin().sum(),
}


def fold(result: Any) -> Tensor:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.float().tanh().expand(SIZE, SIZE) for leaf in leaves]).prod(0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["region", "module"])
@pytest.mark.parametrize("twice", [False, True])
def test_kept_blocks_return_results_of_any_form(form: str, way: str, twice: bool) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(SIZE, SIZE))

        def forward(self, x: Tensor, *, scale: float) -> Any:
            return FORMS[form](x @ self.weight * scale)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: Tensor) -> Tensor:
            return fold(recollect.region("part")(self.part)(x.sin(), scale=2.0)).exp().sin()

    policy = policies.save_names("part") if way == "region" else policies.save_modules("part")
    assert_like_plain(Net(), policy, squares(1), twice=twice)


def test_a_kept_block_whose_result_hides_tensors_is_refused_in_words() -> None:
    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    part = recollect.region("part")(lambda x: Box(x.sin()))
    region = recollect.checkpoint(lambda x: part(x).value.exp(), name="f", policy=policies.save_names("part"))
    with pytest.raises(TypeError, match=r"region 'f': the policy keeps region 'part', but its result holds a Box"):
        region(square())
