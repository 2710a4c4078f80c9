"""Modules that did not run in the profiled step: planned like the nearest of their class that did."""

from dataclasses import replace

from recollect._core.calls import Category, Lifetime, Storage
from recollect._core.decisions import Decision
from recollect._core.forecasts import PlannedRegion
from recollect._core.plans import Choice
from recollect._core.profiles import ModuleEntry
from recollect._plan.idle import describe_idle, find_idle, plan_idle
from recollect._plan.problem import Problem
from tests.plan.blocks import make_step


def problem_of(modules: dict[str, str], ran: list[str], parameters: dict[str, int] | None = None) -> Problem:
    """A step with these modules by their classes, of which some ran, and parameters of so many bytes."""
    calls: list[dict[str, object]] = [
        {"module": path, "reads": [at], "makes": [at + 1], "saves": [at], "seconds": 1.0} for at, path in enumerate(ran)
    ]
    step = make_step(calls, [4] * (len(ran) + 1))
    own = (
        Storage(bytes=size, lifetime=Lifetime.STEP, name=name, category=Category.PARAMETER)
        for name, size in (parameters or {}).items()
    )
    entries = tuple(ModuleEntry(path=path, kind=kind) for path, kind in modules.items())
    return Problem(replace(step, storages=(*step.storages, *own), modules=entries))


def region(path: str, way: str = "rerun") -> PlannedRegion:
    return PlannedRegion(path=path, kind="Block", way=way, plain_bytes=8, kept_bytes=4, again_s=0.5, parameter_bytes=6)


def test_a_module_is_like_the_region_beside_it_in_the_innermost_list() -> None:
    paths = ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"]
    problem = problem_of(dict.fromkeys(paths, "Block"), [f"{path}.act" for path in (*paths[:2], paths[2])])
    found = find_idle(problem, [region(paths[1], "rerun"), region(paths[2], "replay")])
    assert {path: like.path for path, like in found.items()} == {paths[3]: paths[2]}


def test_other_classes_and_modules_that_ran_by_their_parts_are_not_idle() -> None:
    problem = problem_of(
        {"layers.0": "Block", "layers.1": "Block", "layers.2": "Norm"}, ["layers.0.act", "layers.1.act"]
    )
    assert find_idle(problem, [region("layers.0")]) == {}
    assert find_idle(problem, []) == {}


def test_what_is_planned_for_one_holds_for_the_other_which_keeps_nothing_yet() -> None:
    modules = dict.fromkeys([f"layers.{number}" for number in range(13)], "Block")
    parameters = {"layers.0.weight": 6, "layers.1.weight": 10, "layers.1.bias": 3, "layers.12.weight": 1000}
    problem = problem_of(modules, [f"{path}.act" for path in modules if path != "layers.1"], parameters)
    idle = find_idle(problem, [region("layers.0")])
    kept = Choice(decision=Decision.SAVE, region="layers.0", module="layers.0.act")
    elsewhere = Choice(decision=Decision.SAVE, region="layers.12", module="layers.12.act")
    regions, choices = plan_idle(problem, idle, [kept, elsewhere])
    assert regions == [PlannedRegion(path="layers.1", kind="Block", way="rerun", parameter_bytes=13)]
    assert choices == [replace(kept, region="layers.1", module="layers.1.act")]


def test_the_note_names_the_first_and_counts_the_others() -> None:
    assert describe_idle({}) == []
    [note] = describe_idle({"layers.1": region("layers.0"), "layers.3": region("layers.0")})
    assert note.startswith("layers.1 and 1 more did not run in the profiled step: planned like layers.0. ")
