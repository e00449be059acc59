"""Slices of unequal length: what they cost and keep, in which texts they stand, and the lengths with equal times."""

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

import chimera_ir
from chimera_ir import Options
from chimera_ir.commands.run_command import run_command
from chimera_ir.cost.simulate import simulate
from chimera_ir.errors import OptionError
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.ops import Compute, Micro, Stage
from chimera_ir.ir.text.printer import show
from chimera_ir.predict.memory_need import memory
from chimera_ir.predict.setting import Measured
from chimera_ir.profile.costs import NO_OVERHEAD, ModelProfile, Times, equal_times, slice_terms, slowest_stage
from chimera_ir.profile.write import write_profile
from chimera_ir.source import Source
from tests.unit.test_layers_of_a_profile import CLUSTER
from tests.unit.test_slice_costs import OVERHEAD, setting, without_slices

LENGTHS = (3, 2, 2, 1)
OPTIONS = Options(slice_lengths=LENGTHS)


def test_slices_cost_and_keep_their_share_of_the_micro_batch() -> None:
    """Worker 0 keeps five slices, as in 3, 2, 2 and 3, 2 when the last one of the first micro-batch has gone."""
    compiled = chimera_ir.compile("seq1f1b", D=2, N=3, k=4, options=OPTIONS)
    lane = compiled.timeline.lanes[0]
    forwards = [t for t in lane if t.operation.kind.letter == "F"]
    lengths = [(timed.end - timed.start) * compiled.timeline.tick for timed in forwards]
    assert lengths == [Fraction(length, 8) for length in LENGTHS * 3]
    assert compiled.report.activations == (Fraction(12, 8), Fraction(10, 8))
    costs = compiled.report.costs
    assert compiled.report.makespan == sum(costs[kind] * count for kind, count in compiled.report.counts.items())


def test_equal_lengths_change_nothing() -> None:
    equal = chimera_ir.compile("seq1f1b", D=2, N=2, k=4, options=Options(slice_lengths=[7, 7, 7, 7]))
    assert equal.files == chimera_ir.compile("seq1f1b", D=2, N=2, k=4).files


