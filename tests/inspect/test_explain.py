"""`explain`: what is said of regions, alike and different, run and not run."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision, Site, policies
from recollect._report.explained import Explanation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return x + y


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    @recollect.checkpoint(policy=policies.save_matmuls, name="decorated")
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))


class Inside(nn.Module):
    """Makes its regions while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        policy = policies.save_matmuls
        y: Tensor = recollect.checkpoint(lambda x: self.up(x).tanh(), policy=policy, name="inside")(x)
        return y


def data(rows: int = 4) -> Tensor:
    return torch.ones(rows, 8, requires_grad=True)


def step(fn: Callable[..., Tensor], *args: Any) -> None:
    fn(*args).sum().backward()


def text_of(explanation: Explanation) -> str:
    """The text, without line numbers of this file."""
    assert all(len(line) <= 100 for line in str(explanation).splitlines())
    return re.sub(r"test_explain.py:\d+", "t.py", str(explanation))


# One region


def test_a_region_lists_each_site_under_the_rule_that_decided() -> None:
    region = recollect.checkpoint(Block(), policy=policies.save_matmuls)
    for _ in range(3):
        step(region, data())
    assert (
        text_of(recollect.explain(region))
        == """\
region 'Block' under save_matmuls, called 3 times
 bytes  matched  what                where
kept by save_matmuls
 512 B        3  aten.addmm.default  up, t.py
 128 B        3  aten.addmm.default  down, t.py
recomputed, no rule
 512 B        3  aten.tanh.default   t.py
 128 B        3  aten.add.Tensor     t.py
kept 2 values, 640 B; recomputed 2 values, 640 B
recomputed by replaying what backward asks for, from 1 kept result (512 B)"""
    )


def test_the_data_are_there_to_be_read() -> None:
    region = recollect.checkpoint(Block(), policy=policies.save_matmuls)
    step(region, data())
    ((call,),) = [explained.calls for explained in recollect.explain(region).regions]
    assert [(site.what, site.decision, site.by, site.module) for site in call.sites] == [
        ("aten.addmm.default", Decision.SAVE, "save_matmuls", "up"),
        ("aten.tanh.default", Decision.RECOMPUTE, "no rule", ""),
        ("aten.addmm.default", Decision.SAVE, "save_matmuls", "down"),
        ("aten.add.Tensor", Decision.RECOMPUTE, "no rule", ""),
    ]
    assert [(site.shapes, site.dtypes, site.bytes) for site in call.kept] == [
        (((4, 32),), ("float32",), 512),
        (((4, 8),), ("float32",), 128),
    ]
    assert (call.calls, call.arguments, call.replayed_from) == (1, "float32[4, 8]", (1, 512))


def test_it_is_readable_where_it_is_shown_and_not_printed() -> None:
    region = recollect.checkpoint(Block(), policy=policies.save_matmuls)
    step(region, data())
    assert repr(recollect.explain(region)) == str(recollect.explain(region))


def test_sites_that_follow_each_other_and_are_alike_are_one_line() -> None:
    def grow(x: Tensor) -> Tensor:
        x = x * 2.0 * 3.0
        x = x * 4.0
        return (x @ x).exp()

    region = recollect.checkpoint(grow, policy=policies.save_matmuls)
    step(region, torch.ones(8, 8, requires_grad=True))
    text = str(recollect.explain(region))
    assert re.search(r"\n 768 B +1  aten\.mul\.Tensor x3  test_explain\.py:(\d+)-\d+\n", text)


def test_views_are_left_out() -> None:
    region = recollect.checkpoint(lambda x: (x.t() @ x).t().sin(), policy=policies.save_matmuls)
    step(region, data())
    (call,) = recollect.explain(region).regions[0].calls
    assert [site.what for site in call.sites] == ["aten.mm.default", "aten.sin.default"]


def test_what_several_outputs_weigh_is_summed() -> None:
    region = recollect.checkpoint(lambda x: x.max(0).values.exp(), policy=policies.save_ops("aten.max.dim"))
    step(region, data())
    (call,) = recollect.explain(region).regions[0].calls
    (site,) = call.kept
    assert (site.shapes, site.dtypes, site.bytes) == (((8,), (8,)), ("float32", "int64"), 8 * 12)
    assert "kept 2 values, 96 B" in str(recollect.explain(region))


def test_a_rule_of_ones_own_is_named_for_both_decisions() -> None:
    def keep_first(site: Site) -> Decision:
        return Decision.SAVE if site.op == "aten.mm.default" and site.call == 0 else Decision.RECOMPUTE

    region = recollect.checkpoint(lambda x: (x @ x @ x).sin(), policy=keep_first)
    step(region, torch.ones(4, 4, requires_grad=True))
    text = str(recollect.explain(region))
    assert "\nkept by keep_first\n" in text
    assert "\nrecomputed by keep_first\n" in text


