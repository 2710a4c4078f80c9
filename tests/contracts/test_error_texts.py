"""The whole text of every error and warning: what, with the values, and where; why it usually happens; what to do."""

import functools
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import compat
from recollect._core import errors
from recollect._recompute import graph_rng, rng
from tests.watching import backward

READS_CHANGED = (
    "The function read something that changed in between: a global, a random generator, the shape of another input, "
    "or an attribute of a module, which recollect.register_state would put back."
)
SEE_LOGS = "To see both operator logs side by side, wrap the step in `recollect.explain_mismatch()`."
OTHER = "has different values in recomputation and in forward"
NO_INPUT = (
    "none of the inputs of this reentrant checkpoint requires grad, so nothing inside it gets a gradient; "
    "use use_reentrant=False, which needs no such input"
)
ARGUMENT_CHANGED = """\
was changed in place after the region was entered.
Recomputation would read the new value. Either the function writes into its own input, or something did between \
forward and backward.
Use the out-of-place form of that operation, or pass a clone."""
STATE_CHANGED = """\
was changed in place between forward and recomputation, which would read the new value.
An optimizer step or another update ran before this backward; or the module updated it in its own forward, for the \
first time.
Run backward before the update. If a module updates its own state, register it with `recollect.register_state`."""


def line(marker: str) -> str:
    """File and number of the line that ends in this comment."""
    path = Path(__file__)
    numbers = [n for n, text in enumerate(path.read_text("utf-8").splitlines(), 1) if text.endswith(f"# {marker}")]
    assert len(numbers) == 1
    return f"{path.name}:{numbers[0]}"


def text_of(error: type[BaseException], function: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        function()
    assert type(caught.value) is error
    return str(caught.value)


# A model that reads a global


class Mlp(nn.Module):
    rows = 8
    scale = 1.0
    repeats = 1

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        y: Tensor = self.up(x)[: self.rows]  # up
        y = y.mul(self.scale)  # scale
        for _ in range(self.repeats):
            y = y.sigmoid()  # sigmoid
        return self.down(y)  # down


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x)  # layer


def mismatch(
    monkeypatch: pytest.MonkeyPatch, *, explained: bool = False, change: dict[str, Any], **options: Any
) -> str:
    """The error of a layer that finds another global in recomputation."""
    layer, x = Layer(), torch.ones(8, 4, requires_grad=True)
    region = recollect.checkpoint(layer, name="layers.3", **options)
    if explained:
        with recollect.explain_mismatch():
            loss = region(x).sum()
    else:
        loss = region(x).sum()
    for name, value in change.items():
        monkeypatch.setattr(Mlp, name, value)
    return text_of(recollect.MismatchError, lambda: backward(loss))


def test_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = "was float32[8, 16] on cpu in forward and float32[7, 16] in recomputation."
    assert mismatch(monkeypatch, change={"rows": 7}).splitlines() == [
        f"region 'layers.3': saved tensor 2 (output of aten.sigmoid in layers.3.mlp, {line('sigmoid')}) {shapes}",
        f"Also saved tensor 3 (input of aten.addmm in layers.3.mlp.down, {line('down')}) {shapes}",
        READS_CHANGED,
        SEE_LOGS,
    ]


def test_many_other_shapes_are_cut_to_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mlp, "repeats", 7)
    text = mismatch(monkeypatch, change={"rows": 7}).splitlines()
    assert [entry.partition(" (")[0] for entry in text[:5]] == [
        "region 'layers.3': saved tensor 2",
        *(f"Also saved tensor {number}" for number in (3, 4, 5, 6)),
    ]
    assert text[5:] == ["And 3 more.", READS_CHANGED, SEE_LOGS]


