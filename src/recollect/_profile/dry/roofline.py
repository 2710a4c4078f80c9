"""How long an operator would take on a device that is not here, by the roofline of that device.

An operator takes its launch and the longer of two times::

    launch_s + max(flops / (peak of its dtype * reached), bytes moved / (bandwidth * reached))

Reached of the peak are 0.65 in matrix products, 0.4 in convolutions, and 0.9 in attention, whose operations are counted
as if nothing were masked; of the bandwidth 0.55, and 0.05 where indices say where to write. Bytes moved are what is
read and written, each tensor once. Views take no time. With these fractions the steps of the six models of
`recollect bench` take 0.72 to 1.13 of what they took on an H200 with torch 2.11. Peaks are the makers', of dense
tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from recollect._core.calls import OpCall, Storage
from recollect._core.patterns import hint_nearest
from recollect._profile.dry.host import TYPICAL, HostCosts, measure_host

_TERA, _GIGA, _GIB = 1e12, 1e9, 2**30
_PRODUCTS_REACH = 0.65
_REACH = (("attention", 0.9), ("convolution", 0.4))
_BANDWIDTH_REACHES, _SCATTERED_REACHES = 0.55, 0.05
_SCATTERING = ("index_add", "index_copy", "index_put", "scatter", "embedding_dense_backward", "sort", "topk", "cumsum")
_PICKING = ("aten.embedding.", "aten.index_select.", "aten.index.", "aten.gather.", "aten.slice_scatter.")
"""Operators that read of their first argument as much as they give."""
_FEW_OF = 8
"""What is written into in so few places is not gone through."""
_RECURRENT_REACH = 0.3
_STEP_S, _STEP_BACK_S = 8e-6, 12e-6
"""What one step of one layer of a recurrent net takes at least, forward and back."""
_MATRIX, _SEQUENCE = 2, 3
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What is known of a kind of device.

    Attributes:
        name: as torch writes it.
        short: as people write it.
        memory_bytes: what torch can have of it; 0 if nobody knows.
        flops: operations a second by dtype, ``"tf32"`` among them; others are as slow as float32.
        bandwidth: bytes a second between memory and the chip.
        launch_s: what an operator takes in addition to its work.
        capability: of CUDA; (0, 0) for others.
        processors: how many it has that run blocks of threads.
        is_cuda: whether torch calls it ``cuda``.
    """

    name: str
    short: str
    memory_bytes: int
    flops: dict[str, float]
    bandwidth: float
    launch_s: float = 5e-6
    capability: tuple[int, int] = (0, 0)
    processors: int = 1
    is_cuda: bool = True

    @property
    def threads_per_processor(self) -> int:
        """How many threads one of them runs at a time."""
        return _THREADS.get(self.capability, 2048)


def _gpu(  # noqa: PLR0917 - the columns of a table
    name: str,
    short: str,
    gib: float,
    bandwidth: float,
    peaks: tuple[float, float, float, float],
    capability: tuple[int, int],
    processors: int,
) -> Device:
    """Peaks are TFLOP/s of halves, tf32, float32, float64; bandwidth in GB/s."""
    half, tf32, single, double = (peak * _TERA for peak in peaks)
    has_bfloat16 = capability >= (8, 0) or capability == (0, 0)
    flops = {
        "float16": half,
        "bfloat16": half if has_bfloat16 else single,
        "tf32": tf32,
        "float32": single,
        "float64": double,
        "complex64": single,
        "complex128": double,
    }
    if capability >= (8, 9):
        flops |= {"float8_e4m3fn": 2 * half, "float8_e5m2": 2 * half}
    return Device(
        name=name,
        short=short,
        memory_bytes=int(gib * _GIB),
        flops=flops,
        bandwidth=bandwidth * _GIGA,
        capability=capability,
        processors=processors,
    )


