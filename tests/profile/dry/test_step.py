import copy
import functools
import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._core.torch_private.fake import is_fake
from recollect._profile.dry.roofline import find_device
from recollect._profile.dry.step import dry_step
from recollect._profile.memory import LiveBytes
from tests.models import GPT, MODELS

CPU, H200 = find_device("cpu"), find_device("H200")
DEVICES = pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "cuda"])


def bytes_of(module: nn.Module) -> list[tuple[str, int, int, bytes]]:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [(name, id(t), t._version, t.detach().numpy().tobytes()) for name, t in tensors]


@DEVICES
@pytest.mark.parametrize("name", [name for name in MODELS if name != "moe"])
def test_a_dry_step_leaves_a_model_bitwise_as_it_was(name: str, device: Any) -> None:
    model, inputs = MODELS[name]()
    next(model.parameters()).grad = gradient = torch.ones_like(next(model.parameters()))
    before, state = bytes_of(model), torch.get_rng_state()
    attributes = {name: dict(vars(part)) for name, part in model.named_modules()}
    with dry_step([model], inputs, device=device) as dry:
        assert all(is_fake(p) for p in model.parameters())
        assert all(is_fake(b) for b in model.buffers())
        assert all(p.grad is None for p in model.parameters())
        model(*dry.values).float().sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    assert bytes_of(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert next(model.parameters()).grad is gradient
    for path, part in model.named_modules():
        assert list(vars(part)) == list(attributes[path])
        assert all(vars(part)[key] is value for key, value in attributes[path].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("moe", "tagger")])  # oneDNN runs the latter's
def test_a_dry_step_for_the_cpu_has_the_bytes_of_a_real_one(name: str, dtype: torch.dtype) -> None:
    model, inputs = MODELS[name]()
    model.to(dtype)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    with dry_step([model], inputs, device=CPU) as dry, LiveBytes(include=model) as estimated:
        model(*dry.values).sum().backward()
    with LiveBytes(include=model) as measured:
        model(*inputs).sum().backward()
    assert estimated.peak_bytes == measured.peak_bytes


def test_a_model_is_as_it_was_after_an_error_too() -> None:
    model = GPT()
    before = bytes_of(model)
    with pytest.raises(KeyError, match="mine"), dry_step([model], (), device=H200):
        raise KeyError("mine")
    assert bytes_of(model) == before
    x = torch.ones(1, 2, 3, 4)
    assert torch.nn.functional.scaled_dot_product_attention(x, x, x).sum() == 24


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = torch.ones(4)
        self.register_buffer("shift", torch.zeros(4), persistent=False)
        self.past: list[Tensor] = []
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.layer(x) * self.scale + self.shift
        self.past.append(x)
        self.last = x
        return x


def test_what_the_step_does_to_attributes_is_undone() -> None:
    model = Remembering()
    past = model.past
    with dry_step([model], torch.ones(2, 4), device=CPU) as dry:
        assert is_fake(model.scale)
        assert is_fake(model.get_buffer("shift"))
        model(dry.values)
        assert model.count == 1
    assert (model.count, model.past, hasattr(model, "last")) == (0, [], False)
    assert model.past is past
    assert not is_fake(model.scale)


def test_tied_and_shared_memory_stays_so() -> None:
    model = GPT()
    flat = torch.zeros(12)
    first, second = flat[:4], flat[2:8].view(2, 3)
    with dry_step([model], [first, {"second": second}, first], device=CPU) as dry:
        assert model.head.weight is model.embed.weight
        one, parts, other = dry.values
        assert one is other
        assert one.untyped_storage()._cdata == parts["second"].untyped_storage()._cdata
        assert (one.storage_offset(), parts["second"].storage_offset()) == (0, 2)
        assert one.untyped_storage().nbytes() == 48


def test_parameters_keep_their_class_dtype_layout_and_marks() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.weight.mark = "mine"
    model.weight.requires_grad_(False)
    with dry_step([model], (), device=CPU):
        weight = model.weight
        assert isinstance(weight, nn.Parameter)
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert getattr(weight, "mark") == "mine"  # noqa: B009
        assert [parameter.requires_grad for parameter in model.parameters()] == [False, True]


def test_another_dtype_is_of_all_that_is_floating_point() -> None:
    model = nn.BatchNorm1d(4)
    with dry_step([model], (torch.ones(2, 4), torch.ones(2, dtype=torch.int64)), device=CPU, dtype=torch.bfloat16) as d:
        assert model.weight.dtype is model.running_mean.dtype is d.values[0].dtype is torch.bfloat16  # type: ignore[union-attr]
        assert model.num_batches_tracked.dtype is d.values[1].dtype is torch.int64  # type: ignore[union-attr]
    assert model.weight.dtype is torch.float32


