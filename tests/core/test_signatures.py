"""Functions whose annotations cannot be evaluated, as Python 3.14 lets them be."""

import sys
from typing import Any

import pytest
from torch import nn

import recollect
from recollect._core.signatures import read_annotations, read_signature

WRITTEN = """
def keep(site: OnlyForTypeCheckers) -> OnlyForTypeCheckers:
    return Decision.SAVE

class Net(nn.Module):
    def forward(self, x: OnlyForTypeCheckers) -> OnlyForTypeCheckers:
        return x
"""


class Unreadable:
    def __getattr__(self, name: str) -> Any:
        raise NameError("name 'OnlyForTypeCheckers' is not defined")


def test_annotations_that_cannot_be_evaluated_count_as_none() -> None:
    assert read_annotations(Unreadable()) == {}


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated when a function is defined")
def test_signatures_are_read_without_their_annotations() -> None:
    known: dict[str, Any] = {"Decision": recollect.Decision, "nn": nn}
    exec(WRITTEN, known)
    assert list(read_signature(known["keep"]).parameters) == ["site"]
    recollect.checkpoint(known["Net"](), policy=known["keep"])
    recollect.apply(nn.Sequential(known["Net"](), known["Net"]())).remove()
