"""What users of torch write by mistake is refused at once, with the value, the reason and the way out."""

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.data import DataLoader

import recollect
import recollect.compat
import recollect.compat.composable
from recollect import Decision, Plan, Profile, policies
from tests.refusing import Wrong, refuse
from tests.trying import try_all

API: Any = recollect  # what is written here has the wrong types
POLICIES: Any = policies
COMPAT: Any = recollect.compat


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def x() -> Tensor:
    return torch.ones(8, 16)


def torchs_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del ctx, op, args, kwargs
    return CheckpointPolicy.MUST_SAVE


def steps() -> Iterator[Tensor]:
    yield x()


async def step() -> Tensor:
    return x()


@cache
def seen() -> Profile:
    return recollect.profile(Net(), x(), timed=False)


def test_checkpoint_refuses_what_it_cannot_wrap() -> None:
    wrong: list[Wrong] = [
        (
            lambda: API.checkpoint(Net()(x())),
            TypeError,
            "expects a function or module first, not <Tensor float32[8, 4]>;",
        ),
        (
            lambda: API.checkpoint(Net),
            TypeError,
            "the class Net: calling a class only makes an object.\nPass an instance",
        ),
        (lambda: API.checkpoint(steps), TypeError, "calling steps only starts a generator or coroutine"),
        (lambda: API.checkpoint(step), TypeError, "calling step only starts a generator or coroutine"),
        (lambda: API.checkpoint(Net().layers), ValueError, "ModuleList cannot be made a region: it holds modules"),
        (lambda: API.checkpoint(Net(), name=3), ValueError, "name=3: expected a string"),
        (lambda: API.checkpoint(Net(), name=""), ValueError, "name='': expected a string"),
        (lambda: API.checkpoint(Net(), every=2), TypeError, "every=2: use recollect.apply(model, every=...)"),
        (lambda: API.checkpoint(Net(), rules={}), TypeError, "rules={}: use recollect.apply(model, rules=...)"),
        (lambda: API.checkpoint(fn=Net(), function=Net()), TypeError, "no option function=<module Net>:"),
        (
            lambda: API.checkpoint(Net(), context_fn=torchs_policy),
            TypeError,
            "context_fn=<function torchs_policy>: write",
        ),
        (lambda: API.checkpoint(Net(), policy="save_matmuls"), ValueError, "; write recollect.policies.save_matmuls"),
        (lambda: API.checkpoint(Net(), policy="Selective"), ValueError, "did you mean 'selective'?"),
        (
            lambda: API.checkpoint(Net(), policy=torchs_policy),
            TypeError,
            "policy torchs_policy cannot be called with one",
        ),
        (lambda: API.checkpoint(Net(), policy=Net()), TypeError, "expected a policy: one of"),
        (lambda: API.checkpoint(Net(), policy=API.checkpoint), TypeError, "not recollect.checkpoint itself"),
        (
            lambda: API.checkpoint(Net(), offload_inputs=True, offload_to=Net()),
            TypeError,
            "offload_to=<module Net>: expected",
        ),
    ]
    try_all(refuse, wrong)