@pytest.mark.parametrize(
    ("cast", "change"),
    [
        ({"dtype": torch.float64}, "float32[2] on cpu in forward and float64[2] in recomputation"),
        ({"device": "meta"}, "float32[2] on cpu in forward and float32[2] on meta in recomputation"),
    ],
)
def test_another_dtype_or_device(cast: dict[str, Any], change: str) -> None:
    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(**cast if recollect.is_recomputing() else {"dtype": torch.float32}).exp()  # cast

    loss = recollect.checkpoint(Cast())(torch.ones(2, requires_grad=True)).sum()
    assert text_of(recollect.MismatchError, lambda: backward(loss)).splitlines() == [
        f"region 'Cast': saved tensor 0 (output of aten.exp in Cast, {line('cast')}) was {change}.",
        READS_CHANGED,
        SEE_LOGS,
    ]


@pytest.mark.parametrize(
    ("repeats", "counts"),
    [
        (1, "forward saved 7 tensors and recomputation 5, so saved tensor 5 is missing."),
        (4, "forward saved 7 tensors and recomputation 8."),
    ],
)
def test_another_number_of_tensors(monkeypatch: pytest.MonkeyPatch, repeats: int, counts: str) -> None:
    monkeypatch.setattr(Mlp, "repeats", 3)
    text = mismatch(monkeypatch, change={"repeats": repeats}, early_stop=False)
    first, difference, *rest = text.splitlines()
    assert first == f"region 'layers.3': {counts}"
    assert re.fullmatch(
        r"First, saved tensor \d \(.* in layers\.3\.mlp\.down, .*\) was float32.* in recomputation\.", difference
    )
    assert rest == [*READS_CHANGED.splitlines(), *SEE_LOGS.splitlines()]


def test_one_tensor_is_not_called_tensors() -> None:
    loss = recollect.checkpoint(lambda x: x if recollect.is_recomputing() else x.exp(), name="f")
    text = text_of(recollect.MismatchError, lambda: backward(loss(torch.ones(2, requires_grad=True)).sum()))
    assert text.splitlines()[0] == (
        "region 'f': forward saved 1 tensor and recomputation 0, so saved tensor 0 is missing."
    )


@pytest.mark.parametrize(
    ("check", "how"),
    [
        ("values", "to the bit"),
        (recollect.ValueCheck(rtol=1e-3), "beyond rtol=0.001, atol=0 (host copies kept for this check: 1.62 KiB)"),
        (
            recollect.ValueCheck(atol=0.25, every=1),
            "beyond rtol=0, atol=0.25 (host copies kept for this check: 1.62 KiB)",
        ),
    ],
    ids=str,
)
def test_other_values(monkeypatch: pytest.MonkeyPatch, check: Any, how: str) -> None:
    torch.manual_seed(0)
    text = mismatch(monkeypatch, change={"scale": 100.0}, check=check)
    place = f"output of aten.sigmoid in layers.3.mlp, {line('sigmoid')}"
    assert text.splitlines() == [
        f"region 'layers.3': saved tensor 2 ({place}) {OTHER}, {how}.",
        READS_CHANGED,
        SEE_LOGS,
    ]


# Explanations


def row(mark: str, number: int, forward: str, again: str) -> str:
    return f"{mark}{number:>5} {cut(forward):<56} {cut(again)}"


def test_an_explanation_shows_both_logs_and_marks_the_first_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    text = mismatch(monkeypatch, explained=True, change={"rows": 7}, early_stop=False).splitlines()
    start = next(number for number, entry in enumerate(text) if entry.split() == ["forward", "recomputation"])
    up, scale, sigmoid, down = (line(marker) for marker in ("up", "scale", "sigmoid", "down"))
    stack = [f"    {scale} in Mlp.forward", f"    {line('layer')} in Layer.forward"]
    assert text[start + 1 :] == [
        row(" ", 0, *[f"{up}  aten.t(float32[16, 4])"] * 2),
        row(" ", 1, *[f"{up}  aten.addmm(float32[16], float32[8, 4], float32[4, 16])"] * 2),
        row(" ", 2, *[f"{up}  aten.slice.Tensor(float32[8, 16])"] * 2),
        row(">", 3, f"{scale}  aten.mul.Tensor(float32[8, 16])", f"{scale}  aten.mul.Tensor(float32[7, 16])"),
        row(" ", 4, f"{sigmoid}  aten.sigmoid(float32[8, 16])", f"{sigmoid}  aten.sigmoid(float32[7, 16])"),
        row(" ", 5, *[f"{down}  aten.t(float32[4, 16])"] * 2),
        row(
            " ",
            6,
            f"{down}  aten.addmm(float32[4], float32[8, 16], float32[16, 4])",
            f"{down}  aten.addmm(float32[4], float32[7, 16], float32[16, 4])",
        ),
        "forward, operator 3 in layers.3.mlp, came from:",
        *stack,
        "recomputation, operator 3 in layers.3.mlp, came from:",
        *stack,
    ]