def test_what_is_kept_by_default_is_summed_apart() -> None:
    def route(x: Tensor) -> Tensor:
        values, _ = x.topk(2)
        return (values @ values.t()).exp()

    region = recollect.checkpoint(route, policy=policies.save_matmuls)
    step(region, data())
    text = str(recollect.explain(region))
    assert "\nkept by default: routing results\n" in text
    assert "\nof these kept by default: 2 values, 96 B\n" in text


def test_blocks_that_are_kept_whole_come_first() -> None:
    region = recollect.checkpoint(Block(), policy=policies.save_modules("up"))
    for _ in range(2):
        step(region, data())
    assert (
        text_of(recollect.explain(region))
        == """\
region 'Block' under save_modules('up'), called 2 times
 bytes  matched  what                where
kept whole by save_modules('up')
 512 B        2  module 'up'
recomputed, no rule
 512 B        2  aten.tanh.default   t.py
 128 B        2  aten.addmm.default  down, t.py
 128 B        2  aten.add.Tensor     t.py
kept 1 block whole: 512 B of results, plus what they save themselves
kept 0 values, 0 B; recomputed 3 values, 768 B
recomputed by running the function again without the blocks that are kept"""
    )


def test_why_a_function_is_run_again_is_said() -> None:
    region = recollect.checkpoint(lambda x: (x @ x).mul_(2.0).sin(), policy=policies.save_matmuls)
    step(region, torch.ones(4, 4, requires_grad=True))
    assert str(recollect.explain(region)).endswith(
        "\nrecomputed by running the function again without the operators that are kept; it has no program: it\n"
        "    writes into tensors in place"
    )


def test_calls_are_counted_however_they_were_recomputed() -> None:
    region = recollect.checkpoint(lambda x: (x @ x).mul_(2.0).sin(), policy=policies.save_matmuls)
    for _ in range(4):
        step(region, torch.ones(4, 4, requires_grad=True))
    assert recollect.explain(region).regions[0].calls[0].calls == 4


def test_other_kinds_of_call_are_summed_up() -> None:
    region = recollect.checkpoint(Block(), policy=policies.save_matmuls)
    for rows in (4, 2, 4):
        step(region, data(rows))
    text = str(recollect.explain(region))
    assert text.startswith("region 'Block' under save_matmuls, called 2 times\ncalled with float32[4, 8]\n")
    assert text.endswith("\ncalled with float32[2, 8], 1 time: kept 2 values, 320 B; recomputed 2 values, 320 B")


def test_flags_and_evaluation_mode_tell_calls_apart() -> None:
    class Flagged(nn.Module):
        def forward(self, x: Tensor, flag: bool, scale: float) -> Tensor:
            return (x @ x * scale).sin() if flag else (x @ x).cos()

    region = recollect.checkpoint(module := Flagged(), policy=policies.save_matmuls)
    step(region, torch.ones(4, 4, requires_grad=True), True, 2.0)
    module.eval()
    step(region, torch.ones(4, 4, requires_grad=True), False, 2.0)
    calls = recollect.explain(region).regions[0].calls
    assert sorted(call.arguments for call in calls) == [
        "float32[4, 4], False, float, in evaluation mode",
        "float32[4, 4], True, float",
    ]


def test_long_names_and_policies_stay_within_the_width() -> None:
    names = [f"aten.{op}.default" for op in ("mm", "bmm", "addmm", "baddbmm", "sin", "cos", "exp", "log", "tanh")]
    inner: nn.Module = Block()
    for _ in range(12):
        inner = nn.Sequential(nn.Sequential(inner))
    region = recollect.checkpoint(inner, policy=policies.strictly(policies.save_ops(*names)))
    step(region, data())
    text = text_of(recollect.explain(region))
    assert text.startswith("region 'Sequential' under strictly(save_ops('aten.mm.default', 'aten.bmm.default',\n    ")
    assert "..." in text


# Several regions


def test_regions_that_are_alike_are_shown_once() -> None:
    model = nn.Sequential(*(Block() for _ in range(6)))
    for block in model:
        step(recollect.checkpoint(block, policy=policies.save_matmuls), data())
    text = str(recollect.explain(model))
    assert text.startswith("region 'Block' under save_matmuls, called 1 time\n6 identical regions: 0, 1 ... 5\n")
    assert text.count("kept by") == 1
    assert "\nin all 6 regions: kept 3.75 KiB; recomputed 3.75 KiB\n" in text
    assert [region.paths for region in recollect.explain(model).regions] == [(str(n),) for n in range(6)]


def test_alike_regions_may_have_been_called_more_or_less_often() -> None:
    model = nn.Sequential(Block(), Block())
    for block in (model[0], model[1], model[1]):
        step(recollect.checkpoint(block, policy=policies.save_matmuls), data())
    text = str(recollect.explain(model))
    assert "called 1-2 times\n2 identical regions: 0, 1\n" in text
    assert " 512 B      1-2  aten.addmm.default" in text