def test_apply_refuses_what_it_cannot_apply() -> None:
    def three(one: Any, two: Any, more: Any) -> bool:
        return bool(one or two or more)

    wrong: list[Wrong] = [
        (lambda: API.apply(list(Net().layers)), TypeError, "not list [<module Sequential>, <module Sequential>"),
        (lambda: API.apply(Net), TypeError, "expects a torch.nn.Module first, not the class Net"),
        (lambda: API.apply(Net(), Net().layers[0]), TypeError, "recollect.Decision; not <module Sequential>"),
        (lambda: API.apply(Net(), API.offload), TypeError, "recollect.Decision; not recollect.offload itself"),
        (lambda: API.apply(Net(), {"layers.*": API.offload}), TypeError, "rule 'layers.*': expected a policy"),
        (lambda: API.apply(Net(), "8GB"), ValueError, "; for a budget, use recollect.fit(model, batch, budget=...)"),
        (lambda: API.apply(Net(), "80 %"), ValueError, "; for a budget, use recollect.fit(model, batch, budget=...)"),
        (lambda: API.apply(Net(), "plan.json"), ValueError, "; to read a plan, write recollect.Plan.from_json("),
        (lambda: API.apply(Net(), Plan().to_json()), ValueError, "; to read a plan, write recollect.Plan.from_json("),
        (lambda: API.apply(Net(), seen()), TypeError, "this is a profile. Make a plan from it: recollect.plan("),
        (lambda: API.apply(Net(), policy="save_matmuls"), ValueError, "; write recollect.policies.save_matmuls"),
        (lambda: API.apply(Net(), "selectiv"), ValueError, "; did you mean 'selective'?"),
        (lambda: API.apply(Net(), {"layers.*": "recompute"}), ValueError, "; write recollect.Decision.RECOMPUTE"),
        (
            lambda: API.apply(Net(), {"Linear": "full"}),
            ValueError,
            "of Net; to match the class, pass it without quotes",
        ),
        (lambda: API.apply(Net(), {"layers.*": None}), TypeError, "or a recollect.Decision; not None"),
        (
            lambda: API.apply(Net(), {three: "full"}),
            TypeError,
            "rule three: expected a function of a module, or of its",
        ),
        (
            lambda: API.apply(Net(), {nn.Linear(2, 2): "full"}),
            ValueError,
            "rule <module Linear> matches no module of Net",
        ),
        (lambda: API.apply(Net(), Plan(), every=2), ValueError, "every=2 only works with rules"),
        (lambda: API.apply(Net(), Plan(), first=2), ValueError, "first=2 only works with rules"),
    ]
    try_all(refuse, wrong)


def test_handles_and_reports_refuse_what_is_no_profile() -> None:
    model = Net()
    handle: Any = recollect.apply(model)
    loss = model(x()).sum()
    wrong: list[Wrong] = [
        (
            lambda: handle.compare(model, model),
            TypeError,
            "compare expects two profiles, before and after, not <module Net>",
        ),
        (lambda: API.explain(x()), TypeError, "expects a region, a function or a module, not <Tensor float32[8, 16]>"),
        (lambda: API.print_saved(loss, top="a"), ValueError, "top='a': expected a whole number of at least 0"),
        (lambda: API.on_oom(top="a"), ValueError, "top='a': expected a whole number of at least 0"),
        (lambda: API.on_oom()(3), TypeError, "expects a function to watch, not int 3"),
        (lambda: API.report(seen(), 3), TypeError, "to=3: expected the path of a file to write"),
        (lambda: API.report(seen(), seen()), TypeError, "To compare two profiles, pass against="),
        (lambda: API.Plan().diff(3), TypeError, "diff expects another plan, not int 3"),
        (
            lambda: API.Plan.from_json("plan.json"),
            ValueError,
            "not the name of a file: pass Path('plan.json').read_text()",
        ),
        (lambda: API.Profile.from_json(Path("a.json")), ValueError, "not the name of a file: pass Path('a.json')"),
        (lambda: API.Choice(decision="save"), TypeError, "decision='save': expected a recollect.Decision"),
        (lambda: API.region(steps), TypeError, "not <function steps>: write @recollect.region('steps')"),
        (lambda: API.region("a")(3), TypeError, "recollect.region('a') expects a function, not int 3"),
        (lambda: API.name("h", x()), TypeError, "needs a name, a non-empty string, not <Tensor float32[8, 16]>"),
    ]
    try_all(refuse, wrong)


