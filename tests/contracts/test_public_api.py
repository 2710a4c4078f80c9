"""The public names are exactly these, and each one explains itself."""

import inspect
import pickle
import traceback
from pathlib import Path
from types import ModuleType

import pytest

import recollect
import recollect.compat
import recollect.compat.composable
import recollect.compat.higher_order
from recollect._core import errors as errors_module

RECOLLECT = [
    "Applied",
    "BudgetError",
    "CaptureError",
    "ChangedInputError",
    "CheckpointError",
    "Choice",
    "CompileError",
    "Decision",
    "Fitted",
    "MismatchError",
    "Offload",
    "OffloadError",
    "OffloadReport",
    "OomReport",
    "Plan",
    "Profile",
    "RecollectError",
    "Site",
    "Tier",
    "TierFullError",
    "TransformError",
    "ValueCheck",
    "apply",
    "checkpoint",
    "explain",
    "explain_mismatch",
    "fit",
    "graph_rng",
    "is_recomputing",
    "linear_cross_entropy",
    "name",
    "offload",
    "on_oom",
    "partitioner",
    "plan",
    "policies",
    "print_saved",
    "profile",
    "region",
    "register_ambient",
    "register_state",
    "remove",
    "report",
]

COMPAT = [
    "SAC_IGNORED_OPS",
    "ActivationWrapper",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointImpl",
    "CheckpointPolicy",
    "CheckpointWrapper",
    "DefaultDeviceType",
    "GraphExecGroup",
    "Installation",
    "OffloadWrapper",
    "SelectiveCheckpointContext",
    "apply_activation_checkpointing",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "install",
    "noop_context_fn",
    "offload_wrapper",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
    "uninstall",
]

COMPOSABLE = ["checkpoint", "contract", "get_registry"]

HIGHER_ORDER = [
    "TagActivationCheckpoint",
    "Wrap",
    "WrapActivationCheckpoint",
    "WrapWithSetGradEnabled",
    "tag_activation_checkpoint",
    "wrap",
    "wrap_activation_checkpoint",
    "wrap_with_set_grad_enabled",
]

PUBLIC = [
    pytest.param(module, name, id=f"{module.__name__}.{name}")
    for module in (recollect, recollect.compat, recollect.compat.composable, recollect.compat.higher_order)
    for name in module.__all__
]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (recollect, RECOLLECT),
        (recollect.compat, COMPAT),
        (recollect.compat.composable, COMPOSABLE),
        (recollect.compat.higher_order, HIGHER_ORDER),
    ],
)
def test_all_lists_the_public_names_in_order(module: ModuleType, names: list[str]) -> None:
    assert names == sorted(names, key=lambda name: (not name.isupper(), name))  # constants first, as ruff has it
    assert list(module.__all__) == names


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_names_exist_and_have_a_docstring(module: ModuleType, name: str) -> None:
    assert lacks_docstring(getattr(module, name)) is False


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_functions_have_an_example(module: ModuleType, name: str) -> None:
    assert lacks_example(getattr(module, name)) is False


def test_exceptions_are_named_as_users_catch_them_and_can_be_pickled() -> None:
    errors = [one for one in map(vars(errors_module).get, recollect.__all__) if one is not None]
    assert len(errors) > 5
    for kind in errors:
        given = ("full", 3) if kind is recollect.BudgetError else ("full",)
        loaded = pickle.loads(pickle.dumps(kind(*given)))
        assert type(loaded) is kind
        assert traceback.format_exception_only(loaded) == [f"recollect.{kind.__name__}: full\n"]


def test_the_version_is_the_one_that_is_to_be_cited() -> None:
    citation = (Path(__file__).parents[2] / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {recollect.__version__}\n" in citation


def lacks_docstring(thing: object) -> bool:
    # Own docstrings only: `inspect.getdoc` would accept one inherited from a base class.
    return not (getattr(thing, "__doc__", None) or "").strip()


def lacks_example(thing: object) -> bool:
    return inspect.isroutine(thing) and ">>>" not in (thing.__doc__ or "")


def test_the_checks_can_fail() -> None:
    def bare() -> None: ...

    def described() -> None:
        """Does nothing."""

    assert lacks_docstring(bare)
    assert lacks_example(described)
