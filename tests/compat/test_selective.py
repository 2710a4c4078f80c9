"""Selective checkpointing with torch's names: what is kept, what is run again, and what is refused."""

import functools
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import compat
from recollect.compat import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from tests.collecting import collect_new, without_collector
from tests.contracts.stepping import (
    Derive,
    by_backward,
    by_backward_to_some,
    by_backward_twice,
    by_double_backward,
    is_same,
    plain_step,
    run_step,
)
from tests.corpus import CASES, Case
from tests.trying import try_all
from tests.watching import Operators, backward, what_is_in_force

aten = torch.ops.aten
SIN, COS, EXP, MM = aten.sin.default, aten.cos.default, aten.exp.default, aten.mm.default

Policy = Callable[..., Any]


def run(fn: Callable[..., Any], *args: Any, keep: Any, may_write: bool = False, **options: Any) -> Any:
    """Call a function as a region that keeps these operators, or what this policy says."""
    make = functools.partial(create_selective_checkpoint_contexts, keep, allow_cache_entry_mutation=may_write)
    return compat.checkpoint(fn, *args, use_reentrant=False, context_fn=make, **options)


def leaf(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, requires_grad=True)


def gradient(fn: Callable[..., Any], x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(fn(x, **options).sum(), x)[0]


def keep_all(_: SelectiveCheckpointContext, _op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def chain(x: Tensor) -> Tensor:
    return x.sin().cos().exp()


# The policy


def test_the_policy_is_asked_once_for_each_operator_in_forward_after_it_ran() -> None:
    asked: list[tuple[Any, bool, bool]] = []

    def policy(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        again = op(*args, **kwargs)
        asked.append((op, ctx.is_recompute, torch.equal(again, ctx.op_output)))
        return CheckpointPolicy.PREFER_RECOMPUTE

    y = run(chain, leaf(3), keep=policy)
    backward(y.sum(), keep=True)
    backward(y.sum())
    assert asked == [(SIN, False, True), (COS, False, True), (EXP, False, True)]


@pytest.mark.parametrize(
    ("answer", "again"),
    [
        (CheckpointPolicy.MUST_SAVE, []),
        (CheckpointPolicy.PREFER_SAVE, []),
        (True, []),
        (CheckpointPolicy.MUST_RECOMPUTE, ["sin"]),
        (CheckpointPolicy.PREFER_RECOMPUTE, ["sin"]),
        (False, ["sin"]),
    ],
)
def test_its_answer_says_whether_the_operator_runs_again(answer: Any, again: list[str]) -> None:
    with Operators() as operators:
        backward(run(chain, leaf(3), keep=lambda _, op, *_args: answer if op is SIN else False).sum())
    assert operators.again == [*again, "cos", "exp"]


def test_the_policy_enum_is_torchs_own() -> None:
    assert CheckpointPolicy is torch.utils.checkpoint.CheckpointPolicy


@pytest.mark.parametrize("answer", [None, 1, "save", 0.5, [True]], ids=repr)
def test_any_other_answer_is_refused(answer: Any) -> None:
    x, before = leaf(3), what_is_in_force()
    with pytest.raises(TypeError) as caught:
        run(chain, x, keep=lambda *_args: answer)
    assert str(caught.value) == (
        f"the policy answered {answer!r} for aten.sin.default; expected a CheckpointPolicy or a bool"
    )
    assert what_is_in_force() == before


def test_a_policy_may_be_a_partial_or_an_object() -> None:
    class Every:
        def __init__(self, which: Any) -> None:
            self.which = which

        def __call__(self, _: SelectiveCheckpointContext, op: Any, *_args: Any) -> bool:
            return op is self.which

    def policy(which: Any, _: SelectiveCheckpointContext, op: Any, *_args: Any) -> bool:
        return op is which

    for keep in (Every(COS), functools.partial(policy, COS)):
        with Operators() as operators:
            backward(run(chain, leaf(3), keep=keep).sum())
        assert operators.again == ["sin", "exp"]


def test_an_error_in_the_policy_is_the_users_and_leaves_nothing_behind() -> None:
    def policy(*_args: Any) -> bool:
        raise ZeroDivisionError

    x, before = leaf(3), what_is_in_force()
    with pytest.raises(ZeroDivisionError):
        run(chain, x, keep=policy)
    assert what_is_in_force() == before


def test_operators_that_the_policy_itself_runs_are_not_counted() -> None:
    def policy(ctx: SelectiveCheckpointContext, op: Any, *_args: Any) -> bool:
        return op is SIN and bool(ctx.op_output.sin().abs().sum() > 0)

    x = leaf(3)
    assert torch.equal(gradient(lambda x: run(chain, x, keep=policy), x), gradient(chain, x))


# Lists


def test_a_list_keeps_its_operators() -> None:
    with Operators() as operators:
        backward(run(lambda x: (x @ x).sin() @ x, leaf(3, 3), keep=[MM]).sum())
    assert operators.again == ["sin"]


@pytest.mark.parametrize(
    ("keep", "kind", "text"),
    [
        (
            [MM, aten.mm],
            ValueError,
            "aten.mm stands for several operators; write the one you mean: torch.ops.aten.mm.default, torch.ops.",
        ),
        (["aten.mm"], ValueError, "'aten.mm' is not an operator; write an overload such as torch.ops.aten.mm.default"),
        ([2], ValueError, "2 is not an operator; write an overload such as torch.ops.aten.mm.default"),
        (2, TypeError, "expected a list of operators or a policy function, not 2"),
        ((MM,), TypeError, f"expected a list of operators or a policy function, not {(MM,)!r}"),
    ],
)
def test_other_lists_are_refused(keep: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        create_selective_checkpoint_contexts(keep)
    assert str(caught.value).startswith(text)


def test_a_custom_operator_is_named_by_its_overload() -> None:
    @torch.library.custom_op("recollect_test::listed", mutates_args=())
    def listed(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(ValueError, match=r"write the operator itself: torch\.ops\.recollect_test\.listed\.default"):
        create_selective_checkpoint_contexts([listed])


# What can be kept


def test_an_operator_with_several_results_is_kept_whole() -> None:
    def fn(x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x * 2)
        values, _ = (x * variance * mean).topk(2)
        return values.exp()

    x = leaf(5)
    with Operators() as operators:
        ours = gradient(lambda x: run(fn, x, keep=[aten.var_mean.correction, aten.topk.default]), x)
    assert {"var_mean", "topk"} & set(operators.again) == set()
    assert torch.equal(ours, gradient(fn, x))


def test_results_that_are_no_tensors_are_kept_too() -> None:
    calls = []

    @torch.library.custom_op("recollect_test::with_extra", mutates_args=())
    def with_extra(x: Tensor) -> tuple[Tensor, int]:
        calls.append(1)
        return x.sin(), 2

    with_extra.register_autograd(lambda ctx, grad, _: grad * ctx.saved_tensors[0].cos(), setup_context=_save_first)

    def fn(x: Tensor) -> Tensor:
        y: Tensor
        y, factor = with_extra(x.exp())
        return torch.sin(y * factor * x.sum().item())

    x = leaf(3)
    op = torch.ops.recollect_test.with_extra.default
    with Operators() as operators:
        ours = gradient(lambda x: run(fn, x, keep=[op, aten._local_scalar_dense.default]), x)
    assert len(calls) == 1
    assert operators.all.count("_local_scalar_dense") == 1
    assert torch.equal(ours, gradient(fn, x))


def _save_first(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    ctx.save_for_backward(inputs[0])


def test_size_queries_and_marks_of_the_profiler_are_neither_asked_about_nor_kept() -> None:
    asked = set()

    def policy(_: SelectiveCheckpointContext, op: Any, *_args: Any) -> bool:
        asked.add(op)
        return True

    def fn(x: Tensor) -> Tensor:
        with torch.profiler.record_function("marked"):
            return x.sin().detach() * x.cos().view(x.size(0), -1)

    backward(run(fn, leaf(3, 2), keep=policy).sum())
    assert asked & compat.SAC_IGNORED_OPS == set()
    assert asked == {SIN, COS, aten.mul.Tensor, aten.view.default}


def test_operators_added_to_the_ignored_are_ignored() -> None:
    compat.SAC_IGNORED_OPS.add(SIN)
    try:
        with Operators() as operators:
            backward(run(chain, leaf(3), keep=keep_all).sum())
    finally:
        compat.SAC_IGNORED_OPS.remove(SIN)
    assert operators.again == ["sin"]


def test_random_numbers_are_kept_and_the_generator_goes_on_as_in_forward() -> None:
    def fn(x: Tensor) -> Tensor:
        return nn.functional.dropout(x.sin() * torch.rand_like(x), 0.5) * torch.rand(3)

    x, results = leaf(3), []
    for keep in (None, keep_all, [aten.bernoulli_.float], [aten.rand_like.default]):
        torch.manual_seed(1)
        y = fn(x) if keep is None else run(fn, x, keep=keep)
        results.append(torch.autograd.grad(y.sum(), x)[0])
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_casts_that_autocast_found_in_its_cache_do_not_shift_others() -> None:
    x, w, v = leaf(4, 4), torch.eye(4, requires_grad=True), torch.full((4, 4), 0.5, requires_grad=True)

    def fn(h: Tensor) -> Tensor:
        return ((h @ w).sin() @ v).sin() + h @ v

    results = []
    for keep in (None, keep_all, [aten._to_copy.default]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = x @ w  # its cast of w is in the cache when the region runs, and gone when it is run again
            y = fn(h) if keep is None else run(fn, h, keep=keep)
        results.append(torch.autograd.grad(y.float().sum(), (x, w, v)))
    for ours in results[1:]:
        assert all(map(torch.equal, results[0], ours))


# Writes into kept values


def write(x: Tensor) -> Tensor:
    return x.sin().mul_(2).cos().exp()


def write_through_a_view(x: Tensor) -> Tensor:
    y = x.sin()
    y.view(-1)[::2].add_(1)
    return y.cos() * y


@pytest.mark.parametrize("fn", [write, write_through_a_view])
def test_a_kept_value_that_is_written_into_is_an_error_that_names_both_places(fn: Callable[[Tensor], Tensor]) -> None:
    y = run(fn, leaf(4), keep=[SIN])
    with pytest.raises(RuntimeError) as caught:
        backward(y.sum())
    assert isinstance(caught.value, recollect.ChangedInputError)
    first, rest = str(caught.value).split("\n")
    line = fn.__code__.co_firstlineno
    writer = "aten.mul_.Tensor" if fn is write else "aten.add_.Tensor"
    lines = (line + 1, line + 1) if fn is write else (line + 1, line + 2)
    assert first.endswith(
        f"the result of aten.sin.default, test_selective.py:{lines[0]}, which the policy keeps, was changed in place "
        f"by {writer}, test_selective.py:{lines[1]}."
    )
    assert rest == (
        "Recomputation would read the changed value. Use the out-of-place form of that operation, or pass "
        "allow_cache_entry_mutation=True: the value is then copied before it is written into."
    )


@pytest.mark.parametrize("keep", [[SIN], keep_all], ids=["sin", "all"])
@pytest.mark.parametrize("fn", [write, write_through_a_view])
def test_where_writes_are_allowed_gradients_are_right_however_often(fn: Callable[[Tensor], Tensor], keep: Any) -> None:
    x = leaf(4)
    with Operators() as operators:
        y = run(fn, x, keep=keep, may_write=True)
        ours = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2)]
    assert "sin" not in operators.again
    expected = gradient(fn, x)
    assert all(torch.equal(expected, each) for each in ours)


@pytest.mark.parametrize("may_write", [False, True])
def test_a_write_after_the_region_is_seen(may_write: bool) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y.detach(), (y * x).cos()

    x = leaf(3)
    part, y = run(fn, x, keep=[SIN], may_write=may_write)
    part.mul_(3)
    if may_write:
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], gradient(lambda x: fn(x)[1], x))
    else:
        with pytest.raises(recollect.ChangedInputError, match="changed in place by something after the region"):
            backward(y.sum())


# Recomputation that goes another way


def test_an_operator_that_forward_did_not_run_is_an_error_that_names_its_place() -> None:
    is_again = False

    def fn(x: Tensor) -> Tensor:
        return x.cos().exp() if is_again else x.sin().exp()

    y = run(fn, leaf(3), keep=[SIN])
    is_again = True
    with pytest.raises(recollect.MismatchError) as caught:
        backward(y.sum())
    line = fn.__code__.co_firstlineno + 1
    assert (
        str(caught.value)
        .splitlines()[0]
        .endswith(
            f"recomputation calls aten.cos.default, test_selective.py:{line}, more than the 0 times that forward did."
        )
    )


def test_a_kept_operator_that_only_forward_runs_shifts_none_of_the_others() -> None:
    """What fills a cache runs once: recomputation must not take its result for that of the next product."""

    class Cached:
        seen: Tensor | None = None

        def __call__(self, x: Tensor) -> Tensor:
            if self.seen is None:
                self.seen = x.detach() @ x.detach()
            return ((x @ x).sin() + self.seen).exp()

    x = leaf(4, 4)
    assert torch.equal(gradient(functools.partial(run, Cached(), keep=[MM]), x), gradient(Cached(), x))


def test_what_is_kept_is_listed_among_what_the_graph_holds(capsys: pytest.CaptureFixture[str]) -> None:
    y = run(lambda x: (x @ x).sin().exp(), leaf(4, 4), keep=[MM])
    recollect.print_saved(y.sum())
    assert "64 B  float32[4, 4]  region '<lambda>' (kept)" in capsys.readouterr().out


def test_a_kept_operator_on_other_shapes_is_an_error_that_names_its_place() -> None:
    is_again = False

    def fn(x: Tensor) -> Tensor:
        return x[: 2 if is_again else 3].sin().exp().sum()

    y = run(fn, leaf(3), keep=[SIN])
    is_again = True
    with pytest.raises(recollect.MismatchError, match=r"aten\.sin\.default, test_selective\.py:\d+, which was kept"):
        backward(y)


def test_the_contexts_of_one_call_cannot_serve_another() -> None:
    pair = create_selective_checkpoint_contexts([SIN])
    x = leaf(3)
    compat.checkpoint(chain, x, use_reentrant=False, context_fn=lambda: pair)
    with pytest.raises(recollect.CheckpointError, match="work for one call of a region, but these have been used"):
        compat.checkpoint(chain, x, use_reentrant=False, context_fn=lambda: pair)


# Lifetimes


@pytest.fixture
def without_gc() -> Iterator[None]:
    collect_new()
    with without_collector():
        yield


class Results:
    """A policy that keeps everything and knows which results' memory is alive."""

    def __init__(self) -> None:
        self.storages: Any = torch.multiprocessing.reductions.StorageWeakRef
        self.weak: dict[str, Any] = {}

    def __call__(self, ctx: SelectiveCheckpointContext, op: Any, *_args: Any) -> bool:
        self.weak[str(op)] = self.storages(ctx.op_output.untyped_storage())
        return True

    @property
    def alive(self) -> set[str]:
        return {name for name, weak in self.weak.items() if not weak.expired()}


@pytest.mark.usefixtures("without_gc")
def test_kept_values_die_with_the_graph() -> None:
    results = Results()
    y = run(chain, leaf(3), keep=results)
    assert results.alive == {"aten.sin.default", "aten.cos.default", "aten.exp.default"}
    del y
    assert results.alive == set()


@pytest.mark.usefixtures("without_gc")
def test_kept_values_die_in_the_pass_that_frees_the_graph() -> None:
    results = Results()
    y = run(chain, leaf(3), keep=results).sum()
    backward(y, keep=True)
    assert "aten.sin.default" in results.alive
    backward(y)
    assert results.alive <= {"aten.exp.default"}
    del y
    assert results.alive == set()


@pytest.mark.usefixtures("without_gc")
def test_kept_values_die_with_a_forward_that_fails() -> None:
    results = Results()

    def fn(x: Tensor) -> Tensor:
        raise ZeroDivisionError(chain(x))

    with pytest.raises(ZeroDivisionError) as caught:
        run(fn, leaf(3), keep=results)
    del caught
    assert results.alive == set()


# Other regions


def test_an_inner_region_may_keep_other_operators() -> None:
    def outer(x: Tensor) -> Tensor:
        y: Tensor = run(chain, x.sin(), keep=[COS])
        return y.exp() @ x

    x = leaf(3, 3)
    with Operators() as operators:
        ours = gradient(lambda x: run(outer, x, keep=[SIN, MM]), x)
    assert torch.equal(ours, gradient(lambda x: chain(x.sin()).exp() @ x, x))
    # Run by the outer region: all but sin and mm; by the inner one: sin (its policy does not keep it) and exp.
    assert Counter(operators.again)["mm"] == 0
    assert Counter(operators.again)["cos"] == 1


def checked_inside(x: Tensor) -> Tensor:
    y = x.sin() * 2
    z: Tensor = recollect.checkpoint(lambda y: (y.sin() * 3).exp(), check="values")(y)
    return (z.sin() * z).cos()


@pytest.mark.parametrize("keep", [[SIN], [aten.mul.Tensor], keep_all], ids=["sin", "mul", "all"])
def test_value_checks_of_an_inner_region_do_not_shift_what_is_kept(keep: Any) -> None:
    x = leaf(4)
    expected = gradient(lambda x: ((z := ((x.sin() * 2).sin() * 3).exp()).sin() * z).cos(), x)
    assert torch.equal(gradient(lambda x: run(checked_inside, x, keep=keep, may_write=True), x), expected)


def test_the_policy_is_not_asked_about_value_checks() -> None:
    asked = set()

    def policy(_: SelectiveCheckpointContext, op: Any, *_args: Any, **_kwargs: Any) -> bool:
        asked.add(op)
        return True

    backward(run(checked_inside, leaf(4), keep=policy).sum())
    assert asked == {SIN, COS, EXP, aten.mul.Tensor}


def test_an_enclosing_region_is_recomputed_for_a_kept_value() -> None:
    def fn(x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        (force,) = torch.autograd.grad((inner * x).exp().sum(), inner)
        return (x * force).sin()

    x = leaf(3)
    y = recollect.checkpoint(lambda x: run(fn, x, keep=keep_all))(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], gradient(fn, x))


def test_values_made_in_inference_mode_are_kept() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.inference_mode():
            factor = x.detach().sin().sum().item()
        return (x * factor).sin()

    x = leaf(3)
    assert torch.equal(gradient(lambda x: run(fn, x, keep=keep_all), x), gradient(fn, x))


class Coin:
    """A policy that falls the same way for the same call of an operator."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._calls: Counter[Any] = Counter()

    def __call__(self, _: SelectiveCheckpointContext, op: Any, *_args: Any, **_kwargs: Any) -> bool:
        self._calls[op] += 1
        return bool(zlib.crc32(f"{self._seed} {op} {self._calls[op]}".encode()) >> 7 & 1)


POLICIES: dict[str, Callable[[], Policy]] = {
    "all": lambda: keep_all,
    "nothing": lambda: lambda *_args, **_kwargs: False,
    "coin": lambda: Coin(0),
    "other coin": lambda: Coin(1),
}


def selective(fn: Callable[..., Any], *, policy: str, **options: Any) -> Callable[..., Any]:
    def make() -> Any:
        return create_selective_checkpoint_contexts(POLICIES[policy](), allow_cache_entry_mutation=True)

    return functools.partial(compat.checkpoint, fn, use_reentrant=False, context_fn=make, **options)


WRAPS: dict[str, Callable[..., Any]] = {
    "alone": selective,
    "debug": functools.partial(selective, debug=True),
    "to the end": functools.partial(selective, early_stop=False),
    "nested": lambda fn, policy: selective(selective(fn, policy=policy), policy="coin"),
    "inside plain": lambda fn, policy: recollect.checkpoint(selective(fn, policy=policy)),
    "around plain": lambda fn, policy: selective(recollect.checkpoint(fn), policy=policy),
}


def assert_same(case: Case, wrap: str, policy: str, derive: Derive) -> None:
    plain = plain_step(case, derive)
    ours = run_step(case, functools.partial(WRAPS[wrap], policy=policy), derive)
    for what in ("outputs", "gradients", "buffers", "random_states"):
        assert all(map(is_same, getattr(plain, what), getattr(ours, what))), what


@pytest.mark.parametrize("derive", [by_backward, by_backward_twice, by_backward_to_some])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_give_what_plain_steps_give(case: Case, derive: Derive) -> None:
    try_all(lambda policy: assert_same(case, "alone", policy, derive), POLICIES)


@pytest.mark.parametrize("case", [case for case in CASES if case.has_double_backward], ids=str)
def test_double_backward_gives_what_the_plain_step_gives(case: Case) -> None:
    try_all(lambda policy: assert_same(case, "alone", policy, by_double_backward), ["all", "coin"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_with_options_and_other_regions_give_what_plain_steps_give(case: Case) -> None:
    variants = itertools.product([wrap for wrap in WRAPS if wrap != "alone"], ["all", "coin"])
    try_all(lambda variant: assert_same(case, *variant, by_backward_twice), variants)


# Compiled code


@pytest.mark.parametrize("which", [{0}, {1}, {0, 1}, set()], ids=str)
def test_a_compiled_function_is_one_operator_that_can_be_kept(which: set[int]) -> None:
    wrap = pytest.importorskip("torch._higher_order_ops.wrap")
    if not hasattr(wrap, "InductorCompiledCallable"):
        pytest.skip("this torch has no operator for compiled code")
    inductor_compiled_code = wrap.inductor_compiled_code
    runs: list[str] = []

    def compiled(name: str, body: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(inputs: list[Tensor]) -> tuple[Tensor, ...]:
            runs.append(name)
            (x,) = inputs
            inputs.clear()  # as compiled code does
            return (body(x), x.exp())

        code = wrap.InductorCompiledCallable(call)

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                y, extra = inductor_compiled_code(code, [x])
                ctx.save_for_backward(extra)
                result: Tensor = y
                return result

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                result: Tensor = grad * ctx.saved_tensors[0]
                return result

        return lambda x: Function.apply(x)  # type: ignore[no-untyped-call]

    first, second = compiled("first", torch.sin), compiled("second", torch.cos)
    numbers = iter(range(2))

    def policy(_: SelectiveCheckpointContext, op: Any, *_args: Any, **_kwargs: Any) -> bool:
        return op is inductor_compiled_code and next(numbers) in which

    def fn(x: Tensor) -> Tensor:
        return second(first(x.sin()) * x).exp()

    x = leaf(3)
    expected = gradient(fn, x)
    runs.clear()
    assert torch.equal(gradient(lambda x: run(fn, x, keep=policy), x), expected)
    assert runs == ["first", "second", *(name for i, name in enumerate(["first", "second"]) if i not in which)]