def test_profile_refuses_what_is_no_step() -> None:
    wrong: list[Wrong] = [
        (lambda: API.profile(x(), Net()), TypeError, "a function that runs a step, not <Tensor float32[8, 16]>"),
        (lambda: API.profile(Net(), DataLoader([x()])), TypeError, "not a DataLoader: pass a batch of it"),  # type: ignore[arg-type]
        (lambda: API.profile(Net(), x(), kwargs=[1]), TypeError, "kwargs=[1]: expected a mapping"),
        (lambda: API.profile(Net(), x(), loss="mse"), TypeError, "loss='mse': expected a function"),
        (lambda: API.profile(Net(), x(), loss=F.mse_loss), TypeError, "Give it the targets: loss=lambda output:"),
        (lambda: API.profile(Net(), x(), loss=nn.MSELoss()), TypeError, "loss=<module MSELoss> cannot be called with"),
        (lambda: API.profile(Net(), x(), dry="yes"), ValueError, "dry='yes': expected True or False"),
        (lambda: API.profile(Net(), x(), timed="no"), ValueError, "timed='no': expected True or False"),
        (
            lambda: API.profile(Net(), x(), dtype=torch.bfloat16),
            ValueError,
            "dtype=torch.bfloat16 only works with dry=True",
        ),
        (
            lambda: API.profile(Net(), x(), dry=True, dtype="bf16"),
            TypeError,
            "dtype='bf16': expected a floating-point dtype",
        ),
        (lambda: API.profile(Net(), x(), dry=True, dtype=torch.int8), TypeError, "expected a floating-point dtype"),
        (lambda: API.profile(Net(), x(), name=3), TypeError, "name=3: expected a string"),
        (lambda: API.profile(Net(), x(), progress=3), TypeError, "progress=3: expected a function"),
    ]
    try_all(refuse, wrong)


def test_plan_and_fit_refuse_what_they_cannot_use() -> None:
    pytest.importorskip("scipy")
    model = Net()

    def fit(**options: Any) -> None:
        API.fit(model, x(), budget="8GB", **options)

    wrong: list[Wrong] = [
        (lambda: API.plan(seen(), budget="8GB", tiers=True), ValueError, "tiers=True: expected 'host', 'disk'"),
        (lambda: API.plan(seen(), budget="8GB", link_bytes_per_s=1e9), ValueError, "nothing is offloaded. Pass tiers="),
        (lambda: API.plan(seen(), budget="8GB", tiers="disk", link_bytes_per_s="5GB"), ValueError, "a number above 0"),
        (lambda: API.plan(seen(), budget="min", name=3), TypeError, "name=3: expected a string"),
        (lambda: API.plan(seen(), budget="min", progress=1), TypeError, "progress=1: expected a function"),
        (lambda: fit(tiers=True), ValueError, "tiers=True: expected 'host', 'disk'"),
        (lambda: fit(tiers="cpu"), ValueError, "or None to offload nothing; did you mean 'host'?"),
        (
            lambda: API.fit(model, x(), x(), budget="8GB"),
            TypeError,
            "recollect.fit was given 1 argument after the batch: pass a batch of several parts as one tuple",
        ),
        (
            lambda: API.plan(seen(), "8GB", budget="8GB"),
            TypeError,
            "recollect.plan takes only the profile by position: pass options by name, as in budget='40GiB'",
        ),
        (lambda: fit(levers=True), TypeError, "levers=True: expected names"),
        (
            lambda: fit(levers={"micro_batches": 0}),
            ValueError,
            "'micro_batches' has the value 0: expected a whole number",
        ),
        (lambda: fit(levers={"micro_batches": "4"}), ValueError, "has the value '4': expected a whole number"),
        (lambda: fit(levers={"chunked_loss": 3}), ValueError, "has the value 3: expected the name of a module"),
        (lambda: fit(recover="yes"), ValueError, "recover='yes': expected True or False"),
        (lambda: fit(progress=3), TypeError, "progress=3: expected a function"),
        (lambda: API.fit(x(), model, budget="8GB"), TypeError, "a torch.nn.Module first, not <Tensor float32[8, 16]>"),
        (lambda: API.partitioner("4GiB"), TypeError, "A budget is passed by name: budget='4GiB'"),
        (lambda: API.partitioner(budget="80 %"), ValueError, "Give bytes, as in '4GiB'"),
        (lambda: API.partitioner(planner=3), TypeError, "planner=3: expected a function"),
        (lambda: API.partitioner(Decision.SAVE, report=3), TypeError, "report=3: expected a function"),
        (lambda: API.partitioner(Net()), TypeError, "recollect.Decision; not <module Net>"),
    ]
    try_all(refuse, wrong)


def test_without_scipy_fit_says_so_before_it_runs_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)

    def run(batch: Tensor) -> None:
        raise AssertionError(batch)

    with pytest.raises(ImportError, match=r'^a plan needs scipy, .* Run: pip install "recollect\[plan\]"$'):
        recollect.fit(Net(), x(), step=run, budget="min")


