from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chimera_ir
from chimera_ir import library
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.report import activations, stages_held
from chimera_ir.cost.simulate import Timeline, simulate
from chimera_ir.ir.kinds import BACKWARD, FORWARD, RECOMPUTATION
from chimera_ir.ir.levels import Header, Pipe, Schedule
from chimera_ir.ir.ops import Compute, Micro, Stage, Worker
from chimera_ir.options import Options
from chimera_ir.source import Source
from tests.repeatable import examples
from tests.unit.clocked import all_then_all, one_direction, two_directions


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", Fraction(2)),
        ("0.1", Fraction(1, 10)),
        (".5", Fraction(1, 2)),
        ("1/3", Fraction(1, 3)),
        ("007", Fraction(7)),
    ],
)
def test_a_cost_is_read_exactly(text: str, value: Fraction) -> None:
    assert Costs.parse("F", text) == value


@pytest.mark.parametrize(
    "text",
    ["", "abc", "-1", "+1", "1e9", "nan", "inf", "1/0", "1/000", "1_0", "1.", " 1", "0x1", "٣", "1/2/3", "9" * 400],
)
def test_what_is_no_cost_is_refused_in_the_users_words(text: str) -> None:
    with pytest.raises(ValueError, match="the cost of B is an integer, a decimal or a fraction"):
        Costs.parse("B", text)


@pytest.mark.parametrize("text", ["0", "0.0", "0/5"])
def test_a_cost_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        Costs.parse("F", text)


def test_slices_cost_what_a_list_says() -> None:
    """Each of four slices looks back further than the one before it; equal ones of the same sum take 367.5."""
    sizes = {"D": 4, "N": 8, "k": 4}
    unequal = chimera_ir.compile("seq1f1b", options=Options(costs={"F": [2, 3, 4, 5], "B": "4,6,8,10"}), **sizes)
    equal = chimera_ir.compile("seq1f1b", options=Options(costs={"F": 14, "B": 28}), **sizes)
    assert (unequal.report.makespan, equal.report.makespan) == (507, Fraction(735, 2))
    counts, costs = unequal.report.counts, unequal.report.costs
    assert sum(counts[kind] * costs[kind] for kind in counts) == 507
    assert "F = 14 (2, 3, 4, 5), B = 28 (4, 6, 8, 10)" in unequal.report.durations.summary(unequal.report.header, "FB")


HEAVY_END = {"F": "4,4,4,6", "B": "8,8,8,12", "I": [4, 4, 4, 6], "W": [4, 4, 4, 6]}


def test_stages_cost_what_a_list_says() -> None:
    """1F1B: the way to the last stage, the slowest, then its work, and the way back."""
    report = chimera_ir.compile("dapple", options=Options(stage_costs={**HEAVY_END}), D=4, N=8).report
    assert report.makespan == 3 * 4 + 8 * (6 + 12) + 3 * 8
    assert sum(count * report.costs[kind] for kind, count in report.counts.items()) == report.makespan
    assert report.durations.summary(report.header, "FB") == "F = [4, 4, 4, 6], B = [8, 8, 8, 12]"


def test_a_pair_takes_as_long_as_its_two_stages_say() -> None:
    """DualPipe runs pairs of two stages: all work of a worker and its bubbles are at least the makespan."""
    timeline = chimera_ir.compile("dualpipe", options=Options(stage_costs={**HEAVY_END}), D=4, N=8).timeline
    lengths = {(timed.end - timed.start) * timeline.tick for lane in timeline.lanes for timed in lane}
    assert lengths >= {4 + 8, 4 + 12, 6 + 8}


def test_a_baseline_in_other_stages_has_the_costs_of_the_same_model() -> None:
    """A single micro-batch takes all the work of the model, however many stages there are."""
    stages = {"F": [3, 1, 4, 1, 5, 9, 2, 6], "I": [5, 3, 5, 8, 9, 7, 9, 3], "W": [2, 3, 8, 4, 6, 2, 6, 4]}
    whole = sum(map(sum, stages.values()))
    assert chimera_ir.compile("zb_v", options=Options(stage_costs=stages), P=4, N=1).report.baseline.makespan == whole
    halved = Options(stage_costs={**HEAVY_END}, against="interleaved")
    assert chimera_ir.compile("dapple", options=halved, D=4, N=1).report.baseline.makespan == 18 + 36


