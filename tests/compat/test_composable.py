"""A checkpointed module recomputes in backward, and is otherwise the module that it was."""

import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mod_tracker import ModTracker

import recollect
from recollect.compat import CheckpointError, checkpoint_wrapper, create_selective_checkpoint_contexts
from recollect.compat import checkpoint as checkpoint_call
from recollect.compat.composable import checkpoint
from tests.watching import Operators, backward, what_is_in_force


class Block(nn.Module):
    """Draws random numbers, updates a buffer, takes and gives several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)).tanh(), 0.3)
        result: Tensor = self.second(hidden * scale).sin()
        return result if shift is None else result * shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(8, requires_grad=True)
        for block in self.blocks:
            x = block(x, scale, shift=x + 2)
        return x


def step(model: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    model(x, *args, **kwargs).square().sum().backward()
    assert x.grad is not None
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return [x.grad, *found, *(buffer.clone() for buffer in model.buffers()), torch.rand(2)]


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain) > 1
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


class Trouble(nn.Module):
    """Raises in the given run, counted from 0."""

    def __init__(self, run: int, error: type[BaseException] = ZeroDivisionError) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.run, self.runs, self.error = run, 0, error

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        result: Tensor = self.linear(x).exp()
        if self.runs == self.run + 1:
            raise self.error("trouble")
        return result.sin()


# What it does.
def test_gradients_buffers_and_random_numbers_are_those_of_the_plain_model() -> None:
    plain = Net()
    model, x = copy.deepcopy(plain), torch.randn(3, 4)
    for block in model.blocks:
        checkpoint(block)
    for _ in range(2):
        assert_same(step(model, x), step(plain, x))


def test_the_module_is_returned_and_looks_as_before() -> None:
    model = Net()
    names = [name for name, _ in model.named_modules()]
    printed, keys = repr(model), list(model.state_dict())
    assert checkpoint(model.blocks[0]) is model.blocks[0]
    assert type(model.blocks[0]) is Block
    assert [name for name, _ in model.named_modules()] == names
    assert (repr(model), list(model.state_dict())) == (printed, keys)
    model.load_state_dict(Net().state_dict())


def test_the_module_runs_again_in_backward() -> None:
    block, seen = checkpoint(Block()), Operators()
    loss = block(torch.randn(3, 4)).sum()
    with seen:
        backward(loss)
    assert "tanh" in seen.again
    assert "sin" not in seen.again  # recomputation stops early


def test_recomputation_stops_early_unless_asked_not_to() -> None:
    ends = []

    class Ends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.exp().sin()
            ends.append(x)
            return x

    x = torch.ones(2, requires_grad=True)
    checkpoint(Ends(), early_stop=False)(x).sum().backward()
    assert len(ends) == 2
    checkpoint(Ends())(x).sum().backward()
    assert len(ends) == 3


def test_random_numbers_are_not_preserved_where_that_is_asked() -> None:
    drawn = []

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            drawn.append(torch.rand(1).item())
            return x.exp().sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(Draws())(x).sum().backward()
    assert drawn[0] == drawn[1]
    checkpoint(Draws(), preserve_rng_state=False)(x).sum().backward()
    assert drawn[2] != drawn[3]


def test_plain_calls_where_grad_mode_is_off() -> None:
    block, x = checkpoint(Block()), torch.randn(3, 4)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert not block(x).requires_grad
    checkpoint.state(block).enable_hook = False
    seen = Operators()
    loss = block(x).sum()
    with seen:
        backward(loss)
    assert seen.again == []


def test_unknown_options_and_the_reentrant_engine_are_refused() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="unexpected keyword arguments: foo; expected preserve_rng_state, context_fn"):
        checkpoint(module, foo="bar")
    with pytest.raises(NotImplementedError, match="use_reentrant=True is not supported in composable checkpoint"):
        checkpoint(module, use_reentrant=True)
    with pytest.raises(ValueError, match="determinism_check='some'"):
        checkpoint(module, determinism_check="some")
    checkpoint(module, use_reentrant=False)
    with pytest.raises(AssertionError, match="checkpoint has already been applied"):
        checkpoint(module)


def test_a_refused_module_is_as_before() -> None:
    module = nn.Linear(2, 2)
    before = dict(vars(module))
    with pytest.raises(ValueError, match="foo"):
        checkpoint(module, foo="bar")
    assert vars(module) == before
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_both_contexts_of_context_fn_are_entered_and_nothing_else_recomputes() -> None:
    sides: list[str] = []

    @contextlib.contextmanager
    def note(side: str) -> Iterator[None]:
        sides.append(side)
        yield
        sides.append(f"{side} left")

    block = checkpoint(Block(), context_fn=lambda: (note("forward"), note("again")), early_stop=False)
    loss = block(torch.randn(3, 4)).sum()
    assert sides == ["forward", "forward left"]
    backward(loss)
    assert sides[2:] == ["again", "again left"]


def test_a_context_can_keep_an_error_away_in_one_of_the_two_runs() -> None:
    class Raising(Trouble):
        quiet = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.quiet:
                raise ZeroDivisionError(f"run {self.runs}")
            self.runs += 1
            result: Tensor = self.linear(x).exp()
            return result

    @contextlib.contextmanager
    def quiet(module: Raising) -> Iterator[None]:
        module.quiet = True
        try:
            yield
        finally:
            module.quiet = False

    x = torch.ones(1, 2)
    both = Raising(-1)
    checkpoint(both, context_fn=lambda: (quiet(both), quiet(both)))(x).sum().backward()
    forward = Raising(-1)
    checkpoint(forward, context_fn=lambda: (quiet(forward), contextlib.nullcontext()))
    with pytest.raises(ZeroDivisionError, match="run 1"):
        forward(x).sum().backward()
    again = Raising(-1)
    checkpoint(again, context_fn=lambda: (contextlib.nullcontext(), quiet(again)))
    with pytest.raises(ZeroDivisionError, match="run 0"):
        again(x)


def test_a_selective_policy_is_honoured() -> None:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    plain = Block()
    block, seen, x = checkpoint(copy.deepcopy(plain), context_fn=contexts), Operators(), torch.randn(3, 4)
    loss = block(x).square().sum()
    with seen:
        backward(loss)
    assert "tanh" in seen.again
    assert "addmm" not in seen.again


def test_a_mismatch_is_found_as_asked() -> None:
    class Changing(nn.Module):
        size = 2

        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.ones(self.size, 1)).exp()

    for check in ("default", "none"):
        module = Changing()
        checkpoint(module, determinism_check=check)
        loss = module(torch.ones(2, requires_grad=True)).sum()
        module.size = 3
        with pytest.raises(CheckpointError if check == "default" else RuntimeError):
            backward(loss)


@pytest.mark.parametrize("check", ["default", "none"])
def test_a_module_that_starts_to_write_into_its_argument_is_refused(check: str) -> None:
    class Writes(nn.Module):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            return (x.relu_() if self.runs > 1 else x).exp().sin()

    loss = checkpoint(Writes(), determinism_check=check)(torch.ones(2, requires_grad=True).clone()).sum()
    with pytest.raises(CheckpointError, match=r"region 'Writes': in recomputation the module changes an argument in"):
        backward(loss)


def test_debug_shows_both_operator_logs() -> None:
    class Changing(nn.Module):
        more = False

        def forward(self, x: Tensor) -> Tensor:
            return (x.cos() if self.more else x).exp().sin()

    module = checkpoint(Changing(), debug=True, early_stop=False)
    loss = module(torch.ones(2, requires_grad=True)).sum()
    module.more = True
    with pytest.raises(CheckpointError, match=r"(?s)aten.cos"):
        backward(loss)


# Several calls at once.
def test_a_module_used_several_times_has_a_region_per_call() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    model = copy.deepcopy(plain)
    checkpoint(model)

    def run(module: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 4, requires_grad=True)
        y = x
        for _ in range(4):
            y = module(y)
        return list(torch.autograd.grad((y * module(x)).sum(), [x, *module.parameters()]))

    assert_same(run(model), run(plain))


class Recursive(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear, self.depth = nn.Linear(4, 4), depth

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        y: Tensor = nn.functional.dropout(self.linear(x).tanh(), 0.2)
        return (self(y, depth + 1) * self(y.cos(), depth + 1)).sin() if depth < self.depth else y.exp()


def test_a_module_that_calls_itself_has_regions_within_regions() -> None:
    plain = Recursive(2)
    model, x = copy.deepcopy(plain), torch.randn(2, 4)
    assert_same(step(checkpoint(model), x), step(plain, x))


def test_modules_within_checkpointed_modules_can_be_checkpointed_before_and_after() -> None:
    for is_outer_first in (True, False):
        plain = Net()
        model, x = copy.deepcopy(plain), torch.randn(3, 4)
        modules = [model, *model.blocks, model.get_submodule("blocks.0.first")]
        for module in modules if is_outer_first else reversed(modules):
            checkpoint(module)
        assert_same(step(model, x), step(plain, x))


def test_it_goes_with_regions_by_call_around_and_inside() -> None:
    class Calls(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint_call(lambda y: self.block(y).sin(), x.exp(), use_reentrant=False)
            return result

    plain = Calls(Block())
    model, x = copy.deepcopy(plain), torch.randn(3, 4)
    checkpoint(model)
    checkpoint(model.block)
    assert_same(step(model, x), step(plain, x))
    assert_same(step(nn.Sequential(Calls(checkpoint_wrapper(model))), x), step(nn.Sequential(Calls(plain)), x))


def test_backward_inside_the_module() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).exp()
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return (gradient * x).sin()

    plain = Inner()
    model, x = copy.deepcopy(plain), torch.randn(3, 2)
    assert_same(step(checkpoint(model), x), step(plain, x))


def test_threads_do_not_meet() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    model = copy.deepcopy(plain)
    checkpoint(model)
    checkpoint(model[0])
    inputs = [torch.randn(2, 4) for _ in range(8)]
    found: dict[int, tuple[Tensor, ...]] = {}
    start = threading.Barrier(len(inputs))

    def run(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(module(module(x)).sum(), [x, *module.parameters()])

    def work(number: int) -> None:
        start.wait()
        for _ in range(5):
            found[number] = run(model, inputs[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, x in enumerate(inputs):
        assert_same(list(found[number]), list(run(plain, x)))
    assert checkpoint.state(model)._ac_generator is None


# Other hooks.
def test_hooks_that_change_arguments_do_not_change_them_again() -> None:
    def run(model: nn.Module, apply: Callable[[nn.Module], object]) -> list[Tensor]:
        model.register_forward_pre_hook(lambda _module, args: (args[0].exp() * 2, *args[1:]))
        model.register_forward_pre_hook(
            lambda _m, args, kwargs: (args, {"shift": kwargs["shift"] * 3}), with_kwargs=True
        )
        model.register_forward_hook(lambda _module, _args, result: result.cos())
        apply(model)
        model.register_forward_pre_hook(lambda _module, args: (args[0].sin(), *args[1:]))
        model.register_forward_hook(lambda _module, _args, result: result.tanh())
        return step(model, torch.full((3, 4), 0.5), shift=torch.ones(4))

    plain = Block()
    assert_same(run(copy.deepcopy(plain), checkpoint), run(plain, lambda module: None))


def test_hooks_that_draw_random_numbers_do_not_shift_those_of_the_module() -> None:
    def run(model: nn.Module, apply: Callable[[nn.Module], object]) -> list[Tensor]:
        model.register_forward_pre_hook(lambda _module, args: (args[0] + torch.rand(4),))
        apply(model)
        return step(model, torch.ones(3, 4))

    plain = Block()
    found, expected = run(copy.deepcopy(plain), checkpoint), run(plain, lambda module: None)
    assert_same(found, expected)


def test_hooks_fire_in_the_order_that_module_trackers_need() -> None:
    def track(model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> list[tuple[str, str, bool, bool]]:
        seen: list[tuple[str, str, bool, bool]] = []
        tracker = ModTracker()

        def note(what: str) -> Callable[..., None]:
            def hook(module: nn.Module, *_: Any) -> None:
                name = tracker.get_known_fqn(module)
                seen.append((what, name, name in tracker.parents, tracker.is_bw))

            return hook

        tracker.register_user_hooks(note("pre_fw"), note("post_fw"), note("pre_bw"), note("post_bw"))
        with tracker:
            call(model, torch.randn(2, 8)).sum().backward()
        return seen

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for linear in self.linears:
                x = linear(x).relu()
            return x

    model = Layers()
    checkpoint(model.linears[1])
    assert track(model, lambda module, x: module(x)) == [
        ("pre_fw", "Layers", True, False),
        ("pre_fw", "Layers.linears.0", True, False),
        ("post_fw", "Layers.linears.0", True, False),
        ("pre_fw", "Layers.linears.1", True, False),
        ("post_fw", "Layers.linears.1", True, False),
        ("post_fw", "Layers", True, False),
        ("pre_bw", "Layers", True, True),
        ("pre_bw", "Layers.linears.1", True, True),
        ("pre_fw", "Layers.linears.1", True, True),
        ("post_fw", "Layers.linears.1", True, True),
        ("post_bw", "Layers.linears.1", True, True),
        ("pre_bw", "Layers.linears.0", True, True),
        ("post_bw", "Layers.linears.0", True, True),
        ("post_bw", "Layers", True, True),
    ]


def test_user_hooks_of_forward_and_backward_are_called_as_expected() -> None:
    model, calls = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model.register_full_backward_hook(lambda *_: calls.append("backward"))
    checkpoint(model)
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls.count("backward") == 1
    assert calls[0] == "forward"


# Exceptions.
def test_an_error_in_forward_or_recomputation_leaves_nothing_behind() -> None:
    for run in (0, 1):
        module = Trouble(run)
        model = nn.Sequential(checkpoint(module))
        before = what_is_in_force()
        with pytest.raises(ZeroDivisionError, match="trouble"):
            model(torch.ones(1, 2)).sum().backward()
        assert checkpoint.state(module)._ac_generator is None
        assert what_is_in_force() == before
        module.run = -1
        assert_same(step(model, torch.ones(1, 2)), step(model, torch.ones(1, 2)))


def test_errors_of_other_hooks_leave_nothing_behind() -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for is_before in (True, False):
        for hook in ("register_forward_pre_hook", "register_forward_hook"):
            module = nn.Linear(2, 2)
            if is_before:
                getattr(module, hook)(fail)
            checkpoint(module)
            if not is_before:
                getattr(module, hook)(fail)
            before = what_is_in_force()
            with pytest.raises(ZeroDivisionError):
                module(torch.ones(1, 2))
            assert checkpoint.state(module)._ac_generator is None
            assert what_is_in_force() == before


def test_an_error_before_an_inner_call_begins_leaves_the_outer_one_alone() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, depth: int = 0) -> Tensor:
            y: Tensor = self.linear(x).exp()
            if depth == 0:
                with contextlib.suppress(ZeroDivisionError):
                    self(y, 1)
            return y.sin().tanh()

    def refuse(_module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) > 1:
            raise ZeroDivisionError

    plain = Tries()
    plain.register_forward_pre_hook(refuse)
    model, x = copy.deepcopy(plain), torch.randn(2, 4)
    assert_same(step(checkpoint(model), x), step(plain, x))


class Interrupt(BaseException):
    """What runs no hooks."""


@pytest.mark.parametrize("around", ["nothing", "a region", "hooks", "a checkpointed module"])
def test_an_interruption_is_cleared_up_when_its_traceback_is_gone(around: str) -> None:
    module = checkpoint(Trouble(0, Interrupt), context_fn=lambda: (Operators(), contextlib.nullcontext()))
    outer: Callable[[Tensor], Tensor] = module
    if around == "a region":
        outer = recollect.checkpoint(lambda x: module(x.exp()).sin())
    elif around == "hooks":

        def outer(x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                result: Tensor = module(x)
                return result

    elif around == "a checkpointed module":
        outer = checkpoint(nn.Sequential(module, nn.Tanh()))
    before = what_is_in_force()
    with contextlib.suppress(Interrupt):
        outer(torch.ones(1, 2))
    assert what_is_in_force() == before
    assert checkpoint.state(module)._ac_generator is None
    x = torch.ones(1, 2, requires_grad=True)
    outer(x).sum().backward()
    assert x.grad is not None


def test_an_interruption_is_cleared_up_at_the_next_call_while_its_traceback_lives() -> None:
    module, other = checkpoint(Trouble(0, Interrupt)), checkpoint(nn.Linear(2, 2))
    before = what_is_in_force()
    with pytest.raises(Interrupt) as caught:
        module(torch.ones(1, 2))
    assert what_is_in_force() != before  # the traceback holds the call
    x = torch.ones(1, 2, requires_grad=True)
    y = other(x)
    assert what_is_in_force() == before
    y.sum().backward()
    assert caught.value is not None
    assert checkpoint.state(module)._ac_generator is None


def test_an_interruption_that_the_module_around_survives() -> None:
    class Survives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = checkpoint(Trouble(0, Interrupt))
            self.caught: list[BaseException] = []

        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            try:
                self.inner(y)
            except Interrupt as error:
                self.caught.append(error)
            return y.sin()

    model = checkpoint(Survives())
    before = what_is_in_force()
    model(torch.ones(1, 2, requires_grad=True))
    assert what_is_in_force() == before


def test_an_interrupted_recomputation_leaves_nothing_behind() -> None:
    inner = Trouble(1, Interrupt)
    model, before = checkpoint(nn.Sequential(checkpoint(inner), nn.Tanh())), what_is_in_force()
    loss = model(torch.ones(1, 2)).sum()
    with pytest.raises(Interrupt) as caught:
        backward(loss)
    assert what_is_in_force() == before
    assert caught.value is not None
    assert checkpoint.state(inner)._ac_generator is None


def test_a_call_is_under_way_only_while_it_is() -> None:
    seen = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(checkpoint.state(self)._ac_generator)
            return x.exp().sin()

    module = checkpoint(Looks())
    assert checkpoint.state(module)._ac_generator is None
    loss = module(torch.ones(2, requires_grad=True)).sum()
    assert checkpoint.state(module)._ac_generator is None
    backward(loss)
    assert seen[0] is not None
    assert seen[1] is None


def test_compiled_code_breaks_its_graph_at_a_checkpointed_module() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    model, x = copy.deepcopy(plain), torch.randn(2, 4)
    checkpoint(model[1])
    seen = Operators()
    loss = torch.compile(model, backend="eager")(x).sum()
    with seen:
        backward(loss)
    assert "tanh" in seen.again
    torch.compiler.reset()


def test_transforms_are_refused_with_a_way_out() -> None:
    module = checkpoint(nn.Linear(2, 2))
    with pytest.raises(
        recollect.TransformError, match=r"(?s)region 'Linear': composable checkpoint works through hooks.*enable"
    ):
        torch.func.grad(lambda x: module(x).sum())(torch.ones(2))
    checkpoint.state(module).enable_hook = False
    torch.func.grad(lambda x: module(x).sum())(torch.ones(2))


# Lifetimes and copies.
def test_a_copy_has_a_state_and_hooks_of_its_own() -> None:
    model, x = checkpoint(Net()), torch.randn(3, 4)
    copied = copy.deepcopy(model)
    checkpoint.state(model).enable_hook = False
    assert checkpoint.state(copied).enable_hook
    seen = Operators()
    loss = copied(x).sum()
    with seen:
        backward(loss)
    assert "tanh" in seen.again
    with pytest.raises(AssertionError, match="already"):
        checkpoint(copied)


def test_a_pickled_module_is_checkpointed_where_it_is_loaded() -> None:
    program = """
