"""What does not work yet: each promise and model, with the reason. Whoever mends one takes it out here."""

from collections.abc import Collection, Iterable, Iterator

import pytest

from tests.zoo.catalogue import ZOO

RULES = ("full", "selective", "every 2nd")


def under(promise: str, names: str, reason: str, *rules: str) -> Iterator[tuple[tuple[str, str, str], str]]:
    for name in names.split():
        for rule in rules or RULES:
            yield (promise, name, rule), reason


BROKEN: dict[tuple[str, str, str], str] = {
    **dict(under("compiled", "whisper", "torch's aot_eager fails on the plain model too, in a view")),
}


def each(
    promise: str, *, rules: Iterable[str] = (), in_turn: bool = False, begin: int = 0, long: Collection[str] = ()
) -> pytest.MarkDecorator:
    """Every model, under every rule where there are rules; what is known to be broken is expected to fail.

    Where rules take turns, one for each model is part of `make test`, number `begin` for the first; the others are
    `long`, see `make zoo`, and so are all of the models named so.
    """
    chosen = list(rules)
    cases = []
    for number, name in enumerate(ZOO):
        for turn, rule in enumerate(chosen or [""]):
            marks = []
            if (promise, name, rule) in BROKEN:
                marks.append(pytest.mark.xfail(strict=True, reason=BROKEN[promise, name, rule]))
            if name in long or (in_turn and turn != (number + begin) % len(chosen)):
                marks.append(pytest.mark.long)
            values = (name, rule) if chosen else (name,)
            cases.append(pytest.param(*values, marks=marks, id="-".join(values)))
    return pytest.mark.parametrize(("name", "rule") if chosen else ("name",), cases)
