"""What the planner knows of a worker's memory without messages, against the program that is compiled in the end."""

from itertools import product

import pytest

from chimera_ir import library
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.plan.bounds import least, most, standing
from chimera_ir.plan.compiled import Compiled
from chimera_ir.predict.memory import memory
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import StageCosts, Timing
from chimera_ir.source import Source
from chimera_ir.syntax.change import Change
from chimera_ir.syntax.parser import parse

ALONE = Cluster("any", 10**6, 1, 10**12, 0, FREE, FREE, FREE)


SIZES = [
    *((10**6, 1, 1, 101), (10**3, 99, 99, 100), (1, 10**6 + 1, 10**6, 3 * 10**6)),
    *((1, 10**6 + 1, 0, 10**6), (1, 0, 10**6 + 1, 0)),
]
"""Bytes of a stage's weights, of the activations and of the gradients it hands on, and of what it keeps."""


def uneven(stages: int, weights: int, output: int, gradient: int, activations: int) -> tuple[StageCosts, ...]:
    """Stages of which no two are alike; the last sends nothing."""
    return tuple(
        StageCosts(
            weights + 3 * stage,
            weights + stage,
            2 * weights,
            {
                1: Timing(
                    *(1.0, 2.0, 3.0),
                    activations=activations + 11 * stage,
                    input=output + 7 * stage,
                    output=output + 7 * (stage + 1) if stage < stages - 1 else 0,
                    gradient=gradient + 5 * (stage + 1) if stage < stages - 1 else 0,
                )
            },
        )
        for stage in range(stages)
    )


WAVES = """\
scheme waves(D = 4, N = 8)
workers D
update every N
let turn = 2*N + 2*D
pipe down {
  stages s in 0..D on s
  micros m in 0..
  reads version max(0, m/N - 1)
  F(m, s) @ turn * (m/N) + m % N + s
  B(m, s) @ turn * (m/N) + N + D + m % N + (D-1 - s)
}
"""
"""GPipe's order without a flush: in a stream, too, many messages can be under way."""

TEXTS = {**{name: library.source(name) for name in library.names()}, "waves": Source("waves.chim", WAVES)}


def compiled(name: str, change: Change, **settings: int) -> Compiled:
    return Compiled(parse(TEXTS[name]), tuple(settings.items()), change, 10**6, trusted=True)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_worker_needs_lies_between_the_bounds(name: str, recompute: bool) -> None:
    change, seen = Change(recompute), 0
    names = {parameter.name.text for parameter in parse(TEXTS[name]).parameters}
    values = {"D": (2, 4, 8, 12), "N": (1, 2, 4, 8, 24), "f": (1, 2)}
    known = [[(key, value) for value in given] for key, given in values.items() if key in names]
    for settings in map(dict, product(*known)):
        one = compiled(name, change, **settings)
        try:
            program = one.lowered(change)
        except Rejected:
            continue
        for sizes in SIZES:
            setting = Setting(uneven(settings["D"], *sizes), ALONE, 1, 1)
            needed = [each.total for each in memory(program, setting)]
            sketched, held = one.sketch(change)
            assert [each.total for each in memory(sketched, setting, held)] == needed, f"{settings} {sizes}"
            at_least, at_most = least(one, change, setting), most(one, change, setting)
            assert at_most is not None
            told = f"{settings} {sizes}: {at_least} {needed} {at_most}"
            assert all(map(int.__le__, at_least, needed)), told
            assert all(map(int.__le__, needed, at_most)), told
            assert all(map(int.__le__, standing(program.header, setting), at_least)), told
            seen += 1
    assert seen >= 20


@pytest.mark.parametrize(
    ("name", "settings", "copies"),
    [
        ("pipedream", {"D": 6}, [6, 5, 4, 3, 2, 1]),
        ("pipedream_2bw", {"D": 4, "N": 6}, [2, 2, 2, 2]),
        ("waves", {"D": 3, "N": 4}, [2, 2, 2]),
        ("dapple", {"D": 2, "N": 4}, [1, 1]),
    ],
)
def test_copies_of_weights_are_those_of_the_papers(name: str, settings: dict[str, int], copies: list[int]) -> None:
    """PipeDream: D - s versions on stage s; 2BW: two."""
    assert compiled(name, Change(), **settings).copies == tuple({s: count} for s, count in enumerate(copies))
