"""Sizes are those of the allocator around single operators, on an H200 with torch 2.11."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from recollect._core.operators import operator_of
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._profile.dry.roofline import find_device
from recollect._profile.dry.step import DryStep, dry_step
from recollect._profile.dry.translate import workspaces_on
from tests.models import MODELS

H200 = find_device("H200")
MIB = 2**20


class Watch(DispatchMode):
    """Notes the operators, with shapes and dtypes of what they give, and their workspaces."""

    def __init__(self, dry: DryStep) -> None:
        super().__init__()
        self.dry = dry
        self.calls: list[tuple[str, list[tuple[tuple[int, ...], torch.dtype]], int]] = []

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        operator = operator_of(func)
        parts = result if isinstance(result, (tuple, list)) else [result]
        made = [(tuple(part.shape), part.dtype) for part in parts if isinstance(part, Tensor)]
        if not operator.is_ignored:
            self.calls.append((operator.name, made, self.dry.workspace_bytes(operator, args, kwargs, result)))
        return result

    def of(self, name: str) -> tuple[list[tuple[tuple[int, ...], torch.dtype]], int]:
        return next((made, workspace) for op, made, workspace in self.calls if op.startswith(f"aten.{name}."))

    @property
    def names(self) -> list[str]:
        return [op.removeprefix("aten.").removesuffix(".default") for op, *_ in self.calls]


def watch(step: Callable[..., Tensor], *values: Any, device: str = "H200", model: nn.Module | None = None) -> Watch:
    """A dry step on values whose floating-point ones get gradients."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            value.requires_grad_()
    modules = [] if model is None else [model]
    with dry_step(modules, values, device=find_device(device)) as dry, Watch(dry) as seen:
        result = step(*dry.values)
        if result.requires_grad:
            result.backward(torch.empty_like(result))
    return seen


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


# Attention.


def attend(heads: int = 16, head: int = 64, rows: int = 1024, *, keys: int | None = None, **options: Any) -> Watch:
    dtype, device, groups = (
        options.pop("dtype", torch.bfloat16),
        options.pop("device", "H200"),
        options.pop("groups", 0),
    )
    q = meta(2, rows, heads, head, dtype=dtype).transpose(1, 2)
    k, v = (meta(2, keys or rows, groups or heads, head, dtype=dtype).transpose(1, 2) for _ in range(2))
    mask = options.pop("attn_mask", None)
    return watch(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options),
        *(q.detach(), k.detach(), v.detach(), mask),
        device=device,
    )


def kernel_of(seen: Watch) -> str:
    found = [name for name in seen.names if "attention" in name and "backward" not in name]
    if not found:
        assert "_safe_softmax" in seen.names
        return "math"
    return found[0].removeprefix("_scaled_dot_product_").removesuffix("_attention")


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({"is_causal": True}, "cudnn"),
        ({"dtype": torch.float16, "dropout_p": 0.1}, "cudnn"),
        ({"head": 256}, "cudnn"),
        ({"head": 72, "rows": 197}, "cudnn"),
        ({"head": 128, "groups": 4, "enable_gqa": True}, "cudnn"),
        ({"keys": 77}, "cudnn"),
        ({"keys": 512, "is_causal": True}, "cudnn"),
        ({"head": 36}, "flash"),
        ({"head": 33}, "flash"),
        ({"head": 288}, "efficient"),
        ({"head": 512, "heads": 4}, "efficient"),
        ({"dtype": torch.float32}, "efficient"),
        ({"dtype": torch.float32, "is_causal": True, "dropout_p": 0.1}, "efficient"),
        ({"dtype": torch.float32, "head": 30}, "math"),
        ({"dtype": torch.float32, "groups": 4, "enable_gqa": True}, "math"),
        ({"dtype": torch.float64, "rows": 256}, "math"),
        ({"device": "A100", "is_causal": True}, "flash"),
        ({"device": "A100", "head": 288}, "efficient"),
        ({"device": "T4", "dtype": torch.float16}, "efficient"),
        ({"device": "T4"}, "math"),
        ({"device": "MI300X", "is_causal": True}, "flash"),
    ],
)
def test_attention_runs_by_the_kernel_that_cuda_would_choose(options: dict[str, Any], kernel: str) -> None:
    assert kernel_of(attend(**options)) == kernel


