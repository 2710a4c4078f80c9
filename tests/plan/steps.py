"""Random training steps, and chains: what schedules are tried on."""

from hypothesis import strategies as st

from recollect._core.calls import Lifetime, OpCall, Phase, Storage, Value
from recollect._core.profiles import Profile


def call(op: str, reads: list[int], makes: list[int], phase: Phase = Phase.FORWARD, **more: int) -> OpCall:
    return OpCall(
        op=op,
        phase=phase,
        inputs=tuple(Value(storage=at) for at in reads),
        outputs=tuple(Value(storage=at) for at in makes),
        flops=more.pop("flops", 1),
        seconds=0.5,
        workspace_bytes=more.pop("workspace_bytes", 0),
    )


def chain(length: int, size: int = 1) -> Profile:
    """x0 -> x1 -> ... -> xn, each of one size; the gradient of each link needs its input, and the gradient behind it.

    Storage 0 is the input, 1 to n are values, n + 1 is the gradient given, and the rest are gradients made.
    """
    storages = [Storage(bytes=size, lifetime=Lifetime.STEP), *(Storage(bytes=size) for _ in range(length))]
    storages.append(Storage(bytes=size, lifetime=Lifetime.GIVEN))
    calls = [call("f", [at], [at + 1]) for at in range(length)]
    for at in reversed(range(length)):
        storages.append(Storage(bytes=size, lifetime=Lifetime.VALUE if at else Lifetime.RETURNED))
        calls.append(call("f_backward", [at, len(storages) - 2], [len(storages) - 1], Phase.BACKWARD))
    return Profile(storages=tuple(storages), calls=tuple(calls))


@st.composite
def steps(draw: st.DrawFn, most: int = 7) -> Profile:
    """A step whose operators read anything made before them: views, several outputs and writes in place included."""
    sizes = st.integers(0, 9)
    storages = [Storage(bytes=draw(sizes), lifetime=Lifetime.STEP) for _ in range(draw(st.integers(1, 2)))]
    calls: list[OpCall] = []
    readable = list(range(len(storages)))

    def add(phase: Phase) -> None:
        reads = draw(st.lists(st.sampled_from(readable), max_size=3, unique=True))
        made = list(range(len(storages), len(storages) + draw(st.integers(0, 2))))
        lifetime = st.sampled_from([Lifetime.VALUE, Lifetime.VALUE, Lifetime.VALUE, Lifetime.RETURNED])
        storages.extend(Storage(bytes=draw(sizes), lifetime=draw(lifetime)) for _ in made)
        views = reads[:1] if draw(st.booleans()) else []
        calls.append(call(f"op{len(calls)}", reads, made + views, phase, workspace_bytes=draw(st.integers(0, 3))))
        readable.extend(made)

    for _ in range(draw(st.integers(1, most))):
        add(Phase.FORWARD)
    for _ in range(draw(st.integers(0, 2))):
        storages.append(Storage(bytes=draw(sizes), lifetime=Lifetime.GIVEN))
        readable.append(len(storages) - 1)
    for _ in range(draw(st.integers(0, most))):
        add(Phase.BACKWARD)
    return Profile(storages=tuple(storages), calls=tuple(calls))