def test_a_misspelt_name_is_refused_with_the_one_that_is_probably_meant(tmp_path: Path) -> None:
    net, page = Net(), tmp_path / "x.html"
    wrong: dict[str, list[Any]] = {
        "'chunked_loss'": [lambda: API.fit(net, x(), budget="1GiB", levers={"chunk_loss"})],
        "'disk'": [
            lambda: API.plan(seen(), budget="1GiB", tiers="dsik"),
            lambda: API.plan(seen(), budget="1GiB", tiers=("host", "disc")),
            lambda: API.offload("DISK"),
            lambda: API.offload(["host", "disc"]),
            lambda: API.checkpoint(net, offload_inputs=True, offload_to="dis"),
        ],
        "'bf16'": [lambda: API.offload(compress="bf-16")],
        "'values'": [lambda: API.checkpoint(net, check="value")],
        "'torch'": [lambda: API.checkpoint(net, preserve_rng="Torch")],
        "'numpy'": [lambda: API.checkpoint(net, preserve_rng={"torch", "nunpy"})],
        "'html'": [lambda: API.report(seen(), page, kind="htm")],
        "'H100'": [lambda: API.profile(net, x(), dry=True, device="H10")],
        "'mean'": [
            lambda: API.linear_cross_entropy(x(), net.head.weight, torch.zeros(8, dtype=torch.long), reduction="men")
        ],
        "'40GiB'": [lambda: API.plan(seen(), budget="40 Gi"), lambda: API.offload(limit="40Gi")],
        "'fastest'": [lambda: API.plan(seen(), budget="fastets")],
        "recollect.policies.save_matmuls": [
            lambda: API.checkpoint(net, policy="save_matmul"),
            lambda: API.apply(net, "save_matmul"),
        ],
        "'default'": [lambda: COMPAT.checkpoint(net, x(), use_reentrant=False, determinism_check="defualt")],
    }
    cases: list[Wrong] = [
        (call, ValueError, f"; did you mean {meant}?") for meant, calls in wrong.items() for call in calls
    ]
    try_all(refuse, cases)


def test_an_unknown_option_is_refused_with_what_to_write() -> None:
    net = Net()
    wrong: dict[str, Callable[[], Any]] = {
        "recollect.fit has no option tier='host': did you mean 'tiers'?": (
            lambda: API.fit(net, x(), budget="1GiB", tier="host")
        ),
        "recollect.fit has no option policy='full': use recollect.apply(model, policy=...)": (
            lambda: API.fit(net, x(), budget="1GiB", policy="full")
        ),
        "recollect.fit has no option input_ids=<Tensor float32[8, 16]>: pass the model's own arguments as its batch, "
        "as in batch={'input_ids': ...}": lambda: API.fit(net, input_ids=x(), budget="1GiB"),
        "recollect.plan has no option levers=('chunked_loss',): use recollect.fit": (
            lambda: API.plan(seen(), budget="1GiB", levers=("chunked_loss",))
        ),
        "recollect.plan has no option tier='host': did you mean 'tiers'?": (
            lambda: API.plan(seen(), budget="1GiB", tier="host")
        ),
        "recollect.plan has no option verbose=True: it takes 'profile', 'budget', 'tiers', 'link_bytes_per_s', "
        "'name', 'progress'": lambda: API.plan(seen(), budget="1GiB", verbose=True),
        "recollect.profile has no option mask=None: pass the model's inputs by position, or by name as in "
        "kwargs={'mask': ...}": lambda: API.profile(net, x(), mask=None),
        "recollect.profile has no option optimiser=None: did you mean 'optimizer'?": (
            lambda: API.profile(net, x(), optimiser=None)
        ),
        "recollect.report has no option topp=3: did you mean 'top'?": lambda: API.report(seen(), topp=3),
        "recollect.offload has no option folder='x': it takes 'tier', 'directory', 'min_bytes', 'limit', 'in_flight', "
        "'wait', 'compress'": (lambda: API.offload("disk", folder="x")),
        "recollect.apply has no option evry=2: did you mean 'every'?": (
            lambda: recollect.apply(net, evry=2)  # type: ignore[arg-type]  # type checkers refuse it as well
        ),
    }
    for text, call in wrong.items():
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == text