def test_a_model_on_meta_runs_a_step_without_its_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**14, 2**16), nn.GELU(), nn.Linear(2**16, 2**14))
        x = torch.ones(8, 2**14)
    with dry_step([model], x, device=H200) as dry, LiveBytes(include=model) as meter:
        model(dry.values).sum().backward()
    assert meter.peak_bytes > 2 * 2 * 2**30 * 4
    assert model[0].weight.device.type == "meta"
    assert model[0].weight.grad is None


def test_lazy_parameters_are_named_as_the_reason() -> None:
    expected = r"^a lazy module has parameters whose shapes are not known yet: before a dry"
    with pytest.raises(ValueError, match=expected), dry_step([nn.LazyLinear(4)], (), device=CPU):
        pass


def test_sparse_tensors_are_named_as_the_reason() -> None:
    expected = (
        r"^a dry profile supports plain tensors only, but the model or its inputs hold a Tensor with layout "
        r"torch\.sparse_coo\. Profile a real step: dry=False$"
    )
    with pytest.raises(ValueError, match=expected), dry_step([], torch.eye(3).to_sparse(), device=CPU):
        pass


class Deciding(nn.Module):
    def __init__(self, decide: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.decide = nn.Linear(4, 4), decide

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x if self.decide(x) else -x


@DEVICES
@pytest.mark.parametrize(
    ("decide", "op"),
    [
        (lambda x: x.long().sum().item(), "aten._local_scalar_dense.default"),
        (lambda x: x.long().tolist(), "aten._local_scalar_dense.default"),
        (lambda x: x.flatten().long().bincount(), "aten.bincount.default"),
        (lambda x: x.repeat_interleave(x.long()[0], dim=1), "aten.repeat_interleave.Tensor"),
    ],
)
def test_a_step_whose_memory_depends_on_its_data_is_told_so(
    decide: Callable[[Tensor], Any], op: str, device: Any
) -> None:
    model = nn.Sequential(nn.Identity(), Deciding(decide))
    with pytest.raises(ValueError) as caught, dry_step([model], torch.ones(2, 4), device=device) as dry:  # noqa: PT011
        model(dry.values)
    said = str(caught.value)
    assert said.startswith(f"{op} in 1 (test_step.py:")
    assert said.endswith(
        ") needs the values of a tensor, but in a dry profile tensors have no values. What is read there "
        "(.item(), .tolist(), a size) decides how much memory the step takes. Profile a real step: dry=False"
    )


def test_a_step_that_makes_nested_tensors_is_told_that_their_sizes_are_values() -> None:
    model = nn.Sequential(Deciding(lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)))
    expected = r"^in 0 \(test_step\.py:\d+\) makes a nested tensor, .* Profile a real step: dry=False$"
    with pytest.raises(ValueError, match=expected), dry_step([model], torch.ones(2, 4), device=CPU) as dry:
        model(dry.values)


def test_numpy_and_conversions_are_told_what_they_are() -> None:
    layer = nn.Linear(2, 2)
    expected = r"^\(test_step\.py:\d+\) said '\.numpy\(\) is not supported.*dry=False$"
    with pytest.raises(ValueError, match=expected), dry_step([layer], torch.ones(2), device=CPU) as dry:
        dry.values.numpy()
    expected = r"said '.*Couldn't swap Linear\.(weight|bias)': .*modules cannot be converted\. Convert"
    with pytest.raises(ValueError, match=expected), dry_step([layer], (), device=CPU):
        layer.to(torch.bfloat16)
    assert layer.weight.dtype is torch.float32


def test_a_module_that_is_converted_to_what_it_is_stays_as_it_is() -> None:
    layer, convert = nn.Linear(2, 2), nn.Module._apply
    with dry_step([layer], torch.ones(1, 2), device=CPU) as dry:
        assert layer.to(torch.float32)(dry.values).shape == (1, 2)
    assert nn.Module._apply is convert


def test_a_tensor_that_the_step_brings_along_may_be_on_any_device() -> None:
    """As the batch of a closure is on a real device, where fakes are on none."""
    layer, tokens = nn.Embedding(8, 2), torch.zeros(3, dtype=torch.long, device="meta")
    with dry_step([layer], (), device=CPU):
        assert layer(tokens).shape == (3, 2)
        assert torch.stack([tokens, tokens]).shape == (2, 3)


def test_a_tensor_on_another_device_is_told_to_be_given() -> None:
    expected = r"said '.*two.* devices.*': the step uses a tensor that is neither an input nor in a module"
    with pytest.raises(ValueError, match=expected), dry_step([], torch.ones(2), device=CPU) as dry:
        dry.values + torch.ones(2, device="cuda")


def test_operators_without_a_fake_form_are_named() -> None:
    library = torch.library.Library("recollect_dry", "FRAGMENT")
    library.define("unknown(Tensor x) -> Tensor")
    library.impl("unknown", lambda x: x.clone(), "CPU")
    expected = r"^recollect_dry\.unknown\.default .*does not support fake tensors, .*dry=False$"
    with pytest.raises(ValueError, match=expected), dry_step([], torch.ones(2), device=CPU) as dry:
        torch.ops.recollect_dry.unknown(dry.values)
    library._destroy()