import pickle, sys, torch
module = pickle.load(sys.stdin.buffer)
from recollect.compat.composable import checkpoint
assert checkpoint.state(module).enable_hook
seen = []
for _ in range(8):  # numbers of new hooks start at 0 in a new process
    module.register_forward_hook(lambda *_: seen.append(1))
    module.register_forward_pre_hook(lambda *_: None)
loss = module(torch.ones(1, 2)).sum()
assert len(seen) == 8
loss.backward()
assert len(seen) == 16  # it ran again
"""
    module = checkpoint(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), early_stop=False)
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(module), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_everything_dies_by_reference_counting() -> None:
    gc.disable()
    try:
        for is_run in (True, False):
            model = checkpoint(nn.Sequential(checkpoint(nn.Linear(2, 2)), nn.Tanh()))
            loss = model(torch.ones(1, 2)).sum()
            if is_run:
                backward(loss)
            alive = [ref(model), ref(model[0]), ref(loss)]
            del model, loss
            assert [thing() for thing in alive] == [None] * 3
    finally:
        gc.enable()


def test_a_module_lives_as_long_as_a_graph_that_needs_it() -> None:
    module = checkpoint(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    x = torch.ones(1, 2, requires_grad=True)
    loss = module(x).sum()
    del module
    backward(loss)
    assert x.grad is not None