def test_costs_of_other_stages_are_refused() -> None:
    compilation = chimera_ir.compile("dapple", options=Options(stage_costs={"F": [2, 3]}), D=4)
    with pytest.raises(
        chimera_ir.CompileError, match=r"stage_costs F: it has costs for 2 stages, and dapple\(D=4, N=8\)"
    ):
        _ = compilation.report
    with pytest.raises(chimera_ir.CompileError, match=r"a pair is on two stages: give the costs of F and B"):
        Options(stage_costs={"pair": [2, 3]})


@pytest.mark.parametrize("scheme", ["seq1f1b", "dapple"])
def test_costs_of_other_slices_are_refused(scheme: str) -> None:
    compilation = chimera_ir.compile(scheme, options=Options(costs={"F": [2, 3]}))
    with pytest.raises(chimera_ir.CompileError, match=r"costs F: it has costs for 2 slices, and a micro-batch of"):
        _ = compilation.report


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="the kinds are F, B, I, W, recompute, offload, reload, offload_operands, reload_operands and pair",
    ):
        Costs.parse("G", "1")


def test_a_cost_is_set_without_touching_the_others() -> None:
    assert Costs().using("B", "2.5") == Costs(
        F=Fraction(1), B=Fraction(5, 2), I=Fraction(1), W=Fraction(1), recompute=Fraction(0), user_set=("B",)
    )


def test_an_operation_over_k_micro_batches_takes_k_times_as_long() -> None:
    costs = Costs(B=Fraction(5, 3))
    three = (Micro(0), Micro(1), Micro(2))
    header = Header("x", (), 1, 1, 3, (Pipe("p", (Worker(0),), three),))
    assert costs.duration(Compute(FORWARD, three, Stage(0)), header) == 3
    assert costs.duration(Compute(BACKWARD, three, Stage(0)), header) == 5


def test_an_operation_over_a_half_takes_half_as_long() -> None:
    micros = (Micro(0), Micro(1))
    header = Header("x", (), 1, 1, 2, (Pipe("p", (Worker(0),), micros),), halves=True)
    assert Costs().duration(Compute(FORWARD, micros, Stage(0)), header) == 1
    assert Costs().duration(Compute(BACKWARD, micros[:1], Stage(0)), header) == 1


def test_a_recomputation_takes_1_unless_the_user_sets_b_which_includes_it() -> None:
    header = Header("x", (), 1, 1, 1, (Pipe("p", (Worker(0),), (Micro(0),), (Stage(0),)),))
    recomputation, backward = (Compute(kind, (Micro(0),), Stage(0)) for kind in (RECOMPUTATION, BACKWARD))
    lengths = [
        [costs.duration(operation, header) for operation in (recomputation, backward)]
        for costs in (Costs(), Costs().using("B", "3"), Costs().using("recompute", "2").using("B", "3"))
    ]
    assert lengths == [[1, 2], [0, 3], [2, 3]]


@pytest.mark.parametrize("name", ["zb_h1", "dualpipe_v", "dapple"])
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"B": 2, "I": 1, "W": 1, "recompute": 1, "pair": 3}),
        ({"B": 3}, {"B": 3, "I": 1, "W": 1, "recompute": 0, "pair": 4}),
        ({"I": 3}, {"B": 2, "I": 3, "W": 1, "recompute": 0, "pair": 3}),
        ({"pair": 4}, {"B": 2, "I": 1, "W": 1, "recompute": 0, "pair": 4}),
        ({"recompute": 2}, {"B": 2, "I": 1, "W": 1, "recompute": 2, "pair": 3}),
    ],
)
def test_the_costs_of_a_report_that_recomputes_are_those_of_its_makespan(
    name: str, own: dict[str, int], expected: dict[str, int]
) -> None:
    """B, I and pair, if the user sets them, include the recomputation."""
    report = chimera_ir.compile(name, options=chimera_ir.Options(recompute=True, costs=own)).report
    costs, counts = report.as_json()["costs"], report.counts
    assert all(costs[kind] == expected.get(kind, 1) for kind in counts)
    assert report.makespan == sum(costs[kind] * count for kind, count in counts.items())
    assert all(f"--cost {kind}=" in "".join(report.remarks) for kind in own if kind not in counts)