DEVICES: tuple[Device, ...] = (
    _gpu("NVIDIA B200", "B200", 178.3, 8000, (2250, 1100, 75, 37), (10, 0), 148),
    _gpu("NVIDIA H200", "H200", 139.8, 4800, (989, 494, 67, 34), (9, 0), 132),
    _gpu("NVIDIA H100 80GB HBM3", "H100", 79.1, 3350, (989, 494, 67, 34), (9, 0), 132),
    _gpu("NVIDIA H100 PCIe", "H100 PCIe", 79.1, 2000, (756, 378, 51, 26), (9, 0), 114),
    _gpu("NVIDIA A100-SXM4-80GB", "A100", 79.2, 2039, (312, 156, 19.5, 9.7), (8, 0), 108),
    _gpu("NVIDIA A100-SXM4-40GB", "A100 40GB", 39.4, 1555, (312, 156, 19.5, 9.7), (8, 0), 108),
    _gpu("NVIDIA L40S", "L40S", 44.4, 864, (362, 183, 91.6, 1.4), (8, 9), 142),
    _gpu("NVIDIA L4", "L4", 22.0, 300, (121, 60, 30.3, 0.5), (8, 9), 58),
    _gpu("NVIDIA A10G", "A10G", 22.0, 600, (70, 35, 31.5, 0.5), (8, 6), 80),
    _gpu("NVIDIA GeForce RTX 5090", "RTX 5090", 31.4, 1792, (209.5, 104.8, 104.8, 1.6), (12, 0), 170),
    _gpu("NVIDIA GeForce RTX 4090", "RTX 4090", 23.5, 1008, (165, 82.6, 82.6, 1.3), (8, 9), 128),
    _gpu("NVIDIA GeForce RTX 3090", "RTX 3090", 23.7, 936, (71, 35.6, 35.6, 0.6), (8, 6), 82),
    _gpu("Tesla T4", "T4", 14.6, 320, (65, 8.1, 8.1, 0.25), (7, 5), 40),
    _gpu("Tesla V100-SXM2-32GB", "V100", 31.7, 900, (125, 15.7, 15.7, 7.8), (7, 0), 80),
    _gpu("Tesla V100-SXM2-16GB", "V100 16GB", 15.8, 900, (125, 15.7, 15.7, 7.8), (7, 0), 80),
    _gpu("AMD Instinct MI300X", "MI300X", 192.0, 5300, (1307, 653, 163, 82), (0, 0), 304),
    Device(
        name="CPU",
        short="cpu",
        memory_bytes=0,
        flops={"float32": 1 * _TERA, "float64": 0.5 * _TERA, "bfloat16": 2 * _TERA, "float16": 1 * _TERA},
        bandwidth=50 * _GIGA,
        launch_s=6e-6,  # Python and autograd included: 6.4 to 7.1 µs on one core of 2024 (torch 2.13)
        is_cuda=False,
    ),
)
_TYPICAL = "NVIDIA H100 80GB HBM3"


def find_device(name: str | torch.device) -> Device:
    """What is known of a device, by its name, what people call it, or torch's string for it.

    ``"cuda"`` is the device that is there; where none is, an H100 with 80 GB.

    Raises:
        ValueError: nobody knows it.

    >>> find_device("h200").name, find_device("NVIDIA H200").short, find_device("cpu").is_cuda
    ('NVIDIA H200', 'H200', False)
    >>> find_device("abacus")
    Traceback (most recent call last):
    ValueError: unknown device 'abacus'; expected one of B200, H200, H100, H100 PCIe, A100, A100 40GB, ...
    """
    wanted = str(name)
    if wanted == "meta":
        message = "the model is on the meta device: pass the device to estimate for, as in device='H200'"
        raise ValueError(message)
    if re.fullmatch(r"cuda(:\d+)?", wanted):
        if not torch.cuda.is_available():
            return find_device(_TYPICAL)
        properties = torch.cuda.get_device_properties(wanted)
        return replace(find_device(properties.name), name=properties.name, memory_bytes=properties.total_memory)
    key = _plain(wanted)
    for device in DEVICES:
        if key.replace(" ", "") in (_plain(name).replace(" ", "") for name in (device.name, device.short)):
            return device
    inside = [device for device in DEVICES if _plain(device.short) in key.split()]
    if inside:
        return inside[0]
    known = [device.short for device in DEVICES]
    message = f"unknown device {wanted!r}; expected one of {', '.join(known)}, or torch's own 'cuda'"
    message += hint_nearest(wanted, [*known, "cuda"])
    raise ValueError(message)


def _plain(name: str) -> str:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return " ".join(word for word in words if word and word not in ("nvidia", "geforce", "tesla", "amd", "instinct"))


