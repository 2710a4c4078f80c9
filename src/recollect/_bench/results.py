"""What benchmarks measured, as data that is appended to a JSON file. No torch here."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from recollect._core.documents import read_document, write_document

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What one contender took.

    Attributes:
        contender: its name.
        family: whose it is: ``"recollect"``, ``"torch"``, ...
        peak_bytes: the most that tensors had of the device at a time; None if it was not measured.
        rounds_s: a step time for each round: the median of its repeats.
        budget_bytes: what ours was given.
        predicted_peak_bytes: what ours promised.
        predicted_step_s: likewise.
        gradient_difference: the largest relative difference of a parameter's gradient norm from the plain step's.
        failed: why there are no figures; ``""`` if there are.
    """

    contender: str
    family: str
    peak_bytes: int | None = None
    rounds_s: tuple[float, ...] = ()
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_step_s: float | None = None
    gradient_difference: float | None = None
    failed: str = ""

    @property
    def median_s(self) -> float | None:
        """The middle one of the rounds."""
        return statistics.median(self.rounds_s) if self.rounds_s else None

    @property
    def spread(self) -> float | None:
        """How far the rounds are apart, as a part of the middle one."""
        if not self.rounds_s:
            return None
        return (max(self.rounds_s) - min(self.rounds_s)) / statistics.median(self.rounds_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Which measurement it is.

    Attributes:
        model: its name.
        size: ``"small"`` or ``"large"``.
        mode: ``"eager"`` or ``"compiled"``; or ``"largest batch"``, ``"largest length"``.
        device: its name.
        torch: version.
        commit: of this library; its version where there is no repository.
    """

    model: str
    size: str
    mode: str
    device: str = ""
    torch: str = ""
    commit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How large a step may be with one contender.

    Attributes:
        contender: its name.
        family: whose it is.
        value: the largest that stays within the budget; 0 if none does.
        peak_bytes: what it takes then.
        step_s: how long it takes then.
        failed: why there are no figures.
    """

    contender: str
    family: str
    value: int = 0
    peak_bytes: int | None = None
    step_s: float | None = None
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One cell, measured.

    Attributes:
        cell: which.
        held_bytes: what is there before the step.
        shape: of the model, in words.
        is_quick: whether it was a look, and no measurement.
        figures: of the contenders.
        budget_bytes: within which the largest was looked for.
        reaches: how large it may be.
        is_partial: whether contenders are still missing because the time was up.
    """

    cell: Cell
    held_bytes: int = 0
    shape: str = ""
    is_quick: bool = False
    figures: tuple[Figure, ...] = ()
    budget_bytes: int = 0
    reaches: tuple[Reach, ...] = ()
    is_partial: bool = False

    @property
    def plain(self) -> Figure | None:
        """The figures of the plain step."""
        return next((one for one in self.figures if one.contender == "plain" and one.rounds_s), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All that was measured.

    >>> Results.from_json(Results().to_json())
    Results(measured=())
    """

    measured: tuple[Measured, ...] = ()

    def to_json(self) -> str:
        """The results as text that `from_json` reads."""
        return write_document(self, kind="bench", version=_VERSION)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """The results that `to_json` wrote.

        Raises:
            ValueError: the text is none, or of a later version.
        """
        return read_document(text, cls, kind="bench", version=_VERSION)

    @classmethod
    def read(cls, path: Path) -> Results:
        """What a file has; nothing if it is not there.

        Raises:
            ValueError: it holds something else.
        """
        return cls.from_json(path.read_text("utf-8")) if path.exists() else cls()

    def plus(self, one: Measured) -> Results:
        """These, and one more at the end."""
        return replace(self, measured=(*self.measured, one))

    def find(self, cell: Cell, *, is_quick: bool | None = None, budget_bytes: int = 0) -> Measured | None:
        """The last measurement of a cell; None if it is missing. A look does not stand for a measurement."""
        for one in reversed(self.measured):
            is_asked = one.cell == cell and one.budget_bytes == budget_bytes
            if is_asked and (is_quick is None or one.is_quick <= is_quick):
                return one
        return None

    def latest(self, *, model: str, size: str, mode: str, device: str) -> Measured | None:
        """The last measurement of a model on a device, whatever the versions."""
        wanted = (model, size, mode, device)
        for one in reversed(self.measured):
            if (one.cell.model, one.cell.size, one.cell.mode, one.cell.device) == wanted:
                return one
        return None
