"""How long tensors live, by weak references alone: the garbage collector is off in every test here."""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint as rival
from torch import Tensor, nn
from torch.utils import _pytree

import recollect
from recollect import compat
from recollect._profile.memory import LiveBytes
from tests.collecting import without_collector
from tests.corpus import CASES, Batch, Call, Case, Pair
from tests.watching import Region, Seen, Watched, backward, token_held_by


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    with without_collector():
        yield


def fresh() -> Tensor:
    """A tensor that requires grad and that only its holder keeps alive."""
    return torch.randn(4, requires_grad=True) + 1


FORMS: dict[str, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "positional": lambda x: ((x,), {}),
    "after others": lambda x: ((1, "a", x), {}),
    "keyword": lambda x: ((), {"x": x}),
    "in a list": lambda x: (([x],), {}),
    "deep in a keyword": lambda x: ((), {"cache": {"layers": [(x, 1)]}}),
    "in a named tuple": lambda x: ((Pair(x, None),), {}),
    "in a registered dataclass": lambda x: ((), {"batch": Batch(x, [], "")}),
    "twice": lambda x: ((x,), {"again": [x]}),
}
each_form = pytest.mark.parametrize("form", FORMS)

NATIVE: dict[str, Callable[[Region], Region]] = {
    "native": recollect.checkpoint,
    "to the end": lambda fn: recollect.checkpoint(fn, early_stop=False),
    "values": lambda fn: recollect.checkpoint(fn, check="values"),
    "compat": lambda fn: lambda *args, **kwargs: compat.checkpoint(fn, *args, use_reentrant=False, **kwargs),
}
each_engine = pytest.mark.parametrize("engine", NATIVE)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = next(leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return found


def call(engine: str, form: str, x: Tensor, fn: Callable[[Tensor], Any]) -> Any:
    """Call a region of one tensor, which it is given in some form."""
    args, kwargs = FORMS[form](x)
    return NATIVE[engine](lambda *args, **kwargs: fn(first_tensor(args, kwargs)))(*args, **kwargs)


# Forward


@each_engine
def test_forward_keeps_no_activation_not_even_while_it_runs(engine: str) -> None:
    watched = Watched()
    alive_inside = []

    def fn(x: Tensor) -> Tensor:
        a = x.exp()
        b = a.sin()
        watched.show(a=a, b=b)
        del a
        c = b.cos()
        del b
        alive_inside.append(watched.alive)
        return c

    y = NATIVE[engine](fn)(fresh())
    assert watched.alive == set()
    assert alive_inside == [set()]
    assert y.requires_grad


@each_engine
@each_form
def test_inputs_live_as_long_as_the_output_and_no_longer(engine: str, form: str) -> None:
    watched, x = Watched(), fresh()
    y = call(engine, form, x, lambda x: x.exp().sin())
    watched.show(x=x)
    del x
    assert watched.alive == {"x"}
    del y
    assert watched.alive == set()


@pytest.mark.parametrize(
    "fn",
    [lambda x: x.detach().exp(), lambda x: x + 1, lambda x: (x.sin().sum() * 0).detach() + x.view(2, 2).sum()],
    ids=["all detached", "nothing saved", "saved and dropped"],
)
@each_form
def test_inputs_go_at_once_where_backward_will_need_no_saved_tensor(form: str, fn: Callable[[Tensor], Any]) -> None:
    watched, x = Watched(), fresh()
    y = call("native", form, x, fn)
    watched.show(x=x)
    del x
    assert watched.alive == set()
    assert y is not None


@each_engine
def test_inputs_go_at_once_where_the_function_raises(engine: str) -> None:
    watched = Watched()

    def fn(x: Tensor) -> Tensor:
        watched.show(y=x.exp())
        raise KeyError

    x = fresh()
    watched.show(x=x)
    with suppress(KeyError):
        NATIVE[engine](fn)(x)
    del x
    assert watched.alive == set()


# A pass that frees the graph


def chain(watched: Watched, seen: dict[str, set[str]]) -> Callable[[Tensor], Tensor]:
    """Four operators, each of which saves its input. `seen` says what is alive when backward reaches each value."""

    def fn(x: Tensor) -> Tensor:
        values = {"x": x}
        for before, name in zip("xabc", "abcd", strict=True):
            values[name] = values[before].sin()
        if recollect.is_recomputing():
            watched.show(**{name: values[name] for name in "abc"})
        else:
            for name in "abc":
                note = functools.partial(lambda name, _: seen.update({name: watched.alive}), name)
                values[name].register_hook(note)
        return values["d"]

    return fn


@pytest.mark.parametrize("keep", [False, True])
@each_engine
def test_a_recomputed_value_goes_when_its_node_is_done(engine: str, keep: bool) -> None:
    watched, seen = Watched(), dict[str, set[str]]()
    # To the end, so that every value has a name; early stop is below.
    with compat.set_checkpoint_early_stop(False):
        loss = NATIVE[engine](chain(watched, seen))(fresh()).sum()
    backward(loss, keep=keep)
    assert seen == {"c": {"a", "b"}, "b": {"a"}, "a": set()}
    assert watched.alive == set()


@each_engine
@each_form
def test_inputs_go_right_after_recomputation(engine: str, form: str) -> None:
    watched, x, alive = Watched(), fresh(), list[set[str]]()

    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        z = y.sin()
        if not recollect.is_recomputing():
            z.register_hook(lambda _: alive.append(watched.alive))
        return z.cos()

    y = call(engine, form, x, fn)
    watched.show(x=x)
    del x
    backward(y.sum())
    assert alive == [set()]


class Special(Tensor):
    """A subclass of tensor, as distributed ones are."""


@each_engine
def test_inputs_go_right_after_recomputation_where_the_result_is_of_a_subclass(engine: str) -> None:
    watched, x, alive = Watched(), fresh(), list[set[str]]()

    def fn(x: Tensor) -> Tensor:
        z = x.exp().sin()
        if not recollect.is_recomputing():
            z.register_hook(lambda _: alive.append(watched.alive))
        return z.cos().as_subclass(Special)

    y = call(engine, "positional", x, fn)
    watched.show(x=x)
    del x
    backward(y.as_subclass(Tensor).sum())
    assert alive == [set()]


@each_form
def test_inputs_go_before_backward_is_done_where_there_are_several_outputs(form: str) -> None:
    watched, x, alive = Watched(), fresh(), list[set[str]]()

    def fn(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = x.exp()
        if not recollect.is_recomputing():
            y.register_hook(lambda _: alive.append(watched.alive))
        return y.sin(), {"more": y.cos()}

    first, more = call("native", form, x, fn)
    watched.show(x=x)
    del x
    backward(first.sum() + more["more"].sum())
    assert alive == [set()]


@each_engine
@each_form
def test_inputs_stay_where_the_graph_is_kept(engine: str, form: str) -> None:
    watched, x = Watched(), fresh()
    loss = call(engine, form, x, lambda x: x.exp().sin()).sum()
    watched.show(x=x)
    del x
    for _ in range(2):
        backward(loss, keep=True)
        assert watched.alive == {"x"}
    backward(loss)
    assert watched.alive == set()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@each_engine
@each_form
def test_a_partial_backward_keeps_the_inputs_for_the_next_one(engine: str, form: str, order: tuple[int, int]) -> None:
    watched, root = Watched(), torch.randn(4, requires_grad=True)
    x = root + 1
    expected = [torch.autograd.grad(part((root + 1).tanh()).sum(), root)[0] for part in (torch.exp, torch.cos)]

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh().exp(), x.tanh().cos()

    outputs = list(call(engine, form, x, fn))
    watched.show(x=x)
    del x
    losses = [output.sum() for output in outputs]
    del outputs
    for done, index in enumerate(order):
        root.grad = torch.zeros(4)
        backward(losses[index])
        assert watched.alive == ({"x"} if done == 0 else set())
        assert root.grad is not None
        assert torch.equal(root.grad, expected[index])


@pytest.mark.parametrize("keep", [False, True])
def test_values_that_a_partial_pass_did_not_use_go_with_it(keep: bool) -> None:
    watched = Watched()

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.tanh(), x.sin()
        if recollect.is_recomputing():
            watched.show(a=a, b=b)
        return a.exp(), b.cos()

    first, second = recollect.checkpoint(fn, early_stop=False)(fresh())
    backward(first.sum(), keep=keep)
    assert watched.alive == set()
    backward(second.sum())
    assert watched.alive == set()


def test_values_of_a_pass_that_failed_go_with_the_graph_at_the_latest() -> None:
    watched = Watched()

    def fn(x: Tensor) -> Tensor:
        a = x.sin()
        b = a.exp()
        if recollect.is_recomputing():
            watched.show(a=a, b=b)
        else:
            b.register_hook(lambda _: 1 // 0)
        return b.cos()

    loss = recollect.checkpoint(fn, early_stop=False)(fresh()).sum()
    with suppress(ZeroDivisionError):
        backward(loss, keep=True)
    del loss
    assert watched.alive == set()


def test_reading_a_saved_tensor_outside_backward_keeps_nothing() -> None:
    watched = Watched()

    def fn(x: Tensor) -> Tensor:
        a = x.sin()
        if recollect.is_recomputing():
            watched.show(a=a)
        return a.exp().cos()

    y: Any = recollect.checkpoint(fn)(fresh())
    assert y.grad_fn._saved_self is not None
    assert watched.alive == set()


@pytest.mark.parametrize("how", ["used", "unused"])
def test_values_of_a_group_go_when_they_are_used_or_the_group_closes(how: str) -> None:
    watched = Watched()

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.tanh(), x.sin()
        if recollect.is_recomputing():
            watched.show(a=a, b=b)
        return a.exp().sin(), b.cos()

    first, second = recollect.checkpoint(fn, early_stop=False)(fresh())
    with compat.GraphExecGroup():
        backward(first.sum())
        assert "b" in watched.alive
        if how == "used":
            backward(second.sum())
            assert not watched.alive
    assert watched.alive == set()


# Nested regions


def test_inner_inputs_belong_to_the_outer_region() -> None:
    watched = Watched()

    def outer(x: Tensor) -> Tensor:
        middle = x.exp()
        watched.show(middle=middle)
        y: Tensor = recollect.checkpoint(lambda m: m.sin().cos())(middle)
        return y.tanh()

    y = recollect.checkpoint(outer)(fresh())
    assert watched.alive == set()
    backward(y.sum())
    assert watched.alive == set()


@pytest.mark.parametrize("keep", [False, True])
def test_nothing_recomputed_outlives_a_pass_through_nested_regions(keep: bool) -> None:
    watched = Watched()

    def step(name: str, inner: Region) -> Region:
        def fn(x: Tensor) -> Any:
            a = x.sin()
            b = inner(a.exp())
            if recollect.is_recomputing():
                watched.show(**{f"{name}.a": a, f"{name}.b": b})
            return b.cos()

        return recollect.checkpoint(fn)

    loss = step("outer", step("middle", step("inner", torch.tanh)))(fresh()).sum()
    backward(loss, keep=keep)
    assert watched.alive == set()


# No cycles


def differently(fn: Region) -> Region:
    """The same function, but its recomputation makes another shape."""
    return lambda x: fn(x[:2] if recollect.is_recomputing() else x)


def raising(fn: Region) -> Region:
    """The same function, but its recomputation raises."""

    def run(x: Tensor) -> Any:
        y = fn(x)
        if recollect.is_recomputing():
            raise KeyError
        return y

    return run


def failing(fn: Region) -> Region:
    def run(x: Tensor) -> Any:
        fn(x)
        raise KeyError

    return run


def use_and_drop(fn: Region, **options: Any) -> None:
    recollect.checkpoint(fn, **options)(fresh())


def use_and_step(fn: Region, *, keep: bool = False, **options: Any) -> None:
    loss = recollect.checkpoint(fn, **options)(fresh()).sum()
    with suppress(recollect.MismatchError, KeyError):
        backward(loss, keep=keep)


def use_twice_differentiated(fn: Region) -> None:
    x = torch.randn(4, requires_grad=True)
    (grad,) = torch.autograd.grad(recollect.checkpoint(fn)(x).sum(), x, create_graph=True)
    backward(grad.sum())


def use_and_fail(fn: Region, **options: Any) -> None:
    with suppress(KeyError):
        recollect.checkpoint(failing(fn), **options)(fresh())


def use_explained(fn: Region) -> None:
    with recollect.explain_mismatch():
        use_and_step(fn)


def use_in_a_group(fn: Region) -> None:
    loss = recollect.checkpoint(fn)(fresh()).sum()
    with compat.GraphExecGroup():
        backward(loss, keep=True)


def use_under_grad(fn: Region) -> None:
    torch.func.grad(lambda x: recollect.checkpoint(fn)(x).sum())(torch.randn(4))


def use_under_vmap(fn: Region) -> None:
    torch.func.vmap(recollect.checkpoint(fn))(torch.randn(3, 4))


def use_several_outputs(fn: Region) -> None:
    outputs = recollect.checkpoint(lambda x: (fn(x), fn(x).exp()))(fresh())
    backward(outputs[0].sum())


def use_nested(fn: Region) -> None:
    use_and_step(lambda x: recollect.checkpoint(fn)(x.cos()))


def use_reentrant(fn: Region) -> None:
    backward(compat.checkpoint(fn, fresh(), use_reentrant=True).sum())


def use_contexts(fn: Region) -> None:
    contexts = (nullcontext(), nullcontext())
    backward(compat.checkpoint(fn, fresh(), use_reentrant=False, context_fn=lambda: contexts).sum())


def use_writing_into_its_input(fn: Region) -> None:
    with torch.autograd.graph.save_on_cpu(), suppress(recollect.ChangedInputError):
        backward(recollect.checkpoint(lambda x: fn(x.sin_()))(fresh() * 2).sum())


class Holding(nn.Module):
    def __init__(self, fn: Region) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


def use_module(fn: Region) -> None:
    use_and_step(nn.Sequential(Holding(fn), nn.Linear(4, 4)))


USES: dict[str, Callable[[Region], None]] = {
    "dropped": use_and_drop,
    "dropped, values checked": lambda fn: use_and_drop(fn, check="values"),
    "backward": use_and_step,
    "backward to the end": lambda fn: use_and_step(fn, early_stop=False),
    "backward, values checked": lambda fn: use_and_step(fn, check=recollect.ValueCheck(atol=0.1)),
    "graph kept": lambda fn: use_and_step(fn, keep=True),
    "double backward": use_twice_differentiated,
    "forward raises": use_and_fail,
    "forward raises, values checked": lambda fn: use_and_fail(fn, check="values"),
    "recomputation differs": lambda fn: use_and_step(differently(fn)),
    "recomputation raises": lambda fn: use_and_step(raising(fn), early_stop=False),
    "recomputation raises, graph kept": lambda fn: use_and_step(raising(fn), early_stop=False, keep=True),
    "explained": use_explained,
    "explained mismatch": lambda fn: use_explained(differently(fn)),
    "in a group": use_in_a_group,
    "under torch.func.grad": use_under_grad,
    "under torch.func.vmap": use_under_vmap,
    "several outputs": use_several_outputs,
    "nested": use_nested,
    "reentrant": use_reentrant,
    "context_fn": use_contexts,
    "module": use_module,
    "input written, inside save_on_cpu": use_writing_into_its_input,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_use_leaves_a_reference_cycle(use: Callable[[Region], None]) -> None:
    token_held_by(use)  # the first use of torch.func imports modules, whose frames stay
    assert token_held_by(use)() is None


def test_the_search_for_cycles_can_fail() -> None:
    def use(fn: Region) -> None:
        cycle: list[Any] = [fn]
        cycle.append(cycle)

    assert token_held_by(use)() is not None


# Many steps


@pytest.mark.slow
def test_two_thousand_steps_leave_live_bytes_and_objects_flat() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2))
    region, x = recollect.checkpoint(model), torch.ones(1, 2)
    readings = []
    with LiveBytes(include=model) as meter:
        for step in range(2_000):
            torch.autograd.backward(region(x).sum())
            if step % 199 == 100:
                readings.append((meter.live_bytes, len(gc.get_objects())))
    assert len(readings) == 10
    live, objects = zip(*readings, strict=True)
    assert len(set(live)) == 1
    assert objects[-1] - objects[1] < 50


# Against torch


class Rivals(NamedTuple):
    ours: int
    theirs: int


def peak_bytes(engine: Callable[..., Any], build: Callable[[], Call], derive: Callable[[Tensor], None]) -> int:
    torch.manual_seed(0)
    call = build()
    with LiveBytes() as meter:
        outputs = engine(call.fn, *call.args, use_reentrant=False, **call.kwargs)
        wanted = [leaf for leaf in _pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        loss = torch.stack([leaf.abs().double().sum() for leaf in wanted]).sum()
        del outputs, wanted
        derive(loss)
    return meter.peak_bytes


def of_both(build: Callable[[], Call], derive: Callable[[Tensor], None]) -> Rivals:
    return Rivals(peak_bytes(compat.checkpoint, build, derive), peak_bytes(rival.checkpoint, build, derive))


def wide_chain() -> Call:
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]

    def fn(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x) + x
        return x

    return Call(fn=fn, args=(torch.randn(64, 64, requires_grad=True),))


def big_inputs_not_saved() -> Call:
    root = torch.randn(64, requires_grad=True)
    return Call(fn=lambda x: (x.sum(1).exp().sin() * 2).cos(), args=((root * 2).expand(256, 64).contiguous(),))


def big_keyword_inputs() -> Call:
    root = torch.randn(64, requires_grad=True)
    return Call(
        fn=lambda *, parts: (parts[0]["x"].sum(1).exp().sin() * 2).cos(),
        kwargs={"parts": [{"x": (root * 2).expand(256, 64).contiguous()}]},
    )


def several_outputs() -> Call:
    return Call(
        fn=lambda x: (x.exp().sin(), x.cos().tanh(), x.sigmoid().exp()), args=(torch.randn(256, 64).requires_grad_(),)
    )


def twice(loss: Tensor) -> None:
    backward(loss, keep=True)
    backward(loss)


DERIVES: dict[str, Callable[[Tensor], None]] = {
    "backward": backward,
    "graph kept": lambda loss: backward(loss, keep=True),
    "twice": twice,
}


@pytest.mark.parametrize("derive", DERIVES.values(), ids=DERIVES)
@pytest.mark.parametrize("build", [wide_chain, big_inputs_not_saved, big_keyword_inputs, several_outputs])
def test_peak_bytes_are_at_most_those_of_torch(build: Callable[[], Call], derive: Callable[[Tensor], None]) -> None:
    peaks = of_both(build, derive)
    assert 0 < peaks.ours <= peaks.theirs


# Updated buffers are copied for the recomputation, which torch does not do.
UPDATES_BUFFERS = ("norm", "counts in a buffer", "inside a sequential", "called twice")
TORCH_CANNOT = ("inference tensor as input", "custom function", "cached parametrization")


def is_comparable(case: Case) -> bool:
    return case.name not in TORCH_CANNOT and not any(word in case.name for word in UPDATES_BUFFERS)


@pytest.mark.parametrize("case", [case for case in CASES if is_comparable(case)], ids=str)
def test_peak_bytes_of_the_corpus_are_at_most_those_of_torch(case: Case) -> None:
    with case.around():
        peaks = of_both(case.build, backward)
    assert 0 < peaks.ours <= peaks.theirs


@pytest.mark.parametrize("engine", ["native", "to the end"])
def test_a_graph_that_a_function_puts_away_holds_nothing_else_that_was_recomputed(engine: str) -> None:
    # As `nn.utils.spectral_norm` does: its hook sets the weight anew at each call, with the graph that made it.
    weight, away, watched = torch.randn(4, requires_grad=True), list[Tensor](), Watched()

    def fn(x: Tensor) -> Tensor:
        away[:] = [weight.exp()]
        y = x.sin()
        watched.show(**{f"{recollect.is_recomputing()}": y})
        return (y * away[0]).exp().sin()

    x = fresh()
    watched.show(x=x)
    loss = NATIVE[engine](fn)(x).sum()
    del x
    backward(loss)
    del loss
    assert not watched.alive


@pytest.mark.parametrize("engine", ["native", "to the end"])
def test_a_graph_that_a_function_puts_away_lets_go_of_what_it_saved(engine: str) -> None:
    # As recurrent layers do that remember their last state, and blocks that show their attention.
    away, watched = Seen[Tensor](), Watched()

    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        watched.show(**{f"{recollect.is_recomputing()}": y})
        away.append((y * y).sum())
        return away[-1] * y.exp()

    loss = NATIVE[engine](fn)(fresh()).sum()
    backward(loss)
    del loss
    assert not watched.alive
    with pytest.raises(recollect.CheckpointError, match="a graph that a recomputation made"):
        away[1].backward()


@pytest.mark.parametrize("engine", ["native", "to the end"])
def test_a_backward_inside_the_function_finds_what_was_recomputed(engine: str) -> None:
    def fn(x: Tensor) -> Tensor:
        inside = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inside.sin().exp().sum(), inside)
        return (x * slope).exp()

    x = torch.randn(4, requires_grad=True)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    (found,) = torch.autograd.grad(NATIVE[engine](fn)(x).sum(), x)
    assert torch.equal(found, expected)