@pytest.mark.parametrize(
    ("mask", "kernel"),
    [
        (torch.empty(1024, 1024, dtype=torch.bool, device="meta"), "cudnn"),
        (torch.empty(2, 1, 1024, 1024, dtype=torch.int8, device="meta").bool(), "cudnn"),
        (meta(1024, 1024), "efficient"),  # `watch` lets it require grad
        (meta(1024, 1024, 16).permute(2, 0, 1)[None], "math"),  # T5's position bias
    ],
)
def test_attention_with_a_mask(mask: Tensor, kernel: str) -> None:
    assert kernel_of(attend(attn_mask=mask)) == kernel


def test_attention_by_a_kernel_that_the_user_chose() -> None:
    for backend, kernel in (
        (SDPBackend.FLASH_ATTENTION, "flash"),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        (SDPBackend.MATH, "math"),
    ):
        with sdpa_kernel(backend):
            assert kernel_of(attend(is_causal=True)) == kernel
    with (
        sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
        pytest.raises(RuntimeError, match=r"^none of the enabled kernels"),
    ):
        attend(head=36)


def test_attention_on_strides_that_kernels_cannot_read_is_composed() -> None:
    q = meta(2, 8, 64, 128).transpose(-1, -2).detach()
    seen = watch(lambda q: F.scaled_dot_product_attention(q, q, q), q)
    assert kernel_of(seen) == "math"
    assert seen.of("_safe_softmax") == ([((2, 8, 128, 128), torch.float32)], 2 * 8 * 128 * 128 + 2 * 8 * 128)


def test_cudnn_attention_keeps_a_number_for_each_row_and_takes_gradients_in_float32() -> None:
    seen = attend(16, 128, 4096, groups=4, is_causal=True, enable_gqa=True)
    made, _ = seen.of("_scaled_dot_product_cudnn_attention")
    assert made[:2] == [((2, 16, 4096, 128), torch.bfloat16), ((2, 16, 4096, 1), torch.float32)]
    made, workspace = seen.of("_scaled_dot_product_cudnn_attention_backward")
    assert [shape[1] for shape, _ in made] == [16, 4, 4]
    assert workspace == 269484544 // 2 + 256  # of a batch of 4


def test_flash_attention_pads_heads_to_steps_of_8() -> None:
    seen = attend(8, 36)
    made, _ = seen.of("_scaled_dot_product_flash_attention")
    assert made[:2] == [((2, 8, 1024, 40), torch.bfloat16), ((2, 8, 1024), torch.float32)]
    assert seen.names.count("constant_pad_nd") == 6


def test_flash_attention_takes_gradients_in_float32() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        seen = attend(16, 128, 2048, is_causal=True)
    assert seen.of("_scaled_dot_product_flash_attention_backward")[1] == 33554432 + 262144


# Other kernels.


def test_dropout_keeps_a_mask_of_bools() -> None:
    seen = watch(lambda x: F.dropout(x, 0.1), meta(64, 64))
    assert seen.of("native_dropout")[0] == [((64, 64), torch.bfloat16), ((64, 64), torch.bool)]
    assert "native_dropout_backward" in seen.names
    for seen in (
        watch(lambda x: F.dropout(x, 0.1, training=False) * 1, meta(4)),
        watch(lambda x: F.dropout(x, 0) * 1, meta(4)),
    ):
        assert not {"native_dropout", "clone"} & set(seen.names)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own, of the composed form
def test_rms_norm_is_one_operator_where_dtypes_agree() -> None:
    seen = watch(lambda x, w: F.rms_norm(x, (64,), w), meta(8, 64), meta(64))
    assert seen.names == ["_fused_rms_norm", "empty_like", "_fused_rms_norm_backward"]  # the second is the gradient
    assert seen.of("_fused_rms_norm")[0] == [((8, 64), torch.bfloat16), ((8, 1), torch.float32)]
    seen = watch(lambda x, w: F.rms_norm(x, (64,), w), meta(8, 64), meta(64, dtype=torch.float32))
    assert "_fused_rms_norm" not in seen.names


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (lambda x: F.layer_norm(x, (8,)), "native_layer_norm"),
        (lambda x: F.batch_norm(x, None, None, training=True), "native_batch_norm"),
    ],
)
def test_statistics_of_norms_are_in_float32(norm: Callable[[Tensor], Tensor], name: str) -> None:
    made, _ = watch(norm, meta(2, 4, 8, 8)).of(name)
    assert [dtype for _, dtype in made] == [torch.bfloat16, torch.float32, torch.float32]