def cut(cell: str) -> str:
    return cell if len(cell) <= 56 else cell[:55] + "…"


LONG_STEPS = 300


@pytest.mark.parametrize("where", [0, 150, 299])
@pytest.mark.parametrize("early_stop", [True, False])
def test_an_explanation_fits_on_a_screen(where: int, early_stop: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        for step in range(LONG_STEPS):
            x = (x[:-1] if step == where and recollect.is_recomputing() else x).sin()
        return x

    with recollect.explain_mismatch():
        loss = recollect.checkpoint(fn, early_stop=early_stop)(torch.ones(2, requires_grad=True)).sum()
    text = text_of(recollect.MismatchError, lambda: backward(loss)).splitlines()
    assert len(text) <= 40
    table = next(number for number, entry in enumerate(text) if entry.split() == ["forward", "recomputation"])
    assert max(map(len, text[table:])) <= 120
    (marked,) = (entry for entry in text if entry.startswith(">"))
    assert [cell.partition("(")[0] for cell in marked.split()[2:] if "aten" in cell] == [
        "aten.sin",
        "aten.slice.Tensor",
    ]


def test_an_explanation_of_other_values_shows_the_operators_of_the_function_only() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * (2 if recollect.is_recomputing() else 1)).sin()  # scaled

    with recollect.explain_mismatch():
        loss = recollect.checkpoint(Scaled(), check="values", early_stop=False)(torch.ones(2).requires_grad_()).sum()
    assert text_of(recollect.MismatchError, lambda: backward(loss)).splitlines() == [
        f"region 'Scaled': saved tensor 0 (output of aten.mul in Scaled, {line('scaled')}) {OTHER}, to the bit.",
        "forward and recomputation ran the same 2 operators on the same shapes.",
    ]


@pytest.mark.parametrize("setting", [True, False])
def test_the_debug_setting_overrides_the_argument_both_ways(setting: bool) -> None:
    with compat.set_checkpoint_debug_enabled(setting):
        loss = compat.checkpoint(
            lambda x: x[: 1 if recollect.is_recomputing() else 2].exp(),
            torch.ones(2, requires_grad=True),
            use_reentrant=False,
            debug=not setting,
        ).sum()
    text = text_of(recollect.MismatchError, lambda: backward(loss))
    assert ("came from:" in text) is setting
    assert (SEE_LOGS in text) is not setting


def test_a_debug_setting_of_none_leaves_it_to_the_argument() -> None:
    def fn(x: Tensor) -> Tensor:
        return x[: 1 if recollect.is_recomputing() else 2].exp()

    for debug in (True, False):
        with compat.set_checkpoint_debug_enabled(None):
            loss = compat.checkpoint(fn, torch.ones(2).requires_grad_(), use_reentrant=False, debug=debug).sum()
        assert ("came from:" in text_of(recollect.MismatchError, functools.partial(backward, loss))) is debug


