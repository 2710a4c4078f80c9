"""One walk over args and kwargs: leaves in order, and the same call with others in their places."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from recollect._core import pytree
from recollect._core.pytree import Arguments
from tests.corpus import Batch, Pair

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], list[Any]]] = {
    "nothing": ((), {}, []),
    "positional": ((1, "a", None), {}, [1, "a", None]),
    "keyword": ((), {"b": 1, "a": 2}, [1, 2]),
    "both": ((1,), {"a": 2}, [1, 2]),
    "list": (([1, [2]], 3), {}, [1, 2, 3]),
    "tuple": (((1, 2),), {"a": (3,)}, [1, 2, 3]),
    "dict": (({"x": 1, "y": [2]},), {}, [1, 2]),
    "ordered dict": ((OrderedDict(x=1, y=2),), {}, [1, 2]),
    "named tuple": ((Pair(1, None),), {}, [1]),  # type: ignore[arg-type]
    "dataclass": ((), {"batch": Batch(1, [2, 3], "s")}, [1, 2, 3, "s"]),  # type: ignore[arg-type,list-item]
    "empty containers": (([], {}), {"a": ()}, []),
    "unregistered": (({1, 2},), {}, [{1, 2}]),
}


@pytest.mark.parametrize(("args", "kwargs", "leaves"), CALLS.values(), ids=CALLS)
def test_leaves_come_in_order_positional_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
) -> None:
    assert [leaf for leaf in Arguments(args, kwargs).leaves if leaf is not None] == [
        leaf for leaf in leaves if leaf is not None
    ]


@pytest.mark.parametrize(("args", "kwargs", "leaves"), CALLS.values(), ids=CALLS)
def test_the_same_leaves_give_the_same_call(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> None:
    arguments = Arguments(args, kwargs)
    again, keywords = arguments.rebuild(arguments.leaves)
    assert tuple(again) == args
    assert keywords == kwargs
    assert list(keywords) == list(kwargs)


def test_other_leaves_take_their_places() -> None:
    arguments = Arguments(([1, 2], 3), {"cache": {"k": (4,)}})
    args, kwargs = arguments.rebuild([value * 10 for value in arguments.leaves])
    assert (tuple(args), kwargs) == (([10, 20], 30), {"cache": {"k": (40,)}})


def test_containers_are_made_anew_each_time() -> None:
    given = [torch.ones(1)]
    arguments = Arguments((given,), {})
    (first,), (second,) = (arguments.rebuild(arguments.leaves)[0] for _ in range(2))
    assert first is not given
    assert first is not second
    assert first[0] is given[0]


def test_a_container_that_grows_later_does_not_change_the_call() -> None:
    given = [1, 2]
    arguments = Arguments((given,), {})
    given.append(3)
    (again,), _ = arguments.rebuild(arguments.leaves)
    assert again == [1, 2]


@pytest.mark.parametrize(
    ("args", "kwargs", "index", "name"),
    [
        ((1, 2), {}, 1, "argument 1"),
        ((1,), {"mask": 2}, 1, "argument 'mask'"),
        (([1, 2],), {}, 1, "argument 0[1]"),
        ((1,), {"cache": {"k": [2, 3]}}, 2, "argument 'cache'['k'][1]"),
        ((Pair(1, 2),), {}, 1, "argument 0.second"),  # type: ignore[arg-type]
    ],
)
def test_leaves_are_named_as_their_caller_wrote_them(
    args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str
) -> None:
    assert Arguments(args, kwargs).describe(index) == name


def test_containers_that_check_what_they_are_made_of_are_named_too() -> None:
    class Picky:
        def __init__(self, one: Any, other: Any) -> None:
            assert isinstance(one, str)
            self.values = [one, other]

    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    assert Arguments(([packed],), {}).describe(1) == "argument 0[0].batch_sizes"
    _pytree.register_pytree_node(Picky, lambda one: (one.values, None), lambda values, _: Picky(*values))
    assert Arguments((1, Picky("a", 2)), {}).describe(2) == "argument 1[1]"


def test_a_call_without_registered_classes_never_reaches_the_pytree_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(pytree, "flatten", refuse)
    assert list(Arguments((1, 2), {"a": "b"}).leaves) == [1, 2, "b"]
    assert list(Arguments(([1, (2, {"x": 3})],), {}).leaves) == [1, 2, 3]
    with pytest.raises(AssertionError):
        Arguments(([1, OrderedDict(x=2)],), {})


def test_a_class_registered_later_is_walked_from_then_on() -> None:
    class Box:
        def __init__(self, value: Any) -> None:
            self.value = value

    box = Box(1)
    assert list(Arguments((box,), {}).leaves) == [box]
    _pytree.register_pytree_node(Box, lambda b: ([b.value], None), lambda values, _: Box(*values))
    assert list(Arguments((box,), {}).leaves) == [1]
