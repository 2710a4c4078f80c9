"""Random steps of modules with a backward pass: what regions are planned on."""

from hypothesis import strategies as st

from recollect._core.calls import Lifetime, OpCall, Phase, Saved, Storage, Value
from recollect._core.profiles import Clock, ModuleEntry, Profile


def make_step(forward: list[dict[str, object]], sizes: list[int], gradient: int = 1) -> Profile:
    """A step from its forward calls, each with module, reads, makes, saves and seconds; backward follows from them.

    Storage 0 is the input of the step, which stays; the gradient that one backward call gives the next has one size.
    """
    storages = [Storage(bytes=size, lifetime=Lifetime.VALUE if at else Lifetime.STEP) for at, size in enumerate(sizes)]
    calls: list[OpCall] = []
    saved: list[tuple[int, int]] = []
    for number, one in enumerate(forward):
        calls.append(
            OpCall(
                op=f"aten.op{number}.default",
                module=str(one["module"]),
                inputs=tuple(Value(storage=at) for at in one["reads"]),  # type: ignore[attr-defined]
                outputs=tuple(Value(storage=at) for at in one["makes"]),  # type: ignore[attr-defined]
                seconds=float(one["seconds"]),  # type: ignore[arg-type]
                flops=1,
            )
        )
        saved += [(storage, number) for storage in one["saves"]]  # type: ignore[attr-defined]
    edges = []
    previous: int | None = None
    for number in reversed(range(len(forward))):
        mine = [storage for storage, by in saved if by == number]
        storages.append(Storage(bytes=gradient))
        reads = [*mine, *([previous] if previous is not None else [])]
        edges += [Saved(storage=storage, by=number, reader=len(calls)) for storage in mine]
        calls.append(
            OpCall(
                op=f"aten.op{number}_backward.default",
                phase=Phase.BACKWARD,
                module=str(forward[number]["module"]),
                inputs=tuple(Value(storage=at) for at in reads),
                outputs=(Value(storage=len(storages) - 1),),
                seconds=1.0,
                forward=number,
            )
        )
        previous = len(storages) - 1
    paths = list(dict.fromkeys(str(one["module"]) for one in forward))
    parents = list(dict.fromkeys(path.rpartition(".")[0] for path in paths if "." in path))
    modules = [("", "Net"), *((path, "ModuleList") for path in parents), *((path, "Block") for path in paths)]
    return Profile(
        storages=tuple(storages),
        calls=tuple(calls),
        saved=tuple(edges),
        modules=tuple(ModuleEntry(path=path, kind=kind) for path, kind in modules),
        clock=Clock.HOST,
        name="Net",
    )


@st.composite
def stacks(draw: st.DrawFn, layers: int = 2, most: int = 4) -> Profile:
    """A stack of layers, each of a few calls that read what the layer was given or has made."""
    sizes, forward = [draw(st.integers(1, 8))], list[dict[str, object]]()
    given = 0
    for layer in range(draw(st.integers(1, layers))):
        readable = [given]
        for _ in range(draw(st.integers(1, most))):
            reads = draw(st.lists(st.sampled_from(readable), min_size=1, max_size=2, unique=True))
            made = list(range(len(sizes), len(sizes) + draw(st.integers(1, 2))))
            sizes += [draw(st.integers(1, 8)) for _ in made]
            saves = draw(st.lists(st.sampled_from([*reads, *made]), max_size=3, unique=True))
            seconds = draw(st.integers(1, 5))
            forward.append(
                {"module": f"layers.{layer}", "reads": reads, "makes": made, "saves": saves, "seconds": seconds}
            )
            readable += made
        given = readable[-1]
    if not any(one["saves"] for one in forward):
        forward[-1]["saves"] = list(forward[-1]["makes"])  # type: ignore[call-overload]
    return make_step(forward, sizes)
