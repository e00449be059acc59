"""What the accuracy benchmark takes for a stage's cost, of what several ranks measured."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import chimera_ir
from chimera_ir.ir.levels import Program
from chimera_ir.profile.costs import StageCosts
from tests.timings import stage_timing

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)  # type: ignore[no-untyped-call]
    return importlib.import_module("accuracy")


def program(scheme: str) -> Program:
    """A library scheme on two workers."""
    return chimera_ir.compile(scheme, D=2, N=2).verified.program


def stage(forward: float) -> StageCosts:
    timing = stage_timing(forward, 2 * forward, 3 * forward, 0, 0, 0, 0)
    return StageCosts(0, 0, 0, {4: timing})


RANKS = ((stage(1.0), stage(4.0)), (stage(2.0), stage(3.0)))
"""Rank 0 is the faster one on stage 0, rank 1 on stage 1."""


def test_a_stage_costs_what_the_rank_that_holds_it_measured(accuracy: Any) -> None:
    assert accuracy.held(program("dapple"), RANKS) == (stage(1.0), stage(3.0))


def test_of_several_that_hold_it_the_slowest_counts(accuracy: Any) -> None:
    assert accuracy.held(program("chimera"), RANKS) == (stage(2.0), stage(4.0))


def test_of_many_profiles_the_medians_are_taken(accuracy: Any) -> None:
    several = [(replace(stage(forward), step=forward),) for forward in (5.0, 1.0, 2.0)]
    (found,) = accuracy.middle(several)
    assert (found.at[4].times["F"], found.at[4].times["recomputing"]) == (2.0, 6.0)
    assert found.step == 2.0