def test_statistics_of_group_norm_are_in_halves() -> None:
    made, _ = watch(lambda x: F.group_norm(x, 2), meta(2, 4, 8, 8)).of("native_group_norm")
    assert [dtype for _, dtype in made] == [torch.bfloat16] * 3


def test_batch_norm_runs_by_cudnn_but_in_bfloat16() -> None:
    assert "cudnn_batch_norm_backward" in watch(nn.BatchNorm2d(4), meta(2, 4, 8, 8, dtype=torch.float32)).names
    assert "native_batch_norm_backward" in watch(nn.BatchNorm2d(4), meta(2, 4, 8, 8)).names


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets_are_one_call_of_cudnn(kind: Any) -> None:
    model = kind(8, 16, 2, bidirectional=True, dropout=0.1)
    seen = watch(lambda x: model(x)[0], torch.empty(5, 3, 8), model=model)
    assert seen.names.count("_cudnn_rnn") == seen.names.count("_cudnn_rnn_backward") == 1
    assert seen.of("_cudnn_rnn")[0][0] == ((5, 3, 32), torch.float32)
    assert any("recurrent nets is a rough guess" in note for note in seen.dry.notes)
    assert seen.of("_cudnn_rnn")[0][3][0][0] >= 5 * 3 * 16 * 2 * 2 * 4


def test_torchs_own_transformer_layers_run_by_these_kernels() -> None:
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dtype=torch.bfloat16, device="meta")
    seen = watch(model, meta(2, 16, 64), model=model)
    assert kernel_of(seen) == "cudnn"
    assert seen.names.count("native_dropout") == 3


def test_inside_of_recomputed_regions_too() -> None:
    import recollect

    layer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1))
    with dry_step([layer], torch.ones(4, 64), device=H200) as dry, Watch(dry) as seen:
        recollect.checkpoint(layer)(dry.values).sum().backward()
    assert seen.names.count("native_dropout") == 2


# Workspaces.


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        ((8192, 1024), [0], 67109376),
        ((8192, 4096), [0], 138412544),
        ((25216, 768), [0], 138412544),
        ((197, 128, 2304), [0, 1], 139198976),
        ((16384, 1024), [0], 134218240),
        ((128, 1000), [0], 0),
        ((8192, 1024), [1], 0),
        ((16384, 2, 1024), [1], 0),
    ],
)
def test_sums_over_rows_take_a_buffer(shape: tuple[int, ...], dims: list[int], expected: int) -> None:
    assert watch(lambda x: x.sum(dims), meta(*shape)).of("sum")[1] == expected


def test_a_sum_of_few_rows_takes_none() -> None:
    assert watch(lambda x: x.sum(0), meta(128, 197, 768, dtype=torch.float32)).of("sum")[1] == 0


@pytest.mark.parametrize(
    ("rows", "width", "count", "expected"),
    [(32000, 2048, 16384, 148436992), (50257, 1024, 8192, 37309952), (1024, 1024, 1024, 0)],
)
def test_the_gradient_of_an_embedding_takes_partial_sums(rows: int, width: int, count: int, expected: int) -> None:
    seen = watch(lambda w, i: F.embedding(i, w), meta(rows, width), meta(count, dtype=torch.int64))
    assert seen.of("embedding_dense_backward")[1] == pytest.approx(expected, rel=1e-4)


CONVOLUTIONS = [  # batch, channels, outputs, side, kernel, stride; forward, backward
    ((16, 128, 128, 128, 3, 1), False, 134513152, 142180864),
    ((16, 256, 256, 64, 3, 1), False, 69206016, 84804096),
    ((128, 64, 64, 56, 3, 1), False, 102834688, 104751616),
    ((128, 64, 256, 56, 1, 1), False, 512, 8388096),
    ((128, 256, 512, 56, 1, 2), False, 308281856, 311951360),
    ((128, 128, 128, 56, 3, 2), False, 128745984, 136413696),
    ((128, 2048, 512, 7, 1, 1), False, 32113152, 32636416),
    ((16, 1024, 512, 32, 3, 1), False, 59769344, 75497472),
    ((16, 128, 3, 128, 3, 1), False, 71322112, 75155968),
    ((16, 128, 128, 128, 3, 1), True, 512, 138412544),
    ((128, 64, 64, 56, 3, 1), True, 512, 34603520),
    ((128, 128, 128, 56, 3, 2), True, 512, 102760960),
    ((128, 3, 64, 224, 7, 2), True, 102811136, 108932096),
]


