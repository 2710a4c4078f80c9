"""What people write: policies and options spelled one way everywhere, and what to write in place of torch's options."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import recollect
from recollect import Decision, Site, policies
from recollect._apply.options import parse_choices
from recollect._policy.base import Policy
from recollect._profile.memory import LiveBytes
from tests.models import GPT
from tests.watching import Operators

TOKENS = torch.arange(14).reshape(2, 7)


def rows(handle: recollect.Applied) -> list[str]:
    return str(handle).splitlines()[2:]


@pytest.mark.parametrize("policy", ["selective", "full", policies.save_matmuls], ids=str)
def test_apply_takes_a_policy_as_checkpoint_does(policy: Any) -> None:
    model = GPT()
    with recollect.apply(model, policy) as first:
        by_position = rows(first)
    with recollect.apply(model, policy=policy) as second:
        assert rows(second) == by_position
    with recollect.apply(model, {"layers.*": {"policy": policy}}) as third:
        assert [row.split("  ")[2] for row in rows(third)] == [row.split("  ")[2] for row in by_position]
    with recollect.apply(model, policy=policy, every=2) as fourth:
        assert sum(place.is_region for place in fourth.places) == 2
    recollect.checkpoint(model.layers[0], policy=policy)(torch.ones(1, 3, 16)).sum().backward()


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("full", "rules='full' and policy='selective' both say what the repeated blocks keep; pass only one"),
        ("every:2", "rules='every:2' cannot be combined with policy=: write every=2, policy=..."),
        (
            {"layers.*": "full"},
            "these rules already say what each module keeps: put the policy there, as in {'layers.*': policy}",
        ),
    ],
)
def test_two_answers_to_one_question_are_refused(rules: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        recollect.apply(GPT(), rules, policy="selective")


def test_an_unknown_word_for_a_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy='fast': expected 'full', 'selective', one of recollect\.policies"):
        recollect.checkpoint(torch.sin, policy="fast")


@pytest.mark.parametrize("call", ["recollect.checkpoint", "recollect.apply"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"use_reentrant": False}, "use_reentrant=False: leave it out; there is only one engine"),
        ({"preserve_rng_state": True}, "preserve_rng_state=True: write preserve_rng="),
        (
            {"determinism_check": "none"},
            "determinism_check='none': write check='metadata' for 'default', or check='none'",
        ),
        ({"context_fn": None}, "context_fn=None: write policy=, as in policy=recollect.policies.save_matmuls"),
        ({"debug": True}, "debug=True: wrap the step in `with recollect.explain_mismatch():`"),
        ({"polcy": "full"}, "polcy='full': did you mean 'policy'?"),
    ],
)
def test_options_of_torch_and_misspelled_ones_say_what_to_write(call: str, options: Any, text: str) -> None:
    fn: Any = recollect.checkpoint if call == "recollect.checkpoint" else recollect.apply
    with pytest.raises(TypeError, match=re.escape(f"{call} has no option {text}")):
        fn(GPT(), **options)


def test_arguments_of_the_function_are_sent_to_what_is_returned() -> None:
    fn: Any = recollect.checkpoint
    with pytest.raises(TypeError, match=re.escape("as in recollect.checkpoint(fn)(x, name=value)")):
        fn(torch.sin, attention_mask=None)


def test_a_second_apply_names_what_takes_the_first_one_away() -> None:
    model = GPT()
    recollect.apply(model)
    with pytest.raises(ValueError, match=re.escape("Call recollect.remove(model), or remove() on what")):
        recollect.apply(model)
    recollect.remove(model)
    recollect.apply(model).remove()


def test_a_handle_can_be_explained() -> None:
    model = GPT()
    with recollect.apply(model) as handle:
        note = "recollect.apply: 4 regions in GPT: none has a policy, so all of them are recomputed"
        assert str(recollect.explain(handle)) == note
    with recollect.apply(model, policy=policies.save_matmuls) as handle:
        model(TOKENS).sum().backward()
        assert len(recollect.explain(handle).regions) == 4
    del model
    with pytest.raises(ValueError, match="the model of this handle has been freed"):
        recollect.explain(handle)


def test_a_handle_shows_itself_in_notebooks() -> None:
    class Odd(GPT):
        pass

    Odd.__name__ = "<Odd>"
    page = recollect.apply(Odd())._repr_html_()
    assert "4 regions in &lt;Odd&gt;" in page
    assert "<td>layers.0-3</td><td>Block</td><td>recompute</td><td>repeated blocks</td>" in page


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def test_selective_keeps_convolutions() -> None:
    model = nn.Sequential(*(Conv(4) for _ in range(3)))
    recollect.apply(model, "selective")
    x = torch.randn(2, 4, 5, 5)
    for _ in range(2):
        with Operators() as operators:
            model(x).sum().backward()
        norms = [name for name in operators.all if "batch_norm" in name and "backward" not in name]
        assert operators.all.count("convolution") == 6
        assert len(norms) > 6


class Bare(nn.Module):
    """Convolutions with ReLUs and no norms, as in super-resolution and tiny autoencoders."""

    def __init__(self, depth: int, *, inplace: bool = False) -> None:
        super().__init__()
        layers = (part for _ in range(depth) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace)))
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def peak_of(depth: int, rules: str | None, *, inplace: bool) -> int:
    model = nn.Sequential(*(Bare(depth, inplace=inplace) for _ in range(4)))
    if rules is not None:
        recollect.apply(model, rules)
    x = torch.randn(2, 4, 16, 16)
    for _ in range(3):
        model(x).sum().backward()
    with LiveBytes(include=model) as live:
        model(x).sum().backward()
    return live.peak_bytes


@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
def test_selective_holds_less_than_plain_where_nobody_saves_what_convolutions_give(inplace: bool) -> None:
    plain, full, selective = (peak_of(4, rules, inplace=inplace) for rules in (None, "full", "selective"))
    assert full < selective < plain


def test_selective_recomputes_all_of_two_bare_convolutions() -> None:
    with pytest.warns(UserWarning, match=r"(?s)keeps nothing in 4 regions of Sequential.*Use 'full' or 'every:2'\.$"):
        assert peak_of(2, "selective", inplace=False) == peak_of(2, "full", inplace=False)


@pytest.mark.parametrize(
    ("part", "keeps_all"),
    [
        (nn.ReLU(), False),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), False),
        (nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), False),
        (nn.Sequential(nn.BatchNorm2d(4), nn.SiLU()), True),
        (nn.Sigmoid(), False),
        *[(nn.Sequential(nn.BatchNorm2d(4), act()), True) for act in (nn.GELU, nn.ELU, nn.LeakyReLU, nn.Hardswish)],
        (nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), nn.GroupNorm(2, 4)), True),
    ],
)
def test_selective_keeps_every_convolution_only_where_more_is_saved_anyway(part: nn.Module, keeps_all: bool) -> None:
    policy = parse_choices(policy="selective").suited(nn.Sequential(nn.Conv2d(4, 4, 1), part)).policy
    assert kept_calls(policy, "aten.convolution.default") == ([0, 1, 2, 3, 4, 5] if keeps_all else [2, 4])


class Functional(nn.Module):
    """Calls functions, by an alias and by name, where others have modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.gelu = nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.gelu(nn.functional.silu(self.norm(self.conv(x))))
        return result