def estimate_s(
    call: OpCall, device: Device, storages: Sequence[Storage] = (), *, float32_matmul: str = "float32"
) -> float:
    """How long a call takes on a device, by the roofline.

    Args:
        call: with its operations, inputs and outputs.
        device: where it would run.
        storages: of the profile; a tensor that is expanded moves no more than its storage has.
        float32_matmul: ``"tf32"`` where products of float32 may be of lower precision.

    >>> from recollect._core.calls import Value
    >>> square = Value(storage=0, shape=(8192, 8192), dtype="bfloat16", bytes=2**27)
    >>> product = OpCall(op="aten.mm.default", inputs=(square, square), outputs=(square,), flops=2 * 8192**3)
    >>> round(estimate_s(product, find_device("H200")) * 1e3, 2)
    1.72
    """
    moved = _bytes_moved(call, storages)
    if not moved and not call.flops:
        return 0.0
    if call.op.startswith("aten._cudnn_rnn"):
        return _estimate_recurrent_s(call, device, moved)
    peak = device.flops.get(_dtype_of(call, float32_matmul), device.flops["float32"])
    reached = next((part for name, part in _REACH if name in call.op), _PRODUCTS_REACH)
    is_scattered = any(name in call.op for name in _SCATTERING)
    bandwidth = device.bandwidth * (_SCATTERED_REACHES if is_scattered else _BANDWIDTH_REACHES)
    return device.launch_s + max(call.flops / (peak * reached), moved / bandwidth)


def _estimate_recurrent_s(call: OpCall, device: Device, moved: int) -> float:
    """A recurrent net by cuDNN: its steps wait for each other, and each is short.

    The gradient runs twice the operations of forward, and longer steps.
    """
    tensors = [value for value in call.inputs if len(value.shape) == _SEQUENCE]
    x, states = tensors[0], tensors[-1]
    layers, batch = states.shape[0], max(states.shape[1], 1)
    tokens = x.shape[0] * x.shape[1]
    weights = sum(math.prod(value.shape) for value in call.inputs if len(value.shape) == _MATRIX)
    is_gradient = "backward" in call.op
    flops = 2 * tokens * weights * (2 if is_gradient else 1)
    peak = device.flops.get(_dtype_of(call, "tf32"), device.flops["float32"])
    waits_s = tokens / batch * layers * (_STEP_BACK_S if is_gradient else _STEP_S)
    return max(waits_s, flops / (peak * _RECURRENT_REACH), moved / (device.bandwidth * _BANDWIDTH_REACHES))


def find_host_costs(device: Device) -> HostCosts | None:
    """What the host takes to launch a device's kernels, measured if the device is here; None where it runs them itself.

    Ask before a dry step begins: while it lasts, CUDA's autocast and some kernels are replaced.
    """
    if not device.is_cuda:
        return None
    if not torch.cuda.is_available() or torch.cuda.get_device_name() != device.name:
        return TYPICAL
    try:
        return measure_host("cuda")
    except torch.OutOfMemoryError:  # dry steps are for models too large for the device, and for steps that failed
        return TYPICAL


def estimate_host_s(call: OpCall, costs: HostCosts | None) -> float | None:
    """How long the host takes to come to a call and to launch it; None where it runs the call itself."""
    return None if costs is None else costs.estimate_s(call, launches=bool(_bytes_moved(call, ()) or call.flops))


def _dtype_of(call: OpCall, float32_matmul: str) -> str:
    found = next(
        (value.dtype for value in call.inputs if "float" in value.dtype or "complex" in value.dtype), "float32"
    )
    if found != "float32":
        return found
    return "tf32" if "convolution" in call.op else float32_matmul


def _bytes_moved(call: OpCall, storages: Sequence[Storage]) -> int:
    sources = {value.storage for value in call.inputs}
    made = [value for value in call.outputs if value.storage not in sources]
    if not call.inputs and ".empty" in call.op:
        return 0
    if not made and not call.writes and not call.flops:
        return 0

    def size(storage: int, nbytes: int) -> int:
        return min(nbytes, storages[storage].bytes) if storages else nbytes

    written = sum(size(value.storage, value.bytes) for value in made)
    if call.op.startswith(_PICKING):
        return 2 * written
    read: dict[int, int] = {}
    for value in call.inputs:
        read[value.storage] = max(read.get(value.storage, 0), size(value.storage, value.bytes))
    changed = sum(read.get(storage, 0) for storage in call.writes)
    others = sum(read.values()) - changed
    if any(name in call.op for name in _SCATTERING) and 0 < _FEW_OF * others < changed:
        return 3 * others  # read where to and what, and written there: the rest stays as it is
    return others + 2 * changed + written
