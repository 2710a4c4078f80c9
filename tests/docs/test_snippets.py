"""Code in the pages that is not a doctest runs too: every name that it does not define is something small here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect
from recollect import Decision

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What cannot run in one process without an accelerator, and where the same is tried.
ELSEWHERE = {
    "graph = torch.cuda.CUDAGraph()": "tests/recompute/test_graph_rng.py",
    "fully_shard(": "tests/distributed/test_example.py",
    "Accelerator(": "tests/distributed/test_accelerate.py",
    "share_recomputation(": "tests/distributed/test_pipelining.py",
    'strategy="fsdp"': "tests/integrations/test_lightning.py",
    "Trainer(": "tests/integrations/test_transformers.py",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.mlp(x)
        return mixed


class Net(nn.Module):
    """Takes a batch whole, as tuple or tensor, or its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.lm_head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.lm_head(x)
        return scores


class NetWithLoss(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class Task(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], _: int = 0) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])


def find_snippets() -> dict[str, str]:
    found = {}
    for page in PAGES:
        text = page.read_text("utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            if ">>>" not in block[1]:
                found[f"{page.name}:{text[: block.start()].count(chr(10)) + 1}"] = block[1]
    return found


SNIPPETS = find_snippets()


def is_tried_elsewhere(source: str) -> bool:
    return any(mark in source for mark in ELSEWHERE)


def make_world(page: str, source: str) -> dict[str, Any]:
    """The names that readers have of their own."""
    x, y = torch.randn(8, 16), torch.randint(8, (8,))
    has_own_loss = "loss=" not in source
    model: nn.Module = NetWithLoss() if has_own_loss else Net()
    batch: Any = x if has_own_loss else (x, y)
    world: dict[str, Any] = {
        "recollect": recollect,
        "torch": torch,
        "Path": Path,
        "Decision": Decision,
        "model": model,
        "layer": Block(),
        "batch": batch,
        "batches": [batch],
        "loader": [batch, batch],
        "inputs": (x,),
        "short_batch": (x[:2], y[:2]),
        "long_batch": (x, y),
        "loss_fn": functional.cross_entropy,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "step": lambda batch=x: NetWithLoss()(batch).backward(),
        "train": lambda: None,
    }
    if page == "lightning.md":
        from recollect.integrations.lightning import RecollectCallback

        world |= {"task": Task(), "batch": (x, y), "RecollectCallback": RecollectCallback}
    if "LlamaForCausalLM" in source:
        world |= _make_llama()
    if "fitted." in source and "fitted =" not in source:
        world["fitted"] = recollect.fit(model, batch, optimizer=world["optimizer"], budget="min")
    if re.search(r"\b(profile|before|after)\b", source) and "profile =" not in source:
        seen = recollect.profile(model, x)
        world |= dict.fromkeys(("profile", "before", "after"), seen)
    if "plan.json" in source:
        Path("plan.json").write_text(recollect.plan(recollect.profile(model, x), budget="min").to_json(), "utf-8")
    return world


def _make_llama() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    tokens = torch.zeros(1, 8, dtype=torch.long)
    return {
        "LlamaForCausalLM": transformers.LlamaForCausalLM,
        "config": transformers.LlamaConfig(vocab_size=32, **sizes),
        "batch": {"input_ids": tokens, "labels": tokens},
    }


@pytest.mark.parametrize("place", [place for place, source in SNIPPETS.items() if not is_tried_elsewhere(source)])
def test_a_snippet_runs(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = SNIPPETS[place].replace('budget="90%"', 'budget="40GiB"')  # the CPU has no size of which to take a share
    world = make_world(place.partition(":")[0], source)
    exec(compile(source, place, "exec"), world)
    if "handle" in world:
        world["handle"].remove()


@pytest.mark.parametrize("place", list(SNIPPETS))
def test_a_snippet_uses_names_that_exist(place: str) -> None:
    compile(SNIPPETS[place], place, "exec")
    for name in re.findall(r"\brecollect\.([A-Za-z_]\w*)", SNIPPETS[place]):
        assert hasattr(recollect, name), name


@pytest.mark.parametrize(("mark", "file"), ELSEWHERE.items())
def test_what_cannot_run_here_is_tried_where_it_can(mark: str, file: str) -> None:
    assert any(mark in source for source in SNIPPETS.values())
    assert (ROOT / file).exists()
