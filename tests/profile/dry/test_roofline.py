import pytest
import torch

from recollect._core.calls import OpCall, Storage, Value
from recollect._profile.dry.roofline import DEVICES, estimate_s, find_device

H200 = find_device("H200")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("H200", "NVIDIA H200"),
        ("nvidia h200", "NVIDIA H200"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-80GB"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("H-100", "NVIDIA H100 80GB HBM3"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("H100 PCIe", "NVIDIA H100 PCIe"),
        ("Tesla T4", "Tesla T4"),
        ("mi300x", "AMD Instinct MI300X"),
        ("cpu", "CPU"),
    ],
)
def test_devices_are_found_by_all_their_names(said: str, name: str) -> None:
    assert find_device(said).name == name


def test_an_unknown_name_is_answered_with_the_known() -> None:
    with pytest.raises(ValueError, match=r"^unknown device 'abacus'; expected one of B200, H200, H100, .*, cpu, or"):
        find_device("abacus")


def test_meta_is_no_device_to_estimate_for() -> None:
    with pytest.raises(
        ValueError, match=r"^the model is on the meta device: pass the device to estimate for, as in dev"
    ):
        find_device(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_where_there_is_none_is_an_h100() -> None:
    assert find_device("cuda").short == find_device("cuda:0").short == "H100"


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.short)
def test_every_device_is_whole(device: object) -> None:
    assert isinstance(device, type(H200))
    assert device.bandwidth > 1e9
    assert {"float32", "float64", "float16", "bfloat16"} <= set(device.flops)
    assert device.flops["float16"] >= device.flops["float32"] >= device.flops["float64"]
    assert device.memory_bytes > 10 * 2**30 or not device.is_cuda
    assert find_device(device.name) == find_device(device.short) == device


def value(storage: int, count: int, dtype: str = "bfloat16") -> Value:
    size = {"bfloat16": 2, "float32": 4}[dtype]
    return Value(storage=storage, shape=(count,), dtype=dtype, bytes=count * size)


def test_pointwise_operators_take_the_bytes_they_move() -> None:
    add = OpCall(op="aten.add.Tensor", inputs=(value(0, 2**28), value(1, 2**28)), outputs=(value(2, 2**28),))
    assert estimate_s(add, H200) == pytest.approx(3 * 2**29 / (4.8e12 * 0.55) + H200.launch_s)


def test_products_take_their_operations_by_dtype() -> None:
    def product(dtype: str) -> OpCall:
        inputs = (value(0, 2**20, dtype), value(1, 2**20, dtype))
        return OpCall(op="aten.mm.default", inputs=inputs, outputs=(value(2, 2**20, dtype),), flops=10**13)

    assert estimate_s(product("bfloat16"), H200) == pytest.approx(1e13 / (989e12 * 0.65) + H200.launch_s)
    assert estimate_s(product("float32"), H200) == pytest.approx(1e13 / (67e12 * 0.65) + H200.launch_s)
    assert estimate_s(product("float32"), H200, float32_matmul="tf32") == pytest.approx(
        1e13 / (494e12 * 0.65) + H200.launch_s
    )


def test_small_operators_take_a_launch_and_views_nothing() -> None:
    small = OpCall(op="aten.add.Tensor", inputs=(value(0, 8),), outputs=(value(1, 8),))
    view = OpCall(op="aten.view.default", inputs=(value(0, 2**28),), outputs=(value(0, 2**28),))
    empty = OpCall(op="aten.empty.memory_format", outputs=(value(0, 2**28),))
    assert estimate_s(small, H200) == pytest.approx(H200.launch_s, rel=1e-3)
    assert (estimate_s(view, H200), estimate_s(empty, H200)) == (0.0, 0.0)


def test_what_is_written_in_place_is_moved_too() -> None:
    fill = OpCall(op="aten.mul_.Tensor", inputs=(value(0, 2**28),), outputs=(value(0, 2**28),), writes=(0,))
    assert estimate_s(fill, H200) == pytest.approx(2 * 2**29 / (4.8e12 * 0.55) + H200.launch_s)


def test_an_expanded_tensor_moves_no_more_than_there_is() -> None:
    call = OpCall(op="aten.add.Tensor", inputs=(value(0, 2**28),), outputs=(value(1, 2**28),))
    storages = (Storage(bytes=2), Storage(bytes=2**29))
    assert estimate_s(call, H200, storages) == pytest.approx((2 + 2**29) / (4.8e12 * 0.55) + H200.launch_s)


def test_an_embedding_reads_no_more_rows_than_it_gives() -> None:
    call = OpCall(op="aten.embedding.default", inputs=(value(0, 2**30),), outputs=(value(1, 2**26),))
    assert estimate_s(call, H200) == pytest.approx(2 * 2**27 / (4.8e12 * 0.55) + H200.launch_s)


def test_a_few_numbers_scattered_into_a_large_tensor_do_not_move_all_of_it() -> None:
    large, index = Value(storage=0, shape=(2**13, 2**14), bytes=2**29), Value(storage=1, shape=(2**13, 1), bytes=2**16)
    call = OpCall(op="aten.scatter_add_.default", inputs=(large, index), outputs=(large,), writes=(0,))
    assert estimate_s(call, H200) == pytest.approx(3 * 2**16 / (4.8e12 * 0.05) + H200.launch_s)
