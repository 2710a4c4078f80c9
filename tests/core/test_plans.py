"""A plan decides by the first choice that matches, is compared by value, and goes to JSON and back unchanged."""

import pytest

from recollect import Decision, Site
from recollect._core.forecasts import Forecast, PlannedRegion
from recollect._core.plans import Choice, Plan

MM = Site(region="", op="aten.mm.default", module="layers.0.mlp.up", call=3)
MUL = Site(region="head", op="aten.mul.Tensor", module="", output=1)


def test_the_first_choice_that_matches_decides() -> None:
    plan = Plan(
        choices=(
            Choice(decision=Decision.SAVE, op="aten.mm.default", module="layers.*.mlp.*"),
            Choice(decision=Decision.OFFLOAD, op="aten.mm.*"),
            Choice(decision=Decision.RECOMPUTE),
        )
    )
    assert plan.decide(MM) is Decision.SAVE
    assert plan.decide(Site(region="", op="aten.mm.default", module="head")) is Decision.OFFLOAD
    assert plan.decide(MUL) is Decision.RECOMPUTE


def test_a_pattern_before_an_exact_choice_wins_and_one_after_it_does_not() -> None:
    exact, pattern = Choice.at(MM, Decision.SAVE), Choice(decision=Decision.RECOMPUTE, op="aten.mm.default")
    assert Plan(choices=(exact, pattern)).decide(MM) is Decision.SAVE
    assert Plan(choices=(pattern, exact)).decide(MM) is Decision.RECOMPUTE


@pytest.mark.parametrize(
    ("choice", "matches"),
    [
        (Choice(decision=Decision.SAVE, call=3), True),
        (Choice(decision=Decision.SAVE, call=2), False),
        (Choice(decision=Decision.SAVE, output=0), True),
        (Choice(decision=Decision.SAVE, output=1), False),
        (Choice(decision=Decision.SAVE, region=""), True),
        (Choice(decision=Decision.SAVE, region="*"), False),
        (Choice(decision=Decision.SAVE, module=""), False),
        (Choice(decision=Decision.SAVE, module="layers.**"), True),
        (Choice.at(MM, Decision.SAVE), True),
        (Choice.at(MUL, Decision.SAVE), False),
    ],
)
def test_every_field_that_is_given_must_match(choice: Choice, matches: bool) -> None:
    assert choice.matches(MM) is matches
    assert (Plan(choices=(choice,)).decide(MM) is Decision.SAVE) is matches


def test_an_exact_choice_takes_names_as_they_are_written() -> None:
    odd = Site(region="layers[0]*", op="aten.mm.default")
    plan = Plan(choices=(Choice.at(odd, Decision.SAVE),))
    assert plan.decide(odd) is Decision.SAVE
    assert plan.decide(Site(region="layers00", op="aten.mm.default")) is None


def test_a_plan_is_silent_where_no_choice_matches() -> None:
    assert Plan().decide(MM) is None


def test_a_plan_of_a_policy_holds_what_it_said_and_not_where_it_was_silent() -> None:
    plan = Plan.of(lambda site: Decision.SAVE if site.op == "aten.mm.default" else None, [MM, MUL], name="mms")
    assert plan == Plan(choices=(Choice.at(MM, Decision.SAVE),), name="mms")
    assert (plan.decide(MM), plan.decide(MUL)) == (Decision.SAVE, None)


def test_a_plan_goes_to_json_and_back_unchanged() -> None:
    pattern = Choice(decision=Decision.OFFLOAD, module="layers.*", call=0)
    plan = Plan(choices=(Choice.at(MM, Decision.SAVE), pattern, Choice.at(MUL, Decision.RECOMPUTE)), name="mine")
    assert Plan.from_json(plan.to_json()) == plan
    assert hash(Plan.from_json(plan.to_json())) == hash(plan)


def test_equal_plans_share_a_digest_and_different_ones_do_not() -> None:
    plans = [
        Plan(),
        Plan(choices=(Choice.at(MM, Decision.SAVE),)),
        Plan(choices=(Choice.at(MM, Decision.OFFLOAD),)),
        Plan(choices=(Choice.at(MM, Decision.SAVE), Choice.at(MUL, Decision.SAVE))),
        Plan(choices=(Choice.at(MUL, Decision.SAVE), Choice.at(MM, Decision.SAVE))),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert Plan.from_json(plans[3].to_json()).digest == plans[3].digest


def test_asking_a_plan_does_not_change_what_it_equals() -> None:
    asked, fresh = (Plan(choices=(Choice.at(MM, Decision.SAVE),)) for _ in range(2))
    asked.decide(MM)
    assert (asked, asked.to_json()) == (fresh, fresh.to_json())


def test_a_plan_names_the_choices_that_match_nothing() -> None:
    stray = Choice(decision=Decision.SAVE, module="layer.*")
    other = Choice.at(MUL, Decision.SAVE)
    plan = Plan(choices=(Choice.at(MM, Decision.SAVE), stray, Choice(decision=Decision.SAVE, call=3), other))
    assert plan.unmatched([MM]) == (stray, other)


def test_a_bad_pattern_is_refused_when_the_choice_is_made() -> None:
    with pytest.raises(ValueError, match="pattern 're:\\(' is not a valid regular expression"):
        Choice(decision=Decision.SAVE, module="re:(")


def test_an_exact_choice_needs_the_whole_site() -> None:
    with pytest.raises(ValueError, match="an exact choice needs a region, a module, an op, a call and an output"):
        Choice(decision=Decision.SAVE, op="aten.mm.default", is_exact=True)


def test_a_plan_shows_itself_in_a_line() -> None:
    region = PlannedRegion(path="layers.0", kind="Block", way="rerun", plain_bytes=8, kept_bytes=0, again_s=0.0)
    forecast = Forecast(peak_bytes=2048, step_s=1.0, plain_peak_bytes=4096, plain_step_s=1.0)
    plan = Plan(choices=(), name="GPT within 2 KiB", regions=(region,), forecast=forecast)
    assert repr(plan) == "<plan GPT within 2 KiB: 1 region, peak 2.00 KiB>"
    assert repr(Plan(choices=(Choice(decision=Decision.SAVE),))) == "<plan: 1 choice>"


def test_a_plan_of_a_later_version_is_refused() -> None:
    with pytest.raises(ValueError, match="this plan has version 7, but this recollect reads versions up to 3"):
        Plan.from_json('{"recollect": "plan", "version": 7}')


@pytest.mark.parametrize(
    ("bound", "best"), [(1.05, "no plan that only recomputes can beat +5.0%, 1.05 s"), (None, "1.00 s")]
)
def test_a_plan_tells_how_close_its_time_is_to_the_best(bound: float | None, best: str) -> None:
    forecast = Forecast(peak_bytes=5, plain_peak_bytes=10, step_s=1.1, plain_step_s=1.0, lower_bound_s=bound)
    line = str(Plan(forecast=forecast)).splitlines()[2]
    assert line.startswith("step 1.10 s, +10.0% over the plain step's 1.00 s")
    assert line.endswith(best)
