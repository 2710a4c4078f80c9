"""The callback for Lightning: the same training, to the bit, and a module as it was afterwards."""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from recollect import fit as fit_step
from recollect import profile
from recollect.integrations.lightning import RecollectCallback
from tests.cli.commands import recollect
from tests.models import GPT

# What Lightning warns about is its own.
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.arange(84).reshape(12, 7) * 5 % 32


class Task(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.net = GPT()
        self.fails, self.again = fails, 0
        self.net.layers[0].register_forward_pre_hook(lambda *_: None)

    def training_step(self, tokens: Tensor) -> Tensor:
        if self.fails:
            message = "out of luck"
            raise ValueError(message)
        self.again += sum("forward" in vars(layer) for layer in self.net.layers)
        result: Tensor = nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())
        return result

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(task: Task, path: Path, callbacks: list[Any], **how: Any) -> None:
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=path, callbacks=callbacks, **how,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(task, DataLoader(TOKENS, batch_size=3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"policy": "selective"}, {"rules": {"net.layers.*": "full"}, "every": 2}], ids=str
)
def test_lightning_trains_as_without_the_callback(options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [RecollectCallback(**options)]):
        torch.manual_seed(0)
        task = Task()
        fit(task, tmp_path, callbacks)
        assert task.again == (0 if not callbacks else 8 if "every" in options else 16)
        assert not any("forward" in vars(module) for module in task.modules())
        found.append(list(task.parameters()))
    assert all(map(torch.equal, *found))


@pytest.fixture
def own_environment() -> Iterator[None]:
    """A strategy that distributes sets variables and torch's threads, and leaves its process group behind."""
    before, threads = dict(os.environ), torch.get_num_threads()
    yield
    distributed.destroy_process_group()
    torch.set_num_threads(threads)  # sums over several threads round differently
    os.environ.clear()
    os.environ.update(before)


class Sharded(Task):
    """Shards itself, as the strategy for FSDP2 and tensor parallelism asks of a module."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(
    ("strategy", "kind", "how"),
    [
        ("ddp", Task, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
        ("ddp_find_unused_parameters_true", Task, {}),
        (ModelParallelStrategy, Sharded, {}),
    ],
    ids=["ddp", "unused", "fsdp2"],
)
def test_a_strategy_that_wraps_or_shards_the_module_trains_the_same(
    strategy: Any, kind: type[Task], how: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for callbacks in ([], [RecollectCallback(policy="selective")]):
        torch.manual_seed(0)
        task = kind()
        made = strategy if isinstance(strategy, str) else strategy()
        fit(task, tmp_path, callbacks, strategy=made, devices=1, **how)
        assert bool(task.again) == bool(callbacks)
        assert not any("forward" in vars(layer) for layer in task.net.modules())
        found.append([whole(parameter) for parameter in task.parameters()])
    assert all(map(torch.equal, *found))


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def test_a_fit_that_fails_leaves_a_plain_module(tmp_path: Path) -> None:
    task = Task(fails=True)
    with pytest.raises(ValueError, match="out of luck"):
        fit(task, tmp_path, [RecollectCallback()])
    assert not any("forward" in vars(module) for module in task.modules())


TASK = """
import lightning, torch
from torch import nn

class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.net = nn.Sequential(*(block() for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

def make():
    return Task(), torch.randn(512, 16)
"""


@pytest.mark.parametrize("command", [pytest.param("plan", marks=pytest.mark.long), "fit"])
def test_the_command_line_gives_the_batch_to_the_training_step(command: str, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    done = recollect(command, "task.py:make", "--budget", "min", "--quiet", folder=tmp_path)
    assert done.code == 0, done.err
    assert "plan Task at the smallest peak" in done.out


@pytest.mark.parametrize("run", [functools.partial(fit_step, budget="min"), profile])
def test_a_step_that_needs_a_trainer_says_what_to_pass(run: Callable[..., Any]) -> None:
    class Manual(Task):
        def training_step(self, tokens: Tensor) -> Tensor:
            self.optimizers()
            return super().training_step(tokens)

    with pytest.raises(RuntimeError, match="not attached") as caught:
        run(Manual(), TOKENS)
    assert "pass a function that computes the loss" in caught.value.__notes__[0]