def test_the_text_of_a_program_has_the_lengths_and_compiles_to_the_same_files() -> None:
    files = chimera_ir.compile("seq1f1b_zb", D=2, N=2, k=4, options=OPTIONS).files
    text = files["schedule.sir"]
    assert "micro_batches 8 slices 4 lengths 3 2 2 1\n" in text
    again = chimera_ir.compile(Source("seq1f1b_zb.sir", text))
    assert show(again.program) == text
    assert again.files["program.json"] == files["program.json"]
    assert '"lengths": [3, 2, 2, 1]' in files["program.json"]


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("seq1f1b", {"slice_lengths": (3, 2)}, "3,2: these are 2 lengths, and a micro-batch of seq1f1b.* has 4 slices"),
        ("dapple", {"slice_lengths": (3, 2)}, "a micro-batch of dapple.* is not cut into slices"),
        ("seq1f1b", {"slice_lengths": "equal-times"}, "times are those of a profile; add profile, cluster and micro_b"),
        ("seq1f1b", {"slice_lengths": (3, 0)}, "it is a list of whole numbers from 1 on"),
        ("seq1f1b", {"slice_lengths": "fastest"}, "it is a list of whole numbers from 1 on"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(text: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        _ = chimera_ir.compile(text, options=Options(**options)).schedule  # type: ignore[arg-type]


def test_a_text_that_has_its_own_lengths_takes_no_others() -> None:
    text = show(chimera_ir.compile("seq1f1b", D=2, N=1, k=2).schedule)
    with pytest.raises(OptionError, match="give lengths to its scheme"):
        chimera_ir.compile(Source("a.sir", text), options=Options(slice_lengths=(2, 1)))


def test_a_command_without_a_profile_says_where_equal_times_are_found() -> None:
    model = str(Path(__file__).parents[1] / "e2e" / "models" / "carried.py")
    result = CliRunner().invoke(run_command, ["seq1f1b", "--model", model, "--slice-lengths", "equal-times"])
    assert result.exit_code == 2
    assert "run reads no profile; chimera compile with --emit schedule shows what to give here" in result.output


# With a profile.


@pytest.mark.parametrize(
    ("overhead", "times"), [(NO_OVERHEAD, (3.5, 3.5, 4.5, 2.5)), (OVERHEAD, (3.25, 3.5, 4.5, 2.75))]
)
def test_slices_take_the_time_of_their_extent(overhead: Times, times: tuple[float, ...]) -> None:
    """Of quarters that take 2, 3, 4 and 5: three eighths are the first and half the second; one overhead each."""
    header = chimera_ir.compile("seq1f1b", D=4, N=1, k=4, options=OPTIONS).schedule.header
    measured = Measured.of(setting(overhead))
    durations = [measured.duration(Compute(KINDS["F"], (Micro(place),), Stage(0)), header) for place in range(4)]
    assert [float(duration) for duration in durations] == pytest.approx(times)
    assert all((duration / measured.tick(header)).denominator == 1 for duration in durations)


def test_memory_in_bytes_follows_the_lengths() -> None:
    """Stage 0 keeps 12 eighths of 400 bytes, stage 1 10 eighths, of which its buffers have the inputs."""
    of_stages = replace(setting(stages=2), stages=tuple(map(without_slices, setting(stages=2).stages)))
    program = chimera_ir.compile("seq1f1b", D=2, N=2, k=4, options=OPTIONS).verified.program
    assert [need.activations for need in memory(program, of_stages)] == [400 * 12 // 8, (400 - 40) * 10 // 8]


def quadratic(start: int, end: int) -> float:
    """Attention of positions from ``start`` to ``end`` to all before them, and some work of every position."""
    return float(end * end - start * start + 3 * (end - start) + 5)


@pytest.mark.parametrize(("slices", "length"), [(1, 7), (2, 9), (3, 12), (4, 16), (5, 13), (4, 4)])
def test_the_slowest_slice_is_as_fast_as_that_of_the_best_lengths_of_all(slices: int, length: int) -> None:
    """The oracle is brute force over all lengths; a slice has an item at least."""

    def slowest(ends: tuple[int, ...]) -> float:
        return max(quadratic(start, end) for start, end in pairwise((0, *ends, length)))

    lengths = equal_times(slices, length, quadratic)
    assert len(lengths) == slices
    assert min(lengths) >= 1
    assert sum(lengths) == length
    assert slowest(tuple(accumulate(lengths[:-1]))) == min(map(slowest, combinations(range(1, length), slices - 1)))


def test_the_time_of_a_slice_is_that_of_durations_on_the_slowest_stage() -> None:
    timing = setting(OVERHEAD).stages[0].at[1]
    slower = timing.with_times(lambda _, seconds: 3 * seconds)
    slower = replace(slower, slices=tuple(part.with_times(lambda _, seconds: 3 * seconds) for part in timing.slices))
    time = slowest_stage([(timing, OVERHEAD), (slower, OVERHEAD)], 10)
    for start, end in combinations(range(11), 2):
        extent = Fraction(start, 10), Fraction(end, 10)
        terms = [term for kind in "FB" for term in slice_terms(slower, OVERHEAD, kind, extent)]
        assert time(start, end) == pytest.approx(sum(seconds * float(share) for seconds, share in terms))


def test_slices_of_equal_times_take_as_long_as_equal_slices_of_the_same_sum() -> None:
    """(P, N, k) = (4, 8, 4), slices of 2, 3, 4 and 5: 367.5 in place of 507. The curve is at 3.5 after 15 of 40."""
    lengths = equal_times(4, 40, slowest_stage([(setting().stages[0].at[1], NO_OVERHEAD)], 40))
    assert lengths == (15, 10, 8, 7)
    compiled = chimera_ir.compile("seq1f1b", D=4, N=8, k=4, options=Options(slice_lengths=lengths))
    assert simulate(compiled.schedule, Measured.of(setting())).makespan == Fraction("367.5")


def test_equal_times_come_from_the_profile(tmp_path: Path) -> None:
    """Quarters of 2, 3, 4 and 5: cut at half of 14, after 2 + 3 + half of 4, the two slices take 7 each."""
    first, last = setting(stages=2).stages
    timing = replace(last.at[1], output=0, gradient=0)
    slices = tuple(replace(part, output=0, gradient=0) for part in timing.slices)
    last = replace(last, at={1: replace(timing, slices=slices)})
    (tmp_path / "p.toml").write_text(write_profile(ModelProfile("m", {2: (first, last)}, length=80)))
    (tmp_path / "c.toml").write_text(CLUSTER)
    options = Options(
        slice_lengths="equal-times", profile=tmp_path / "p.toml", cluster=tmp_path / "c.toml", micro_batch_size=1
    )
    assert chimera_ir.compile("seq1f1b", D=2, N=2, k=2, options=options).schedule.header.lengths == (50, 30)
