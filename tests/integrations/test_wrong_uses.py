"""A trainer's callback refuses wrong options when it is made, not hours later."""

from typing import Any

import pytest
from torch import nn

from tests.refusing import Wrong, refuse
from tests.transformers_models import transformers_models
from tests.trying import try_all

pytest.importorskip("transformers")
pytest.importorskip("lightning")
pytest.importorskip("accelerate")
from recollect.integrations import accelerate, export, lightning, transformers


def test_trainers_refuse_at_once_what_would_fail_when_training_begins() -> None:
    callback: Any = transformers.RecollectCallback
    task: Any = lightning.RecollectCallback
    hook: Any = accelerate.RecollectHook
    enable: Any = transformers.enable
    restore: Any = export.restore_regions
    model = transformers_models()["llama"]()
    wrong: list[Wrong] = [
        (lambda: callback(nn.Linear(2, 2)), TypeError, "recollect.Decision; not <module Linear>"),
        (lambda: callback(budget=8.0), TypeError, "budget 8.0: expected bytes"),
        (lambda: callback(budget="8 %x"), ValueError, "budget '8 %x': expected bytes"),
        (lambda: callback(budget="8GB", tiers="cpu"), ValueError, "tiers='cpu': expected 'host'"),
        (lambda: callback("selectiv"), ValueError, "did you mean 'selective'?"),
        (lambda: task(3), TypeError, "rules: expected one of 'full'"),
        (lambda: task(budget="8GB"), TypeError, "RecollectCallback has no option budget='8GB': use recollect.fit"),
        (lambda: hook(policy="x"), ValueError, "'x' is not one of the ready-made rules"),
        (lambda: hook(budget="8GB"), TypeError, "RecollectHook has no option budget='8GB': use recollect.fit"),
        (
            lambda: enable(model, use_reentrant=False),
            TypeError,
            "enable has no option use_reentrant=False: leave it out",
        ),
        (lambda: enable(model, gradient_checkpointing_kwargs={}), TypeError, "gradient_checkpointing_kwargs={}: leave"),
        (
            lambda: restore(nn.Linear(2, 2)),
            TypeError,
            "a program from torch.export.load, not <module Linear>",
        ),
    ]
    try_all(refuse, wrong)
