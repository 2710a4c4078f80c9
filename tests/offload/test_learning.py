"""Learning: what is sent grows with the link only once in a while, because room for it must be pinned."""

from types import SimpleNamespace
from typing import Any

from recollect._core.timetables import SeenValue, Speeds
from recollect._offload.compression import Compression
from recollect._offload.learning import Learner, SessionOptions

VALUES = (
    SeenValue(bytes=100, made_s=0.0, used_s=10.0),
    SeenValue(bytes=100, made_s=1.0, used_s=9.0),
    SeenValue(bytes=100, made_s=4.9, used_s=5.1),
)
SLOW, QUICK = Speeds(out=30.0, back=30.0), Speeds(out=1000.0, back=1000.0)


def sends_after(learner: Learner, step: int, speeds: Speeds, values: tuple[SeenValue, ...] = VALUES) -> Any:
    """What the next step sends, after one of this number has shown this."""
    learner.steps = step
    seen: Any = SimpleNamespace(kinds=["first", "second", "third"], has_backward=True)
    learner._learn(seen, values, (), speeds)
    lesson = learner.lessons.about(tuple(seen.kinds))
    assert lesson is not None
    return None if lesson.timetable is None else lesson.timetable.sends


def new_learner() -> Learner:
    options = SessionOptions(min_bytes=0, in_flight=2**30, waits=False, compression=Compression(None))
    transfers: Any = SimpleNamespace(host=None, slow=None)
    return Learner("host", options, transfers)


def test_what_is_sent_grows_with_the_link_once_in_64_steps() -> None:
    learner = new_learner()
    assert sends_after(learner, 1, SLOW) is None  # the first step is slow for other reasons
    assert sends_after(learner, 2, SLOW) == (True, False, False)
    assert sends_after(learner, 3, QUICK) == (True, False, False)
    assert sends_after(learner, 64, QUICK) == (True, True, False)
    assert sends_after(learner, 65, QUICK) == (True, True, False)


def test_what_somebody_held_once_is_not_sent_again_where_nobody_could_see_it() -> None:
    learner, (first, second, third) = new_learner(), VALUES
    held = (SeenValue(bytes=100, made_s=first.made_s, used_s=first.used_s, is_held=True), second, third)
    sends_after(learner, 1, QUICK)
    assert sends_after(learner, 2, QUICK, held) == (False, True, False)
    assert sends_after(learner, 3, QUICK) == (False, True, False)
    assert sends_after(learner, 64, QUICK) == (False, True, False)