class WithoutNorm(Functional):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.gelu(nn.functional.relu(self.conv(x)))
        return result


class TwoCalls(WithoutNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return silu(self.conv(silu(x)))


@pytest.mark.parametrize(("block", "keeps_all"), [(Functional, True), (WithoutNorm, False), (TwoCalls, True)])
def test_selective_counts_functions_as_it_counts_modules(block: type[nn.Module], keeps_all: bool) -> None:
    policy = parse_choices(policy="selective").suited(block()).policy
    assert kept_calls(policy, "aten.convolution.default") == ([0, 1, 2, 3, 4, 5] if keeps_all else [2, 4])


@pytest.mark.parametrize(
    ("part", "kept"),
    [
        (nn.ReLU(), [1, 3, 5]),
        (nn.GELU(), [1, 3, 5]),
        (nn.Sequential(nn.LayerNorm(4), nn.GELU()), [0, 2, 4]),
        (nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), [0, 2, 4]),
    ],
)
def test_selective_keeps_no_single_product_whose_result_nobody_saves(part: nn.Module, kept: list[int]) -> None:
    policy = parse_choices(policy="selective").suited(nn.Sequential(nn.Linear(4, 4), part)).policy
    assert kept_calls(policy, "aten.addmm.default") == kept


def kept_calls(policy: Policy | None, op: str) -> list[int]:
    assert policy is not None
    sites = [Site(region="block", op=op, call=call) for call in range(6)]
    return [site.call for site in sites if policy(site) is Decision.SAVE]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * self.scale.weight.sum()).cumsum(0) + self.shift.bias


def test_selective_says_when_it_keeps_nothing_and_what_would_help() -> None:
    model = nn.Sequential(*(Gated() for _ in range(3)))
    recollect.apply(model, "selective")
    x = torch.randn(64, 4)
    with pytest.warns(UserWarning, match=r"'selective' keeps nothing in 3 regions of Sequential") as caught:
        sum(model(x).sum() for _ in range(3)).backward()
    assert len(caught) == 1
    assert re.search(r"policies\.save_ops\('aten\.[A-Za-z.]+'\), or use 'full'\.$", str(caught[0].message))
    with pytest.warns(UserWarning, match=r"'selective' keeps nothing in region 'Gated'"):
        recollect.checkpoint(Gated(), policy="selective")(x)


def test_the_table_says_what_a_plan_frees_and_costs() -> None:
    model = GPT()
    made = recollect.plan(recollect.profile(model, TOKENS, loss=torch.sum), budget="min")
    with recollect.apply(model, made) as handle:
        pattern = (
            r"frees [\d.]+ \w+ of a peak of [\d.]+ \w+ \(\d+%\), (costs \d+% more|takes \d+% less) time, as planned$"
        )
        assert re.search(pattern, str(handle))
        assert ", as planned</p>" in handle._repr_html_()
