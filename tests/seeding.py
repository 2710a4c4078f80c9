"""Seeds, which tests set by the ten thousand."""

from typing import Any

import torch


def seed_only_what_is_here() -> None:
    """Where there is no accelerator, let `torch.manual_seed` seed the host alone.

    Torch would keep each seed for the device of every make that may come to life later, each with a formatted stack
    of the caller, in a list that grows for good.
    """
    if torch.accelerator.is_available():
        return
    makes: list[Any] = [torch.cuda.random, torch.xpu.random, torch.mtia]
    for make in makes:
        make._lazy_call = _leave_it


def _leave_it(*_: object, **__: object) -> None:
    return None
