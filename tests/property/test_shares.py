"""Shares of M_a at random: the peaks are those of a walk along the lanes that knows nothing of the table of kinds."""

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest

from chimera_ir.cost.report import activations
from chimera_ir.ir.levels import Bound, Header, Plan, Program, Quantity, Schedule
from chimera_ir.ir.ops import Compute, Pair, WaitMove
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import order
from chimera_ir.source import Source
from chimera_ir.verify.verify import verify_schedule
from tests.property.programs import doubled, one_direction, random_plan, two_directions, with_frozen
from tests.property.slices import offloading, random_sliced_plan, seq1f1b
from tests.property.test_split_backward import lowered, split
from tests.repeatable import also

SHARES = [Fraction(share) for share in ("1/4", "1/3", "2/5", "5/6", "3/2", "2", "7/3")]


def plans() -> Iterator[tuple[str, Plan]]:
    yield "one direction", one_direction(4, 6)
    yield "two directions", two_directions(4, 8)
    yield "doubled", doubled(4, 2)
    yield "slices", seq1f1b(3, 2, 4)
    yield "moves", offloading(4, 5)
    yield "frozen", with_frozen(one_direction(4, 5), 0, 2)
    yield from ((f"slices at random {seed}", random_sliced_plan(seed, 0.0)) for seed in also(range(4), range(4, 20)))
    yield from ((f"moves {seed}", random_sliced_plan(seed, 0.0, 0.7)) for seed in also(range(4), range(4, 20)))
    yield from ((f"random {seed}", random_plan(seed, 0.0)) for seed in also(range(12), range(12, 60)))


def sized(plan: Plan, rng: random.Random) -> Plan:
    """The plan with a random share for each stage and, of slices, random lengths."""
    header = plan.header
    lengths = tuple(rng.randint(1, 9) for _ in range(header.slices))
    shares = tuple(rng.choices(SHARES, k=header.stages))
    lengths = lengths if len({*lengths}) > 1 else ()
    return replace(plan, header=replace(header, shares=shares, lengths=lengths))


def schedules() -> Iterator[tuple[str, Schedule]]:
    for seed, (name, plan) in enumerate(plans()):
        schedule = order(sized(plan, random.Random(seed)))
        yield name, schedule
        if not plan.header.moves and plan.header.slices == 1:
            yield f"{name}, split in part", split(schedule, seed, share=0.5)


PROGRAMS = {name: lowered(schedule) for name, schedule in schedules()}


def walked(program: Program) -> list[Fraction]:
    """The most that each worker keeps, from the letters of its lines alone."""
    header, peaks = program.header, list[Fraction]()
    trained = min({*range(header.stages)} - {*header.frozen})
    for lane in program.lanes:
        kept = peak = Fraction(0)
        for line in lane:
            for part in line.parts if isinstance(line, Compute | Pair) else [line]:
                if not isinstance(part, Compute | WaitMove):
                    continue
                made, freed = changes(part, trained, header)
                kept += made
                peak = max(peak, kept)
                kept -= freed
        peaks.append(peak)
        assert kept == 0
    return peaks


def changes(part: Compute | WaitMove, trained: int, header: Header) -> tuple[Fraction, Fraction]:
    """Amounts that a line adds at its start, and frees at its end."""
    share = header.shares[part.stage] * sum(
        Fraction(header.lengths[micro % header.slices], sum(header.lengths))
        if header.lengths
        else Fraction(1, header.parts)
        for micro in part.micros
    )
    letter, again = part.kind.letter, header.recomputes(part.micros[0], part.stage)
    waits = isinstance(part, WaitMove)
    makes = letter == "F" and part.stage >= trained and not again
    makes |= letter == "recompute" or (letter.startswith("reload") and not waits)
    frees = letter in ("B", "W") or (letter == "I" and part.stage in header.frozen)
    frees |= letter.startswith("offload") and waits
    return share * makes, share * frees


@pytest.mark.parametrize("name", PROGRAMS)
def test_peaks_are_those_of_the_walk(name: str) -> None:
    assert [*activations(PROGRAMS[name])] == walked(PROGRAMS[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_text_has_the_shares(name: str) -> None:
    assert parse(Source("shares.sir", show(PROGRAMS[name]))) == PROGRAMS[name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bound_holds_exactly_from_the_peak_on(name: str) -> None:
    program = PROGRAMS[name]
    if program.header.moves:
        return  # with a bound, the lanes wait elsewhere
    lanes = [tuple(line for line in lane if isinstance(line, Compute | Pair)) for lane in program.lanes]
    peaks = walked(program)
    fullest, unit = peaks.index(max(peaks)), Fraction(1, program.header.units_of_m_a)
    for excess in (0, 1):
        limits = tuple(peak - excess * unit * (w == fullest) for w, peak in enumerate(peaks))
        header = replace(program.header, bounds=(Bound(Quantity.ACTIVATIONS, limits),))
        found = verify_schedule(Schedule(header, tuple(lanes)), None).findings.diagnostics
        assert [diagnostic.code for diagnostic in found] == ["CH413"] * excess