@pytest.mark.parametrize(("sizes", "is_last", "forward", "backward"), CONVOLUTIONS)
def test_convolutions_take_images_in_cudnns_layout(
    sizes: tuple[int, ...], is_last: bool, forward: int, backward: int
) -> None:
    batch, channels, outputs, side, kernel, stride = sizes
    form = torch.channels_last if is_last else torch.contiguous_format
    x = meta(batch, channels, side, side).to(memory_format=form)
    weight = meta(outputs, channels, kernel, kernel).to(memory_format=form)
    seen = watch(lambda x, w, b: F.conv2d(x, w, b, stride, kernel // 2), x, weight, meta(outputs))
    # Of the larger ones within a tenth; small ones do not decide a peak.
    assert seen.of("convolution")[1] == pytest.approx(forward, rel=0.1, abs=MIB)
    if channels != 3:
        assert seen.of("convolution_backward")[1] == pytest.approx(backward, rel=0.25, abs=9 * MIB)


def test_the_product_that_softmax_takes_in_backward() -> None:
    seen = watch(lambda x: x.softmax(-1), meta(16, 8, 1024, 1024, dtype=torch.float32))
    assert seen.of("_softmax_backward_data")[1] == 536870912


def test_losses_take_their_elements() -> None:
    seen = watch(F.mse_loss, meta(16, 3, 128, 128, dtype=torch.float32), meta(16, 3, 128, 128, dtype=torch.float32))
    assert seen.of("mse_loss")[1] == 3145728


def test_gradients_that_norms_copy() -> None:
    seen = watch(lambda x: F.layer_norm(x, (768,)).transpose(0, 1) * 1, meta(128, 197, 768, dtype=torch.float32))
    assert seen.of("native_layer_norm_backward")[1] in (0, 77463552)


@pytest.mark.parametrize(
    ("device", "expected"), [("H200", 64 * MIB), ("A100", 2 * 8519680), ("H100", 64 * MIB), ("cpu", 0)]
)
def test_cublas_keeps_a_workspace_for_each_thread(device: str, expected: int) -> None:
    with dry_step([], meta(64, 64), device=find_device(device)) as dry, Watch(dry):
        assert dry.fixed_bytes == 0
        (dry.values.requires_grad_() @ dry.values).sum().backward()
    assert dry.fixed_bytes == expected


def test_a_bias_takes_a_workspace_of_cublaslt() -> None:
    model = nn.Linear(64, 64)
    with dry_step([model], torch.ones(2, 64), device=H200) as dry, Watch(dry):
        model(dry.values).sum().backward()
    assert dry.fixed_bytes == 65 * MIB


def test_real_steps_on_the_cpu_have_no_such_model() -> None:
    assert workspaces_on(torch.device("cpu")) is None


# Devices and autocast in the user's code.


def test_cuda_in_the_users_code_means_the_fake_tensors() -> None:
    def step(x: Tensor) -> Tensor:
        made = torch.zeros(4, device="cuda") + torch.arange(4, device=torch.device("cuda", 0)) + torch.ones(4, device=0)
        assert x.cuda() is x
        assert x.to("cuda") is x
        assert x.to(device="cuda:0", dtype=torch.float32) is x
        with torch.device("cuda"):
            made = made + torch.empty(4)
        return x.to("cuda", torch.bfloat16).float() + made.pin_memory()

    seen = watch(step, torch.ones(4))
    assert seen.names.count("_to_copy") == 4


def test_what_is_copied_to_the_host_is_noted() -> None:
    with dry_step([], torch.ones(4), device=H200) as dry:
        assert dry.values.cpu().shape == dry.values.to("cpu").shape == (4,)
    assert "what the step copies to the host is counted on the device for as long as it is alive" in dry.notes


def test_a_device_context_around_changes_nothing() -> None:
    with torch.device("meta"), dry_step([], torch.ones(4), device=H200) as dry:
        assert (dry.values + torch.zeros(4)).device.type == "cpu"


def test_autocast_for_cuda_casts_what_cuda_casts() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            product = x @ w
            assert product.dtype is torch.bfloat16
            assert F.layer_norm(product, (4,)).dtype is torch.float32
            assert F.rms_norm(product, (4,)).dtype is torch.float32
            assert F.softmax(product, -1).dtype is torch.float32
            assert F.gelu(product).dtype is torch.bfloat16
            assert product.sum().dtype is torch.float32
            assert product.sum(0).dtype is torch.float32
            assert product.pow(2).dtype is torch.float32
            assert product.exp().dtype is torch.float32
            assert F.mse_loss(product, x).dtype is torch.float32
            assert torch.cat([product, product]).dtype is torch.bfloat16
            assert F.cross_entropy(product, torch.zeros(4, dtype=torch.int64)).dtype is torch.float32
            assert torch.addcmul(x, product, product).dtype is torch.float32
            with torch.autocast("cuda", enabled=False):
                assert (x @ w).dtype is torch.float32
        assert (x @ w).dtype is torch.float32
        return product

    before = F.layer_norm
    watch(step, torch.ones(4, 4), torch.ones(4, 4))
    assert F.layer_norm is before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.layer_norm(torch.ones(4, dtype=torch.bfloat16), (4,)).dtype is torch.bfloat16


def test_autocast_without_a_dtype_is_cudas() -> None:
    def step(x: Tensor) -> Tensor:
        with torch.autocast("cuda"):
            return x @ x

    assert watch(step, torch.ones(4, 4)).of("mm")[0] == [((4, 4), torch.float16)]


def test_autocast_that_is_on_around_the_step_holds_in_it() -> None:
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert watch(lambda x: x @ x, torch.ones(4, 4)).of("mm")[0] == [((4, 4), torch.bfloat16)]
        assert torch.is_autocast_enabled("cuda")
        assert not torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


@pytest.mark.filterwarnings("ignore:CUDA is not available", "ignore:User provided device_type")
def test_autocast_that_was_made_before_the_step_is_the_same() -> None:
    context = torch.autocast("cuda", dtype=torch.bfloat16)
    context._enabled = True  # torch turns it off where there is no CUDA

    def step(x: Tensor) -> Tensor:
        with context, context:
            return x @ x

    assert watch(step, torch.ones(4, 4)).of("mm")[0] == [((4, 4), torch.bfloat16)]
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")


def test_the_cross_entropy_of_autocast_keeps_halves() -> None:
    def step(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.cross_entropy(x, torch.zeros(8, dtype=torch.int64))

    seen = watch(step, meta(8, 32))
    assert seen.of("_log_softmax")[0] == [((8, 32), torch.bfloat16)]
    assert seen.of("nll_loss_forward")[0][0] == ((), torch.float32)


def test_other_threads_and_real_tensors_are_left_alone() -> None:
    found: list[Any] = []

    def other() -> None:
        x = torch.ones(1, 1, 2, 4)
        with torch.random.fork_rng():
            dropped = F.dropout(x, 0.5)
        found.extend([F.scaled_dot_product_attention(x, x, x), dropped, F.rms_norm(x, (4,))])

    with dry_step([], (), device=H200):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [type(value) for value in found] == [Tensor] * 3
    assert torch.equal(found[0], torch.ones(1, 1, 2, 4))


def test_the_kernels_are_gone_afterwards() -> None:
    with dry_step([], (), device=H200):
        pass
    x = torch.ones(2, 4, 3, 8, requires_grad=True)
    assert "FlashAttention" in type(F.scaled_dot_product_attention(x, x, x).grad_fn).__name__
    assert type(F.dropout(x, 0.5).grad_fn).__name__ == "MulBackward0"


@pytest.mark.parametrize("name", [name for name in MODELS if name != "moe"])
def test_models_run_a_step_in_halves_under_translation(name: str) -> None:
    model, inputs = MODELS[name]()
    with dry_step([model], inputs, device=H200, dtype=torch.bfloat16) as dry, Watch(dry) as seen:
        model(*dry.values).sum().backward()
    assert seen.calls
    assert all(parameter.grad is None for parameter in model.parameters())


def test_notes_say_what_was_assumed() -> None:
    with dry_step([], meta(2, 8, 64, 64), device=H200) as dry:
        F.scaled_dot_product_attention(*[dry.values] * 3)
    source = "by rules that were measured on an H200 with torch 2.11"
    assert dry.notes == [
        "estimated for NVIDIA H200 on fake tensors: nothing was run",
        f"kernels, workspaces and rounding are those of NVIDIA H200, {source}",
        "scaled_dot_product_attention runs as cudnn",
    ]
    with dry_step([], (), device=find_device("cpu")) as dry:
        pass
    assert dry.notes == ["estimated for CPU on fake tensors: nothing was run"]