def test_where_some_stages_recompute_a_report_has_the_cost_of_that() -> None:
    text = library.source("zb_h1").text.replace("stages s in 0..D on s", "stages s in 0..D on s  recompute when s == 0")
    report = chimera_ir.compile(Source("some.chim", text)).report
    assert report.as_json()["costs"] == {"F": 1, "B": 2, "I": 1, "W": 1, "recompute": 1}


def test_two_workers_and_one_micro_batch_run_one_after_the_other() -> None:
    timeline = simulate(one_direction(2, 1), Costs())
    assert [[(t.start, t.end) for t in lane] for lane in timeline.lanes] == [[(0, 1), (4, 6)], [(1, 2), (2, 4)]]
    assert timeline.makespan == 6
    assert timeline.bubble_ratio == Fraction(1, 2)


def test_times_are_exact_with_fractions() -> None:
    timeline = simulate(one_direction(3, 4), Costs(F=Fraction(1, 3), B=Fraction(1, 7)))
    assert timeline.makespan == (Fraction(1, 3) + Fraction(1, 7)) * (4 + 3 - 1)


def test_of_several_critical_paths_the_one_with_most_backwards_is_taken() -> None:
    """With F = B the two paths of the unit differ: D and 2D-2 against more forwards and fewer backwards."""
    path = simulate(two_directions(8), Costs(B=Fraction(1))).critical_path
    assert (path.counts["F"], path.counts["B"]) == (8, 14)


def test_a_schedule_that_closes_a_cycle_has_no_timeline() -> None:
    header = Header("x", (), 1, 1, 1, (Pipe("p", (Worker(0),), (Micro(0),)),))
    lane = (Compute(BACKWARD, (Micro(0),), Stage(0)), Compute(FORWARD, (Micro(0),), Stage(0)))
    with pytest.raises(ValueError, match="only a verified schedule"):
        simulate(Schedule(header, (lane,)), Costs())


def test_activations_peak_where_most_micro_batches_are_under_way() -> None:
    assert activations(one_direction(4, 8)) == (4, 3, 2, 1)
    assert activations(all_then_all(4, 8)) == (8, 8, 8, 8)
    assert activations(two_directions(4)) == (3, 4, 4, 3)


def test_a_stage_placed_twice_on_a_worker_keeps_its_weights_once() -> None:
    pipes = tuple(Pipe(name, (Worker(0), Worker(1)), ()) for name in ("a", "b"))
    assert stages_held(Header("x", (), 2, 2, 0, pipes)) == (1, 1)


# Independent oracles. They share no code with the package: dependencies by comparing every two operations.

Place = tuple[int, int]


def reads(reader: Compute, writer: Compute, last: int) -> bool:
    if not set(reader.micros) & set(writer.micros):
        return False
    s, t = reader.stage, writer.stage
    match reader.kind.letter, writer.kind.letter:
        case "F", "F":
            return t == s - 1
        case "B", "F":
            return t == s
        case "B", "B":
            return s < last and t == s + 1
    return False


def places(schedule: Schedule) -> dict[Place, Compute]:
    return {(w, i): operation for w, lane in enumerate(schedule.lanes) for i, operation in enumerate(lane)}


def edges(schedule: Schedule) -> dict[Place, list[Place]]:
    at, last = places(schedule), schedule.header.stages - 1
    return {
        after: [
            before
            for before, writer in at.items()
            if reads(reader, writer, last) or (before[0] == after[0] and before[1] == after[1] - 1)
        ]
        for after, reader in at.items()
    }


def relaxed(schedule: Schedule, costs: Costs) -> dict[Place, Fraction]:
    """Start times by relaxation to a fixpoint."""
    at, before = places(schedule), edges(schedule)
    starts = dict.fromkeys(at, Fraction(0))
    changed = True
    while changed:
        changed = False
        for after in at:
            start = max(
                (starts[b] + costs.duration(at[b], schedule.header) for b in before[after]), default=Fraction(0)
            )
            changed |= start != starts[after]
            starts[after] = start
    return starts


def paths(before: dict[Place, list[Place]], end: Place) -> Iterator[list[Place]]:
    if not before[end]:
        yield [end]
    for earlier in before[end]:
        yield from ([*path, end] for path in paths(before, earlier))


