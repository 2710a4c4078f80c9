"""What a compiler fuses away takes no memory, and what it writes does."""

from recollect._core.calls import Lifetime, OpCall, Phase, Storage, Value
from recollect._core.profiles import Profile
from recollect._plan.fusing import fuse

_ROWS, _WIDTH = 8, 16


def value(storage: int, *, item: int = 2, rows: int = _ROWS, width: int = _WIDTH) -> Value:
    return Value(storage=storage, shape=(rows, width), bytes=rows * width * item)


def call(op: str, inputs: list[Value], output: Value, *, flops: int = 0, phase: Phase = Phase.FORWARD) -> OpCall:
    return OpCall(op=f"aten.{op}.default", inputs=tuple(inputs), outputs=(output,), flops=flops, phase=phase)


def step(*calls: OpCall) -> Profile:
    """Storage 0 is the weight; the rest is what calls make."""
    sizes = {0: 64} | {value.storage: value.bytes for one in calls for value in one.outputs}
    storages = [
        Storage(bytes=sizes[at], lifetime=Lifetime.VALUE if at else Lifetime.STEP) for at in range(max(sizes) + 1)
    ]
    return Profile(storages=tuple(storages), calls=calls)


WEIGHT = value(0)
PRODUCT = call("mm", [WEIGHT], value(1), flops=100)


def test_a_cast_that_only_pointwise_calls_read_is_not_written_and_its_readers_read_what_it_is_made_of() -> None:
    wide, backward = value(2, item=4), Phase.BACKWARD
    seen = step(
        PRODUCT,
        call("_to_copy", [value(1)], wide),
        call("mm", [WEIGHT], value(3), flops=100),
        call("mul", [wide], value(4), phase=backward),
        call("mm", [value(4)], value(5), flops=100, phase=backward),
    )
    fused, gone = fuse(seen)
    assert gone == {2}
    assert fused.storages[2].bytes == 0
    assert 1 in fused.calls[3].reads
    assert {edge.storage for edge in fused.saved} == {1, 2}
    assert fuse(seen, kept={2})[1] == frozenset()


def test_what_a_product_reads_and_the_sums_of_a_residual_stream_are_written() -> None:
    total = value(3)
    seen = step(
        PRODUCT,
        call("mm", [WEIGHT], value(2), flops=100),
        call("add", [value(1), value(2)], total),
        call("mul", [total], value(4)),
        call("mm", [value(4)], value(5), flops=100),
        call("add", [total, value(5)], value(6)),
        call("mm", [value(6)], value(7), flops=100, phase=Phase.BACKWARD),
    )
    assert fuse(seen)[1] == frozenset()  # the sum is read again behind a product, and is less than its two parts


def test_between_two_products_nothing_is_written_but_what_the_second_reads_and_what_was_reduced() -> None:
    seen = step(
        PRODUCT,
        call("mm", [WEIGHT], value(2), flops=100),
        call("_softmax", [value(1), value(2)], value(3)),  # a piece: as large as what it reads
        call("_softmax", [value(3)], value(4, width=1)),
        call("_softmax", [value(3), value(4, width=1)], value(5)),
        call("mm", [value(5)], value(6), flops=100),
        call("mm", [value(6)], value(7), flops=100, phase=Phase.BACKWARD),
    )
    fused, gone = fuse(seen)
    assert gone == {3}
    assert {1, 2} <= fused.calls[4].reads


def test_what_is_random_or_written_into_is_written() -> None:
    drawn = OpCall(op="aten.mul.Tensor", inputs=(value(1),), outputs=(value(2),), is_random=True)
    changed = OpCall(op="aten.mul_.Tensor", inputs=(value(2),), outputs=(value(2),), writes=(2,))
    assert fuse(step(PRODUCT, drawn, changed, call("mul", [value(2)], value(3), phase=Phase.BACKWARD)))[1] == set()


def test_gradients_take_the_place_of_what_nobody_reads_any_more() -> None:
    backward = Phase.BACKWARD
    seen = step(
        PRODUCT,
        call("mm", [WEIGHT], value(2), flops=100),
        call("mul", [value(1), value(2)], value(3), phase=backward),
        call("mm", [value(3), value(2)], value(4), flops=100, phase=backward),
        call("mul", [value(4)], value(5, width=1), phase=backward),
        call("mm", [value(5, width=1)], value(6), flops=100, phase=backward),
    )
    fused, _ = fuse(seen)
    assert [[one.storage for one in fused.calls[at].outputs] for at in (2, 4)] == [[1], [5]]
    assert {one.storage for one in fused.calls[3].inputs} == {1, 2}