# Changes in place


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda region, x, z: region(x, z), "argument 1"),
        (lambda region, x, z: region(x, mask=z), "argument 'mask'"),
        (lambda region, x, z: region(x, [0, (z,)]), "argument 1[1][0]"),
        (lambda region, x, z: region(x, cache={"k": [z]}), "argument 'cache'['k'][0]"),
    ],
)
def test_a_changed_argument(call: Callable[..., Tensor], name: str) -> None:
    def read(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (z,) = (leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        return x.exp() * z

    z = torch.ones(3)
    loss = call(recollect.checkpoint(read, name="f"), torch.ones(3, requires_grad=True), z).sum()
    z.add_(1)
    assert text_of(recollect.ChangedInputError, lambda: backward(loss)) == f"region 'f': {name} {ARGUMENT_CHANGED}"


def test_an_argument_that_the_function_writes_into() -> None:
    x = torch.ones(3, requires_grad=True).clone()
    loss = recollect.checkpoint(lambda x: x.exp_().sin(), name="f")(x).sum()
    assert text_of(recollect.ChangedInputError, lambda: backward(loss)) == f"region 'f': argument 0 {ARGUMENT_CHANGED}"


@pytest.mark.parametrize(
    ("pick", "name"),
    [
        (lambda block: block[0].weight, "parameter 'weight' of Linear"),
        (lambda block: block[1].running_mean, "buffer 'running_mean' of BatchNorm1d"),
    ],
)
def test_a_changed_parameter_or_buffer(pick: Callable[[nn.Module], Tensor], name: str) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Tanh())
    loss = recollect.checkpoint(block, name="block")(torch.ones(2, 4)).sum()
    with torch.no_grad():
        pick(block).add_(1)
    assert text_of(recollect.ChangedInputError, lambda: backward(loss)) == f"region 'block': {name} {STATE_CHANGED}"


def test_a_changed_tensor_that_the_function_closes_over() -> None:
    z = torch.ones(3)
    loss = recollect.checkpoint(lambda x: x.exp() * z, name="f")(torch.ones(3, requires_grad=True)).sum()
    z.add_(1)
    assert text_of(recollect.ChangedInputError, lambda: backward(loss)) == (
        f"region 'f': a tensor of shape [3] that the function closes over {STATE_CHANGED}"
    )


def test_a_saved_tensor_that_the_function_writes_into() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        z = y.sin()
        y.add_(1)
        return z

    loss = recollect.checkpoint(fn, early_stop=False)(torch.ones(3, requires_grad=True)).sum()
    assert text_of(recollect.ChangedInputError, lambda: backward(loss)) == (
        "region 'fn': a saved tensor (float32[3]) was changed in place after it had been saved for backward, by the "
        "function itself.\n"
        "Autograd would refuse this without the region, too. Use the out-of-place form of that operation."
    )


# Options and registrations

X = torch.ones(2, requires_grad=True)
CHAIN = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
PRESERVE = "expected True, False or a collection of 'numpy', 'python', 'torch'"
CHECK = "expected 'metadata', 'values', 'none' or a recollect.ValueCheck"
SEGMENTS = "expected a whole number from 1 to 3, the number of functions"

REFUSALS: list[tuple[type[Exception], Callable[[], Any], str]] = [
    (ValueError, lambda: recollect.checkpoint(torch.sin, preserve_rng="cuda"), f"preserve_rng='cuda': {PRESERVE}"),
    (ValueError, lambda: recollect.checkpoint(torch.sin, preserve_rng=()), f"preserve_rng=(): {PRESERVE}"),
    (
        ValueError,
        lambda: recollect.checkpoint(torch.sin, preserve_rng=["torch", "jax"]),
        f"preserve_rng=['torch', 'jax']: {PRESERVE}",
    ),
    (ValueError, lambda: recollect.checkpoint(torch.sin, check="shapes"), f"check='shapes': {CHECK}"),  # type: ignore[call-overload]
    (ValueError, lambda: recollect.checkpoint(torch.sin, check=None), f"check=None: {CHECK}"),  # type: ignore[call-overload]
    (ValueError, lambda: recollect.checkpoint(torch.sin, check=["values"]), f"check=['values']: {CHECK}"),  # type: ignore[call-overload]
    (
        TypeError,
        lambda: recollect.checkpoint(3),  # type: ignore[call-overload]
        (
            "recollect.checkpoint expects a function or module first, not int 3; "
            "call it as recollect.checkpoint(fn)(*args)"
        ),
    ),
    (
        ValueError,
        lambda: recollect.ValueCheck(every=0),
        "ValueCheck(every=0): expected a whole number of at least 1",
    ),
    (ValueError, lambda: recollect.ValueCheck(rtol=-1), "ValueCheck(rtol=-1): expected a number of at least 0"),
    (
        ValueError,
        lambda: recollect.ValueCheck(atol=float("nan")),
        "ValueCheck(atol=nan): expected a number of at least 0",
    ),
    (TypeError, lambda: recollect.register_ambient(3), "register_ambient expects a function, not 3"),  # type: ignore[arg-type]
    (
        TypeError,
        lambda: recollect.register_state(3, "calls"),  # type: ignore[arg-type]
        "register_state expects a subclass of torch.nn.Module, not 3",
    ),
    (
        ValueError,
        lambda: recollect.register_state(nn.Linear),
        "register_state(Linear): expected names of attributes, as in 'calls'; got ()",
    ),
    (
        ValueError,
        lambda: compat.checkpoint(torch.sin, X, use_reentrant=True, b=1, a=2),
        "unexpected keyword arguments with use_reentrant=True: a, b; pass them by position, or use use_reentrant=False",
    ),
    (
        ValueError,
        lambda: compat.checkpoint(torch.sin, X, use_reentrant=True, debug=True),
        "context_fn and debug need use_reentrant=False",
    ),
    (
        ValueError,
        lambda: compat.checkpoint(torch.sin, X, use_reentrant=True, context_fn=lambda: (X, X)),  # type: ignore[arg-type,return-value]
        "context_fn and debug need use_reentrant=False",
    ),
    (
        ValueError,
        lambda: compat.checkpoint(torch.sin, X, use_reentrant=False, determinism_check="all"),
        "determinism_check='all': expected one of 'default', 'none'",
    ),
    (
        TypeError,
        lambda: compat.checkpoint(torch.sin, X, use_reentrant=False, context_fn=lambda: None),  # type: ignore[arg-type,return-value]
        "region 'sin': context_fn must return two context managers, not None",
    ),
    (
        RuntimeError,
        lambda: compat.detach_variable([X]),  # type: ignore[arg-type]
        "detach_variable expects a tuple of values, not list",
    ),
    *(
        (
            ValueError,
            lambda segments=segments: compat.checkpoint_sequential(CHAIN, segments, X, use_reentrant=False),
            f"segments={segments}: {SEGMENTS}",
        )
        for segments in (0, 4, -1, 1.5, True)
    ),
    (
        ValueError,
        lambda: compat.checkpoint_sequential(CHAIN, 2, X, use_reentrant=False, speed="fast"),
        "unexpected keyword arguments: speed; expected preserve_rng_state",
    ),
    (
        ValueError,
        lambda: recollect.graph_rng(None, regions=0).__enter__(),  # type: ignore[arg-type]
        "regions=0: expected at least 1, the number of region calls in the captured step",
    ),
    (
        RuntimeError,
        lambda: torch.autograd.grad(compat.checkpoint(torch.sin, X, use_reentrant=True).sum(), X),
        (
            "the reentrant checkpoint does not work with torch.autograd.grad() or backward(inputs=...); "
            "use use_reentrant=False"
        ),
    ),
    (
        RuntimeError,
        lambda: backward(compat.checkpoint(torch.detach, X, use_reentrant=True).sum()),
        (
            "none of the outputs of this reentrant checkpoint requires grad, so there is nothing to run backward "
            "through; use use_reentrant=False, or remove the checkpoint"
        ),
    ),
]


@pytest.mark.parametrize(("error", "function", "text"), REFUSALS, ids=[text[:50] for _, _, text in REFUSALS])
def test_what_cannot_be_meant_is_refused(error: type[Exception], function: Callable[[], Any], text: str) -> None:
    assert text_of(error, function) == text


def test_a_forward_context_that_swallows() -> None:
    class Swallow:
        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> bool:
            return True

    def fn(x: Tensor) -> Tensor:
        raise KeyError

    call = lambda: compat.checkpoint(fn, X, use_reentrant=False, context_fn=lambda: (Swallow(), Swallow()))  # noqa: E731
    assert text_of(recollect.CheckpointError, call) == (
        "region 'fn': the forward context of context_fn swallowed the function's exception. "
        "Let its __exit__ return False: the region has no result to return"
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: compat.checkpoint(torch.sin, X),
            (
                "checkpoint was called without use_reentrant: True is assumed, as in torch. Pass use_reentrant=False, "
                "which has fewer limits, or use_reentrant=True to keep this behaviour."
            ),
        ),
        (
            lambda: compat.checkpoint_sequential(CHAIN, 2, X),
            (
                "checkpoint_sequential was called without use_reentrant: True is assumed, as in torch. Pass "
                "use_reentrant=False, which has fewer limits, or use_reentrant=True to keep this behaviour."
            ),
        ),
        (
            lambda: compat.check_backward_validity([torch.ones(1)]),
            NO_INPUT,
        ),
        (
            lambda: compat.checkpoint(torch.sin, torch.ones(1), use_reentrant=True),
            NO_INPUT,
        ),
    ],
)
def test_warnings_point_at_their_caller(call: Callable[[], Any], text: str) -> None:
    with pytest.warns(UserWarning, match="reentrant") as caught:
        call()
    (warning,) = caught
    assert str(warning.message) == text
    assert warning.filename == __file__