def test_alike_regions_may_have_met_their_kinds_of_call_in_another_order() -> None:
    model = nn.Sequential(Block(), Block())
    for block, rows in ((model[0], 4), (model[0], 4), (model[0], 2), (model[1], 2), (model[1], 2), (model[1], 4)):
        step(recollect.checkpoint(block, policy=policies.save_matmuls), data(rows))
    text = str(recollect.explain(model))
    assert "called 1-2 times\n2 identical regions: 0, 1\ncalled with float32[4, 8]\n" in text
    assert "\ncalled with float32[2, 8], 1-2 times: " in text


def test_regions_that_differ_are_shown_apart() -> None:
    model = nn.Sequential(Block(), Block())
    step(recollect.checkpoint(model[0], policy=policies.save_matmuls), data())
    step(recollect.checkpoint(model[1], policy=policies.save_ops("aten.tanh.default")), data())
    first, second = str(recollect.explain(model)).split("\n\n")
    assert first.startswith("region 'Block' under save_matmuls, called 1 time\nat module '0'\n")
    assert second.startswith("region 'Block' under save_ops('aten.tanh.default'), called 1 time\nat module '1'\n")


def test_a_region_is_explained_under_its_own_policy_and_a_module_under_all() -> None:
    block = Block()
    one = recollect.checkpoint(block, policy=policies.save_matmuls)
    other = recollect.checkpoint(block, policy=policies.save_all)
    step(one, data())
    step(other, data())
    assert [region.policy for region in recollect.explain(one).regions] == ["save_matmuls"]
    assert [region.policy for region in recollect.explain(other).regions] == ["save_all"]
    assert [region.policy for region in recollect.explain(block).regions] == ["save_matmuls", "save_all"]


@pytest.mark.parametrize(("kind", "name"), [(Decorated, "decorated"), (Inside, "inside")])
def test_regions_in_the_code_of_a_model_are_found(kind: type[nn.Module], name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), kind())
    step(model, data())
    (region,) = recollect.explain(model).regions
    assert (region.name, region.paths, region.policy) == (name, ("1",), "save_matmuls")


def test_a_method_is_explained_through_its_module() -> None:
    block = Block()
    step(recollect.checkpoint(block.forward, policy=policies.save_matmuls), data())
    assert recollect.explain(block).regions == recollect.explain(nn.ModuleList([block])[0]).regions


def test_a_function_is_explained_bare_wrapped_and_decorated() -> None:
    def wave(x: Tensor) -> Tensor:
        return (x @ x).sin()

    region = recollect.checkpoint(wave, policy=policies.save_matmuls)
    step(region, torch.ones(4, 4, requires_grad=True))
    assert recollect.explain(wave) == recollect.explain(region)
    assert [explained.name for explained in recollect.explain(wave).regions] == ["wave"]


def test_builtins_are_told_apart() -> None:
    step(recollect.checkpoint(torch.erfc, policy=policies.save_all), data())
    assert [region.name for region in recollect.explain(torch.erfc).regions] == ["erfc"]
    with pytest.raises(ValueError, match=r"^no part of erfinv has run"):
        recollect.explain(torch.erfinv)


# Nothing to explain


def test_a_region_that_never_ran_says_so() -> None:
    region = recollect.checkpoint(Block(), policy=policies.save_matmuls)
    with torch.no_grad():
        region(data())
    assert str(recollect.explain(region)) == "region 'Block' has not run under save_matmuls yet"


def test_a_region_that_failed_at_once_has_not_run() -> None:
    def fail(_: Tensor) -> Tensor:
        raise KeyError

    region = recollect.checkpoint(fail, policy=policies.save_matmuls)
    with pytest.raises(KeyError):
        region(data())
    assert str(recollect.explain(region)) == str(recollect.explain(fail))
    assert str(recollect.explain(region)) == "region 'fail' has not run under save_matmuls yet"


def test_a_region_without_a_policy_says_so() -> None:
    region = recollect.checkpoint(Block())
    step(region, data())
    assert str(recollect.explain(region)) == "region 'Block' has no policy: all of it is recomputed"


def test_a_model_whose_regions_have_not_run_says_so() -> None:
    model = nn.Sequential(Block(), Block())
    handle = recollect.apply(model, policies.save_matmuls)
    said = "Sequential has 2 regions under a policy; none has run yet outside of compiled code"
    assert str(recollect.explain(model)) == str(recollect.explain(handle)) == said


def test_what_has_no_region_is_refused() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its whole text is below)
        recollect.explain(nn.Sequential(Block()))
    assert str(caught.value) == (
        "no part of Sequential has run as a region under a policy.\n"
        "Call recollect.apply(model, policy=...), run forward with grad mode on, then ask again."
    )
    with pytest.raises(ValueError, match=r"\nWrap it in recollect\.checkpoint\(GELU, policy=\.\.\.\), run forward"):
        recollect.explain(nn.GELU())


def test_regions_without_a_policy_are_not_taken_for_none() -> None:
    model = nn.Sequential(Block(), Block())
    with recollect.apply(model):
        assert str(recollect.explain(model)) == "Sequential has 2 regions without a policy: all of them are recomputed"


def test_what_can_be_no_region_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^recollect\.explain expects a region, a function or a module, not int 3$"):
        recollect.explain(3)  # type: ignore[arg-type]
