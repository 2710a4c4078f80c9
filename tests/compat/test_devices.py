"""Helpers around device random states: nothing on a CPU, every device once, through its own module."""

import types
from typing import Any

import pytest
import torch

from recollect import compat
from recollect.compat import DefaultDeviceType, get_device_states, set_device_states


@pytest.fixture(autouse=True)
def device_type_unchosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DefaultDeviceType, "_chosen", None)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """A device module whose random states are a dict."""
    held: dict[int, Any] = {0: "zero", 1: "one"}

    def get_rng_state(device: torch.device) -> Any:
        return held[device.index]

    def set_rng_state(state: Any, index: int) -> None:
        held[index] = state

    module = types.SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state)
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: module)
    return held


class Elsewhere(torch.Tensor):
    """Says that it lives on an accelerator."""

    number = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.number)


def on_device(number: int) -> torch.Tensor:
    tensor = torch.ones(1).as_subclass(Elsewhere)
    tensor.number = number
    return tensor


def test_the_default_type_is_the_available_accelerator() -> None:
    found = torch.accelerator.current_accelerator(check_available=True)
    assert DefaultDeviceType.get_device_type() == ("cpu" if found is None else found.type)


def test_the_default_type_can_be_chosen() -> None:
    DefaultDeviceType.set_device_type("xpu")
    assert DefaultDeviceType.get_device_type() == "xpu"
    DefaultDeviceType.set_device_type()
    assert DefaultDeviceType.get_device_type() == "cuda"


@pytest.mark.parametrize("values", [(), (1, "a"), (torch.ones(1), [torch.ones(1, device="meta")])])
def test_tensors_on_the_cpu_have_no_device_states(values: tuple[Any, ...]) -> None:
    assert get_device_states(*values) == ([], [])


def test_each_device_is_read_once_wherever_its_tensors_are(states: dict[int, Any]) -> None:
    values = (on_device(1), {"a": [on_device(0), on_device(1)]})
    devices, found = get_device_states(*values)
    assert devices == [1, 0]
    assert list(map(str, found)) == ["one", "zero"]


def test_states_are_set_on_their_devices(states: dict[int, Any]) -> None:
    set_device_states([1], ["new"], device_type="cuda")  # type: ignore[list-item]
    assert states == {0: "zero", 1: "new"}


@pytest.mark.parametrize(("devices", "kind"), [([], "cuda"), ([0], "meta")])
def test_nothing_is_set_for_meta_and_for_no_device(states: dict[int, Any], devices: list[int], kind: str) -> None:
    set_device_states(devices, ["new"] * len(devices), device_type=kind)  # type: ignore[list-item]
    assert states == {0: "zero", 1: "one"}


def test_helpers_cut_tensors_off_and_warn() -> None:
    x = torch.ones(1, requires_grad=True) * 2
    detached, other = compat.detach_variable((x, "a"))
    assert (detached.is_leaf, detached.requires_grad, other) == (True, True, "a")
    compat.check_backward_validity([x])
    with pytest.warns(UserWarning, match="requires grad"):
        compat.check_backward_validity([x.detach(), 1])