# Groups


def test_overlapping_backward_calls_of_a_group() -> None:
    loss = recollect.checkpoint(lambda x: x.exp().sin(), name="f")(X).sum()
    with compat.GraphExecGroup():
        backward(loss, keep=True)
        assert text_of(recollect.CheckpointError, lambda: backward(loss, keep=True)) == (
            "region 'f': two backward calls of one GraphExecGroup need the same saved tensor.\n"
            "Backward calls in a group share one recomputation, so they must not overlap. Run the second one in a "
            "group of its own."
        )


def test_nested_groups() -> None:
    with compat.GraphExecGroup():
        assert text_of(RuntimeError, lambda: compat.GraphExecGroup().__enter__()) == (
            "a GraphExecGroup is open already: groups cannot be nested; close the outer one first"
        )


# Transforms

TRACKED = """\
region 'f': inside a torch.func transform it reads a tensor of shape [4] that is neither one of its arguments nor a \
parameter or buffer of its modules.
The transform tracks that tensor, and its gradient would be lost.
Pass the tensor to the function as an argument."""


def through_a_closure(w: Tensor) -> Any:
    return recollect.checkpoint(lambda: (w * 2).sum(), name="f")()


def through_a_hidden_place(w: Tensor) -> Any:
    hidden = {"deep": {"deeper": types.SimpleNamespace(w=types.SimpleNamespace(w=w * 2))}}
    region = recollect.checkpoint(lambda u: (hidden["deep"]["deeper"].w.w * u).sum(), name="f")
    return region(torch.ones(4))