def test_a_name_that_is_like_none_gets_no_guess() -> None:
    wrong: list[Callable[[], Any]] = [
        lambda: API.offload("gpu"),
        lambda: API.plan(seen(), budget="plenty"),
        lambda: API.plan(seen(), budget="40 XiB"),
        lambda: API.plan(seen(), budget="inf"),
        lambda: API.profile(Net(), x(), dry=True, device="gpu"),
        lambda: API.checkpoint(Net(), check=5),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match="expected") as caught:
            call()
        assert "did you mean" not in str(caught.value)


def test_python_can_guess_which_name_of_the_package_is_meant() -> None:
    with pytest.raises(AttributeError, match=r"^module 'recollect' has no attribute 'chekpoint'$") as caught:
        API.chekpoint  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("chekpoint", recollect)


def test_policies_refuse_what_they_cannot_read() -> None:
    wrong: list[Wrong] = [
        (
            lambda: POLICIES.save_matmuls | POLICIES.save_attention,
            TypeError,
            "policies.first_match(save_matmuls, save_att",
        ),
        (
            lambda: POLICIES.save_if(lambda one, two: one is two),
            TypeError,
            "cannot be called with one argument: save_if",
        ),
        (lambda: POLICIES.flops > POLICIES.nbytes, TypeError, "flops > nbytes: expected a number"),
        (lambda: POLICIES.nbytes > "1MiB", TypeError, "nbytes > '1MiB': expected a number, as in nbytes > 2**20"),
        (lambda: POLICIES.save_modules(nn.Linear(2, 2)), TypeError, "subclasses of torch.nn.Module; not"),
    ]
    try_all(refuse, wrong)