def counts(path: list[Compute]) -> tuple[int, int]:
    return (
        sum(len(operation.micros) for operation in path if operation.kind is FORWARD),
        sum(len(operation.micros) for operation in path if operation.kind is BACKWARD),
    )


@st.composite
def schedules(draw: st.DrawFn, micros: int, stages: int) -> Schedule:
    """Any places, any order that closes no cycle, some operations over two micro-batches."""
    workers, depth = draw(st.integers(1, 4)), draw(st.integers(1, stages))
    pipes: list[Pipe] = []
    operations: list[Compute] = []
    at: list[Worker] = []
    first = 0
    for name in draw(st.sampled_from([("p",), ("p", "q"), ("p", "q", "r")])):
        count = draw(st.integers(0 if pipes else 1, micros))
        numbers = tuple(Micro(first + m) for m in range(count))
        first += count
        place = tuple(Worker(draw(st.integers(0, workers - 1))) for _ in range(depth))
        pipes.append(Pipe(name, place, numbers))
        for s in range(depth):
            for kind in (FORWARD, BACKWARD):
                size = draw(st.sampled_from([1, 1, 2]))
                operations += [Compute(kind, numbers[m : m + size], Stage(s)) for m in range(0, count, size)]
                at += [place[s]] * -(-count // size)
    lanes: list[list[Compute]] = [[] for _ in range(workers)]
    left = list(range(len(operations)))
    while left:
        free = [i for i in left if not any(reads(operations[i], operations[j], depth - 1) for j in left)]
        chosen = draw(st.sampled_from(free))
        left.remove(chosen)
        lanes[at[chosen]].append(operations[chosen])
    return Schedule(Header("random", (), workers, depth, first, tuple(pipes)), tuple(map(tuple, lanes)))


amounts = st.fractions(min_value=Fraction(1, 7), max_value=4, max_denominator=7)
prices = st.builds(Costs, F=amounts, B=amounts)


def starts(timeline: Timeline) -> dict[Place, Fraction]:
    return {(w, i): t.start * timeline.tick for w, lane in enumerate(timeline.lanes) for i, t in enumerate(lane)}


@examples(150)
@given(schedules(micros=3, stages=4), prices)
def test_the_timeline_is_the_one_found_by_relaxation(schedule: Schedule, costs: Costs) -> None:
    timeline = simulate(schedule, costs)
    assert starts(timeline) == relaxed(schedule, costs)
    assert all(
        (t.end - t.start) * timeline.tick == costs.duration(t.operation, schedule.header)
        for lane in timeline.lanes
        for t in lane
    )


@pytest.mark.full
@examples(150)
@given(schedules(micros=2, stages=2), prices | st.just(Costs()) | st.just(Costs(B=Fraction(1))))
def test_the_critical_path_is_the_longest_of_all_with_the_most_backwards(schedule: Schedule, costs: Costs) -> None:
    at, before = places(schedule), edges(schedule)
    every = [[at[place] for place in path] for end in at for path in paths(before, end)]
    lengths = [sum(costs.duration(operation, schedule.header) for operation in path) for path in every]
    longest = max(lengths)
    best = max(counts(path)[1] for path, length in zip(every, lengths, strict=True) if length == longest)
    timeline = simulate(schedule, costs)
    found = timeline.critical_path
    assert timeline.makespan == longest == costs["F"] * found.counts["F"] + costs["B"] * found.counts["B"]
    assert found.counts["B"] == best
    assert counts(list(found.operations)) == (found.counts["F"], found.counts["B"])
    assert list(found.operations) in every


def test_costs_of_slices_beside_a_default_cost_are_remarked() -> None:
    """A list has a cost for each slice, a default is that of the whole micro-batch: 1/2 for each of 4 slices here."""

    def remarks(scheme: str, **costs: str) -> tuple[str, ...]:
        return chimera_ir.compile(scheme, options=Options(costs=costs), D=2, N=2).report.remarks

    together = "by default, for the 4 slices of a micro-batch together: give"
    assert remarks("seq1f1b", F="1,2,3,4") == (f"B = 2 {together} B the costs of slices as well",)
    halves = f"I = 1 and W = 1 {together} I and W the costs of slices as well"
    assert remarks("seq1f1b_zb", F="1,2,3,4") == (halves,)
    assert remarks("seq1f1b", F="1,2,3,4", B="2,4,6,8") == remarks("seq1f1b", F="10") == ()