@pytest.mark.parametrize("read", [through_a_closure, through_a_hidden_place])
def test_a_tracked_tensor_that_the_region_cannot_see(read: Callable[[Tensor], Any]) -> None:
    assert text_of(recollect.TransformError, lambda: torch.func.grad(read)(torch.ones(4))) == TRACKED


def test_a_trained_tensor_that_the_region_cannot_see() -> None:
    w = torch.ones(4, requires_grad=True)
    read = recollect.checkpoint(lambda v: (w * v).sum(), name="f")
    assert text_of(recollect.TransformError, lambda: torch.func.grad(read)(torch.ones(4))) == TRACKED


def test_contexts_inside_a_transform() -> None:
    def fn(x: Tensor) -> Any:
        return compat.checkpoint(
            torch.sum, x, use_reentrant=False, context_fn=lambda: (torch.enable_grad(), torch.enable_grad())
        )

    assert text_of(ValueError, lambda: torch.func.grad(fn)(torch.ones(2))) == (
        "region 'sum': context_fn does not work inside a torch.func transform; leave it out there"
    )


# Devices that a CPU build has not


@pytest.fixture
def an_accelerator_that_starts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    started = [False]
    device = types.SimpleNamespace(is_initialized=lambda: started[0])
    monkeypatch.setattr(rng, "accelerator", lambda: ("cuda", device))
    return started


