"""Everything that a profile must leave as it was found."""

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that must be as it was found."""
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "parameters": [id(parameter) for parameter in model.parameters()],
        "buffers": [id(buffer) for buffer in model.buffers()],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "training": [module.training for module in model.modules()],
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers],
    }


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert (one == other).all()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other
