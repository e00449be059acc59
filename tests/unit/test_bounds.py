"""What the planner knows of a worker's memory without messages, against the program that is compiled in the end."""

from collections import Counter
from functools import cache, lru_cache
from itertools import product
from random import Random

import pytest

from chimera_ir import library
from chimera_ir.ir.levels import Header
from chimera_ir.planner.compiled import Variant
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.costs import StageCosts
from chimera_ir.source import Source
from chimera_ir.syntax.formatter import Change
from chimera_ir.syntax.parser import parse
from chimera_ir.verify.holdings import holdings
from tests.repeatable import either
from tests.sizes import all_sizes
from tests.timings import stage_timing
from tests.unit.bounded import ALONE, assert_bounded

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
                1: stage_timing(
                    *(1.0, 2.0, 3.0),
                    activations=activations + 11 * stage,
                    input=output + 7 * stage,
                    output=output + 7 * (stage + 1) if stage < stages - 1 else 0,
                    gradient=gradient + 5 * (stage + 1) if stage < stages - 1 else 0,
                    halves=(1.0, 1.0),
                    released=(activations + 11 * stage) // (1 + stage % 3),
                    operands=(gradient + 5 * (stage + 1) if stage < stages - 1 else 0) + 13 * (stage % 2),
                )
            },
        )
        for stage in range(stages)
    )


FLOODS = """\
scheme floods(D = 4, N = 8)
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

TEXTS = {**{name: library.source(name) for name in library.names()}, "floods": Source("floods.chim", FLOODS)}


@cache
def cases(name: str) -> list[tuple[tuple[dict[str, int], Header], tuple[int, ...]]]:
    """15 settings and sizes of a scheme, the same in every run; in a search all."""
    all_cases = [*product(all_sizes(TEXTS[name], (2, 4, 6), (1, 4, 12), 2000), SIZES)]
    return [all_cases[case] for case in sorted(Random(name).sample(range(len(all_cases)), either(15, len(all_cases))))]


@lru_cache(1)
def compiled(name: str, change: Change, **settings: int) -> Variant:
    return Variant(parse(TEXTS[name]), tuple(settings.items()), change, 10**6, trusted=True)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_worker_needs_is_no_less_than_the_bounds(name: str, recompute: bool) -> None:
    change = Change(recompute)
    for (settings, header), sizes in cases(name):
        assert_bounded(compiled(name, change, **settings), uneven(header.stages, *sizes))


@pytest.mark.parametrize(
    ("name", "settings", "copies"),
    [
        ("pipedream", {"D": 6}, [6, 5, 4, 3, 2, 1]),
        ("pipedream_2bw", {"D": 4, "N": 6}, [2, 2, 2, 2]),
        ("floods", {"D": 3, "N": 4}, [2, 2, 2]),
        ("dapple", {"D": 2, "N": 4}, [1, 1]),
    ],
)
def test_copies_of_weights_are_those_of_the_papers(name: str, settings: dict[str, int], copies: list[int]) -> None:
    """PipeDream: D - s versions on stage s; 2BW: two."""
    assert compiled(name, Change(), **settings).copies == tuple({s: count} for s, count in enumerate(copies))


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw", "amdp"])
def test_every_variant_of_a_stream_has_the_messages_of_its_program(name: str) -> None:
    setting = Setting(uneven(4, 100, 10, 10, 30), ALONE, 1, 1)
    for change in (Change(), Change(recompute=True)):
        one = Variant(parse(library.source(name)), (("D", 4),), change, 10**5, trusted=True)
        for held, of_view in zip(one.holdings(setting), holdings(one.lowered(setting)), strict=True):
            assert held.sending
            assert Counter(held.sending) == Counter(of_view.sending)
            assert Counter(held.receiving) == Counter(of_view.receiving)
            assert held.fullest == of_view.fullest