def test_a_region_that_starts_up_the_accelerator(an_accelerator_that_starts: list[bool]) -> None:
    def fn(x: Tensor) -> Tensor:
        an_accelerator_that_starts[0] = True
        return x.exp()

    assert text_of(RuntimeError, lambda: recollect.checkpoint(fn)(X)) == (
        "region 'fn' initialized the accelerator: its random state before the region is unknown, so recomputation "
        "could not draw the same numbers.\n"
        "Use the device once before the first region (for instance move the model there first), or pass "
        "preserve_rng=False (preserve_rng_state=False in recollect.compat)."
    )
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_arguments_on_two_kinds_of_accelerator() -> None:
    with pytest.warns(UserWarning, match="cuda and xpu") as caught:
        rng._warn_of_kinds({"xpu", "cuda"})
    assert str(caught[0].message) == (
        "the arguments of a region are on cuda and xpu: their random states are all preserved, but autocast only for "
        "the CPU and the current accelerator"
    )


def test_random_numbers_in_an_unprepared_capture() -> None:
    with graph_rng._RandomWatch("f"):
        assert text_of(recollect.CaptureError, lambda: torch.rand(2)) == (
            "region 'f' draws random numbers (aten.rand.default) while a CUDA graph is being captured: recomputation "
            "could not draw them again.\n"
            "Enter `recollect.graph_rng(graph, regions=...)` before the capture (regions nested in a drawing one must "
            "not draw), or pass preserve_rng=False if the numbers may differ."
        )
        assert torch.ones(2).sum() == 2


def test_a_capture_with_more_regions_than_announced() -> None:
    pool = graph_rng._Pool(torch.default_generator, [])
    token = graph_rng._pool.set(pool)
    try:
        assert text_of(recollect.CaptureError, lambda: graph_rng.enter_capture(torch.default_generator)) == (
            "graph_rng(regions=0): the captured step calls more regions than that.\n"
            "Raise the number; more than needed does no harm."
        )
    finally:
        graph_rng._pool.reset(token)


def test_a_capture_that_recomputes_twice() -> None:
    pair = object.__new__(graph_rng.Pair)
    pair._again = None
    assert text_of(recollect.CaptureError, pair.again) == (
        "a region with random numbers is recomputed twice within one CUDA-graph capture: there is one spare state per "
        "region.\n"
        "Capture one backward per forward, without retain_graph."
    )


# The tree


def drawn_tree() -> dict[str, tuple[str, str]]:
    """Parent and builtin base of each exception, as drawn in the docstring."""
    tree: dict[str, tuple[str, str]] = {}
    path: list[str] = []
    for row in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ([│├└─ ]*)(\w+)(?: \((\w+)\))?", row)
        if found is None:
            continue
        marks, name, builtin = found.groups()
        depth = len(marks) // 4
        path[depth:] = [name]
        tree[name] = (path[depth - 1] if depth else "Exception", builtin or "")
    return tree


def test_the_exceptions_form_the_tree_that_is_drawn() -> None:
    defined = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    real = {}
    for name, kind in defined.items():
        parent, *others = kind.__bases__
        real[name] = (parent.__name__, others[0].__name__ if others else "")
    assert drawn_tree() == real
    assert len(real) == 10


@pytest.mark.parametrize("name", sorted(drawn_tree()))
def test_every_exception_is_public_and_described(name: str) -> None:
    assert getattr(recollect, name) is getattr(errors, name)
    assert getattr(errors, name).__doc__


def test_compat_names_the_same_checkpoint_error() -> None:
    assert compat.CheckpointError is recollect.CheckpointError
    assert sys.modules["recollect"] is recollect


def test_a_mismatch_names_objects_that_the_function_may_have_changed() -> None:
    class Cache:
        __slots__ = ("keys",)

        def __init__(self) -> None:
            self.keys: list[Tensor] = []

    def attend(x: Tensor, *, cache: Cache) -> Tensor:
        cache.keys.append(x)
        return torch.cat(cache.keys).sin().exp()

    out = recollect.checkpoint(attend)(torch.ones(2, requires_grad=True), cache=Cache())
    with pytest.raises(recollect.MismatchError) as caught:
        out.sum().backward()
    assert "Or it changed one of its arguments (Cache): recomputation gets it as forward left it." in str(caught.value)
