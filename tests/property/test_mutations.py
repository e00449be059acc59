"""A change of a line of a program's text is rejected by the rule that should, or shown harmless by the executor."""

from functools import cache
from itertools import chain

import pytest

from chimera_ir.ir.levels import Program
from chimera_ir.lower.lower import lower, order
from tests.executor import verdicts
from tests.property.mutations import RIGHT, judged, mutants, rules, table
from tests.property.programs import doubled, one_direction, random_plan, two_directions, with_ties
from tests.property.slices import offloading, random_sliced_plan, seq1f1b
from tests.repeatable import also

PROGRAMS = {
    "one direction": lower(order(one_direction(3, 4))),
    "two directions": lower(order(two_directions(4, 4))),
    "doubled": lower(order(doubled(2, 1))),
    "two units": lower(order(two_directions(2, 4)), 2),
    "tied ends": lower(order(with_ties(one_direction(3, 3), (0, 2)))),
    "tied in two directions": lower(order(with_ties(two_directions(2, 4), (0, 1)))),
    "tied twice": lower(order(with_ties(one_direction(3, 2), (0, 1), (0, 1, 2)))),
    "slices": lower(order(seq1f1b(2, 1, 3))),
    "slices at random": lower(order(random_sliced_plan(3, 0.0))),
    "slices and moves": lower(order(random_sliced_plan(34, 0.0, 1.0))),
    "moves in one direction": lower(order(offloading(3, 3))),
    **{f"random {seed}": lower(order(random_plan(seed, 0.0))) for seed in also(range(8), range(8, 12))},
}


@cache
def mutants_of(name: str) -> list[tuple[str, Program]]:
    """The mutants of a program, the same each time."""
    return [*mutants(PROGRAMS[name], [*PROGRAMS].index(name))]


@cache
def rejecting(name: str) -> list[set[str]]:
    """The rules that reject each mutant of a program; two tests ask for them."""
    return [rules(mutant) for _, mutant in mutants_of(name)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_themselves_are_verified_and_run(name):
    assert rules(PROGRAMS[name]) == set()
    assert verdicts(PROGRAMS[name], seeds=5) == {"finished"}


def test_the_executor_sees_what_the_rules_on_time_see():
    """The other way round: what only the order of events spoils fails in the executor as well."""
    seen = {"deadlock": set(), "acyclic": set(), "out of order": set(), "slot in use": set()}
    for name in PROGRAMS:
        for (_, mutant), found in zip(mutants_of(name), rejecting(name), strict=True):
            if len(found) == 1 and found & set(seen):
                (rule,) = found
                seen[rule].add("runs" if verdicts(mutant, seeds=8) == {"finished"} else "fails")
    assert all("fails" in verdict for verdict in seen.values())
    assert seen["deadlock"] == seen["acyclic"] == seen["out of order"] == {"fails"}


def test_every_mutant_is_rejected_by_the_rule_that_should_or_harmless(capsys):
    changed = ((f"{name}, {kind}", kind, mutant) for name in PROGRAMS for kind, mutant in mutants_of(name))
    score, failures = judged(changed, RIGHT, chain.from_iterable(map(rejecting, PROGRAMS)))
    with capsys.disabled():
        print(f"\n{table(score)}")
    assert not failures, failures[:5]