def test_errors_of_the_user_pass_as_they_are() -> None:
    layer = nn.Linear(4, 4)
    wrong = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"shapes|reduction dim|size"), dry_step([layer], wrong, device=CPU) as dry:
        layer(dry.values)


def test_an_optimizer_that_the_step_calls_is_put_back() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    attributes = dict(vars(optimizer))
    with dry_step([model], torch.ones(2, 4), device=H200, optimizers=[optimizer]) as dry:
        assert len(optimizer.state) == 2
        assert all(map(is_fake, optimizer.param_groups[0]["params"]))
        model(dry.values).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.grad is None
    assert vars(optimizer) == attributes
    assert optimizer.state_dict() == before
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert schedule.last_epoch == 0


def test_an_optimizer_with_state_keeps_it() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    moment = optimizer.state[model.weight]["exp_avg"]
    kept = moment.clone()
    with dry_step([model], (), device=CPU, optimizers=[optimizer]):
        assert is_fake(optimizer.state[model.weight]["exp_avg"])
        assert not model.weight.grad
    assert optimizer.state[model.weight]["exp_avg"] is moment
    assert torch.equal(moment, kept)


def test_compiled_modules_run_as_they_are_written() -> None:
    model = nn.Linear(4, 4)
    model.compile(backend="eager")
    with dry_step([model], torch.ones(2, 4), device=H200) as dry:
        assert model(dry.values).shape == (2, 4)


@functools.lru_cache
def table_of(width: int) -> dict[str, Tensor]:
    return {"table": torch.ones(width)}


@functools.cache
def number_of(width: int) -> tuple[Tensor, int]:
    return torch.full((), 2.0), width


@functools.cache
def halve(width: int) -> int:
    return width // 2


class Tabling(nn.Module):
    """Computes tables once, for all of its kind, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        width = 2 * halve(x.shape[-1])
        table = TABLES.setdefault(width, torch.ones(width))
        found: Tensor = self.layer(x) * table_of(width)["table"] * number_of(width)[0] * table
        return found


TABLES: dict[int, Tensor] = {}


def test_what_functions_cache_in_a_dry_step_is_computed_again() -> None:
    model, x = Tabling(), torch.ones(2, 4)
    recollect.profile(model, x, dry=True)
    found = model(x)
    assert not is_fake(found)
    assert torch.equal(found, 2 * model.layer(x))
    assert halve.cache_info().currsize == 1  # holds no tensor


def test_what_was_cached_before_a_dry_step_stays() -> None:
    model, x = Tabling(), torch.ones(2, 4)
    model(x)
    before = table_of(4), number_of(4)
    recollect.profile(model, x, dry=True)
    assert (table_of(4), number_of(4)) == before


def test_nothing_of_a_dry_step_stays_alive() -> None:
    gc.collect()
    model = GPT()
    with dry_step([model], torch.zeros(2, 4, dtype=torch.int64), device=H200) as dry, LiveBytes() as meter:
        model(dry.values).sum().backward()
    del dry
    gc.collect()
    assert meter.live_bytes == 0


LLAMA = """
import sys, resource
import torch
from torch import nn
from recollect._bench.cases import llama_8b
from recollect._profile.dry.step import dry_step
from recollect._profile.memory import LiveBytes
from recollect._profile.dry.roofline import find_device
with torch.device("meta"):
    model, ids = llama_8b(layers=4), torch.zeros(1, 8192, dtype=torch.int64)
with dry_step([model], ids, device=find_device("H200"), dtype=torch.bfloat16) as dry, LiveBytes(include=model) as meter:
    model(dry.values, dry.values).backward()
print(meter.peak_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_llama_8b_takes_little_memory_of_the_host() -> None:
    done = subprocess.run([sys.executable, "-c", LLAMA], capture_output=True, text=True, check=True)
    peak_bytes, host_bytes = map(int, done.stdout.split())
    assert peak_bytes > 12e9
    assert host_bytes < 2e9


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="LSTMs are composed of other operators here")
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}], ids=str)
@pytest.mark.parametrize(("inputs", "hidden"), [(8, 16), (64, 20), (32, 256)])
def test_an_lstm_on_the_cpu_reserves_what_a_real_one_does(inputs: int, hidden: int, options: dict[str, Any]) -> None:
    model, x = nn.LSTM(inputs, hidden, **options), torch.randn(12, 3, inputs)
    with LiveBytes() as real:
        result = model(x)[0]
    real_bytes = real.live_bytes
    result.sum().backward()
    with dry_step([model], [x], device=CPU) as step, LiveBytes() as dry:
        result = model(*step.values)[0]
        assert dry.live_bytes == pytest.approx(real_bytes, rel=0.05)  # to the byte where it was measured
        result.sum().backward()