def test_offload_and_the_chunked_loss_name_the_option(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    head, targets = nn.Linear(16, 4), torch.zeros(8, dtype=torch.long)
    wrong: list[Wrong] = [
        (lambda: API.offload(limit="lots"), ValueError, "limit='lots': expected bytes"),
        (lambda: API.offload(min_bytes=None), TypeError, "min_bytes=None: expected bytes"),
        (lambda: API.offload(in_flight=-1), ValueError, "in_flight=-1: a number of bytes cannot be negative"),
        (lambda: API.offload(Net()), TypeError, "tier=<module Net>: expected 'host', 'disk'"),
        (lambda: API.offload("cpu"), ValueError, "write, read, free and close; did you mean 'host'?"),
        (lambda: API.offload(pin_memory=True), TypeError, "no option pin_memory=True: leave it out; host memory is"),
        (lambda: API.offload(tier="disk", directory=3), TypeError, "directory=3: expected a path"),
        (
            lambda: API.offload(tier="disk", directory=file),
            recollect.OffloadError,
            f"the directory {str(file)!r}: a file is there. Pass another one as directory=",
        ),
        (lambda: API.linear_cross_entropy(x(), head, targets), TypeError, "of a layer, pass its weight"),
        (
            lambda: API.linear_cross_entropy(x(), head.weight, [0] * 8),
            TypeError,
            "targets=[0, 0, 0, 0, 0, 0, 0, 0]: expected",
        ),
        (lambda: API.linear_cross_entropy(x(), head.weight, targets, bias=3), TypeError, "bias=3: expected a tensor"),
        (
            lambda: API.linear_cross_entropy(x(), head.weight, targets, ignore_index="a"),
            TypeError,
            "ignore_index='a': exp",
        ),
    ]
    try_all(refuse, wrong)


def test_torchs_names_refuse_what_torch_lets_through() -> None:
    wrong: list[Wrong] = [
        (lambda: COMPAT.checkpoint(Net()(x()), use_reentrant=False), TypeError, "first, not <Tensor float32[8, 4]>"),
        (
            lambda: COMPAT.checkpoint(Net(), x(), use_reentrant=False, context_fn=policies.save_matmuls),
            TypeError,
            "write recollect.checkpoint(fn, policy=save_matmuls)",
        ),
        (lambda: COMPAT.checkpoint(Net(), x(), use_reentrant=False, context_fn=3), TypeError, "context_fn=3: expected"),
        (lambda: COMPAT.composable.checkpoint(Net(), context_fn=3), TypeError, "context_fn=3: expected a function"),
        (
            lambda: COMPAT.checkpoint_sequential(nn.Linear(2, 2), 1, x(), use_reentrant=False),
            TypeError,
            "first, not <module",
        ),
        (lambda: COMPAT.checkpoint_wrapper(x()), TypeError, "CheckpointWrapper expects a torch.nn.Module, not <Tensor"),
        (lambda: COMPAT.offload_wrapper(3), TypeError, "OffloadWrapper expects a torch.nn.Module, not int 3"),
        (lambda: COMPAT.apply_activation_checkpointing(3), TypeError, "expects a torch.nn.Module first, not int 3"),
        (
            lambda: COMPAT.apply_activation_checkpointing(Net(), check_fn=3),
            TypeError,
            "check_fn=3: expected a function",
        ),
    ]
    try_all(refuse, wrong)


def test_what_was_removed_knows_it_whoever_removed_it() -> None:
    pytest.importorskip("scipy")
    model = Net()
    handle = recollect.apply(model)
    handle.pause()
    assert not handle.is_removed
    handle.resume()
    recollect.remove(model)
    assert handle.is_removed
    fitted = recollect.fit(model, x(), budget="min")
    assert not fitted.is_removed
    recollect.remove(model)
    assert fitted.is_removed
    with pytest.raises(ValueError, match="this fit was removed"):
        fitted.forward_backward(x())


def test_data_parallel_over_several_devices_is_refused() -> None:
    wrapper = nn.DataParallel(Net())
    with recollect.apply(wrapper):
        wrapper(x()).sum().backward()
    wrapper.device_ids = [0, 1]  # as on a machine with two
    with pytest.raises(ValueError, match=r"^DataParallel over 2 devices cannot have regions: its replicas"):
        recollect.apply(wrapper)


@pytest.mark.parametrize("kind", ["script", "trace"])
def test_what_torchscript_compiled_is_refused(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and models use it
        block = Net().layers[0]
        compiled: Any = torch.jit.script(block) if kind == "script" else torch.jit.trace(block, x())
    name = type(compiled).__name__
    holder = nn.Sequential(nn.Sequential(nn.Linear(16, 16), compiled), nn.Sequential(nn.Linear(16, 16), compiled))
    wrong: list[Wrong] = [
        (
            lambda: API.checkpoint(compiled),
            ValueError,
            f"{name} cannot be made a region: it is compiled by TorchScript",
        ),
        (lambda: API.apply(nn.Sequential(compiled), {"0": "full"}), ValueError, "it is compiled by TorchScript"),
        (
            lambda: API.apply(holder, {"*": "full"}),
            ValueError,
            "module '0' (Sequential) cannot be made a region: its part '1' is compiled",
        ),
        (lambda: API.fit(compiled, x(), budget="min"), ValueError, f"{name} is compiled by TorchScript"),
    ]
    try_all(refuse, wrong)
    assert recollect.profile(holder, x(), timed=False, loss=compiled).peak_bytes > 0


def test_compat_and_integrations_are_there_without_another_import() -> None:
    for first in ("", "import torch; "):
        program = f"{first}import recollect; recollect.compat.install; recollect.integrations; print(dir(recollect))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "'compat'" in done.stdout
        assert "'sys'" not in done.stdout


def test_each_integration_is_loaded_when_it_is_named() -> None:
    program = """
import sys, recollect
assert not any(name.startswith("recollect.integrations.") for name in sys.modules)
print(dir(recollect.integrations), recollect.integrations.pipelining.share_recomputation.__name__)
assert "recollect.integrations.export" not in sys.modules
try:
    recollect.integrations.transformer
except AttributeError as error:
    print(error)
sys.modules["transformers"] = None
try:
    recollect.integrations.transformers
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = ["accelerate", "export", "lightning", "pipelining", "transformers"]
    first, wrong, missing = done.stdout.splitlines()
    assert first == f"{names} share_recomputation"
    assert wrong == f"module 'recollect.integrations' has no attribute 'transformer'; it has {', '.join(names)}"
    assert 'Run: pip install "recollect[transformers]"' in missing
