"""The search for the best order: published optima, a plain model of the same problem, the command."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any

import pytest

import chimera_ir
from chimera_ir.answer import Level, produce
from chimera_ir.compilation import Compilation
from chimera_ir.errors import CompileError, OptionError
from chimera_ir.ir.levels import Quantity
from chimera_ir.orders import cp_sat
from chimera_ir.orders.dispatch import TimedOrder
from chimera_ir.orders.instance import OrderInstance, constraints_of, instance_of
from chimera_ir.orders.lower_bound import lower_bound
from chimera_ir.orders.search import Ended, Found, NoOrder, SearchBudget, search, with_limits
from chimera_ir.orders.timetable import first_micro_batches, repeated
from chimera_ir.page.contents import document
from chimera_ir.source import Source
from chimera_ir.verify.holdings import memory
from tests.unit.command import Run
from tests.unit.plain_orders import costs, instance, plain_optimum, shortest_of_all, with_random_durations

pytestmark = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is not installed: the extra search")

UNBOUNDED = SearchBudget(seconds=600, work=1)
"""Work of a second or two, which the clock does not end."""


def best(problem: OrderInstance, budget: SearchBudget = UNBOUNDED) -> Found:
    return search(problem, {"own": problem.lanes}, budget)


SPLIT = {"F": 2, "I": 3, "W": 2}


@pytest.mark.parametrize(
    ("scheme", "kinds", "limit", "parameters", "optimum"),
    [
        ("waves", {"F": 1, "B": 2}, 0, {"P": 2, "N": 2}, 16),
        ("waves", {"F": 1, "B": 2}, 0, {"P": 4, "N": 4}, 36),
        ("waves", {"F": 1, "B": 2}, 0, {"P": 4, "N": 8}, 57),
        ("waves", {"F": 1, "B": 2}, 0, {"P": 8, "N": 8}, 76),
        ("zb_h1", {"F": 1, "I": 1, "W": 1}, 4, {"D": 4, "N": 8}, 27),
        ("zb_h1", {"F": 2, "I": 2, "W": 1}, 4, {"D": 4, "N": 8}, 49),
        ("zb_h1", SPLIT, 4, {"D": 4, "N": 8}, 65),
        ("zb_h1", {"F": 1, "I": 3, "W": 2}, 4, {"D": 4, "N": 8}, 57),
        ("zb_h1", SPLIT, 1, {"D": 4, "N": 8}, 176),
        ("zb_h1", SPLIT, 2, {"D": 4, "N": 8}, 99),
        ("zb_h1", SPLIT, 3, {"D": 4, "N": 8}, 75),
        ("zb_v", {"F": 1, "I": 1, "W": 1}, 8, {"P": 4, "N": 8}, 51),
        ("chimera", {"F": 1, "B": 2}, 2, {"D": 2, "N": 4}, 12),
    ],
)
def test_known_optima_are_reached_and_proven(
    scheme: str, kinds: Mapping[str, int], limit: int, parameters: Mapping[str, int], optimum: int
) -> None:
    problem = instance(scheme, costs(**kinds), limit, **parameters)
    found = best(problem)
    assert (found.makespan, found.bound, found.ended) == (optimum, optimum, Ended.PROVEN)
    assert problem.fits_stores(found.lanes)


@pytest.mark.parametrize(
    ("scheme", "limit", "parameters"),
    [
        ("zb_h1", 2, {"D": 2, "N": 3}),
        ("v_half", 3, {"P": 2, "N": 2}),
        ("zb_v", 2, {"P": 2, "N": 2}),
        ("chimera", 2, {"D": 2, "N": 4}),
        ("seq1f1b", 1, {"D": 2, "N": 1, "k": 2}),
        ("dualpipe", 3, {"D": 2, "N": 4}),
    ],
)
def test_the_optimum_is_that_of_a_plain_model(scheme: str, limit: int, parameters: Mapping[str, int]) -> None:
    random, problem = Random(f"{scheme} {limit}"), instance(scheme, costs(F=1, B=2), limit, **parameters)
    for _ in range(3):
        varied = with_random_durations(problem, random, most=5)
        found = best(varied)
        assert found.proven
        assert found.makespan / varied.tick == plain_optimum(varied)


def scheme(lines: str, micro_batches: int, stages: str = "stages s in 0..2 on s", more: str = "") -> Source:
    text = f"scheme mine(N = {micro_batches})\nworkers 2\npipe p {{\n{stages}\nmicros m in 0..N\n{lines}\n}}\n"
    return Source("mine.chim", text.replace("micros m in 0..N", f"micros m in 0..N {more}"))


ON_SEVERAL = {
    "forwards on two": ("F(m..m+2, s) when m % 2 == 0\nB(m, s)", 4),
    "forwards on three": ("F(m..m+3, s) when m % 3 == 0\nB(m, s)", 3),
    "backwards on two": ("F(m, s)\nB(m..m+2, s) when m % 2 == 0", 4),
    "both on two": ("F(m..m+2, s) when m % 2 == 0\nB(m..m+2, s) when m % 2 == 0", 6),
    "only the first two": ("F(m..m+2, s) when m == 0\nF(m, s) when m > 1\nB(m, s)", 4),
    "split": ("F(m..m+2, s) when m % 2 == 0\nI(m, s)\nW(m..m+2, s) when m % 2 == 0", 4),
}


@pytest.mark.parametrize("case", ON_SEVERAL)
def test_operations_on_several_micro_batches_keep_what_the_rule_counts(case: str) -> None:
    random, (lines, micro_batches) = Random(case), ON_SEVERAL[case]
    for limit in (1, 2, 3):
        compare_with_all_orders(instance(scheme(lines, micro_batches), costs(), limit), random)


@pytest.mark.parametrize(("lengths", "limit"), [((3, 1), 1), ((1, 2), 1), ((2, 5), 1), ((3, 1), 2), ((1, 1), 1)])
def test_slices_of_unequal_length_keep_what_the_rule_counts(lengths: tuple[int, int], limit: int) -> None:
    options, random = chimera_ir.Options(slice_lengths=lengths), Random(f"{lengths}")
    for lines in ("slices q in 0..2\nF(m, s, q)\nB(m, s, q)", "slices q in 0..2\nF(m, s, q)\nI(m, s, q)\nW(m, s, q)"):
        made = chimera_ir.compile(scheme(lines, 2 if "B" in lines else 1), options=options).schedule
        bounded = replace(made, header=with_limits(made.header, {Quantity.ACTIVATIONS: limit}))
        compare_with_all_orders(instance_of(bounded, costs().durations(bounded.header)), random)


@pytest.mark.parametrize(("keep", "limit"), [("1/4 1 2", 3), ("2/3 3/2 1/2", 2), ("1/2 5/3 1", 2)])
def test_stages_of_unequal_size_keep_what_the_rule_counts(keep: str, limit: int) -> None:
    options, random = chimera_ir.Options(keep=dict(enumerate(keep.split()))), Random(keep)
    source = scheme("F(m, s)\nB(m, s)", 2, "stages s in 0..3 on s % 2")
    made = chimera_ir.compile(source, options=options).schedule
    bounded = replace(made, header=with_limits(made.header, {Quantity.ACTIVATIONS: limit}))
    compare_with_all_orders(instance_of(bounded, costs().durations(bounded.header)), random)


@pytest.mark.parametrize("name", ["chimera_halving", "chimera_doubling"])
@pytest.mark.parametrize("limit", [1, 2])
def test_halves_keep_what_the_rule_counts(name: str, limit: int) -> None:
    compare_with_all_orders(instance(name, costs(), limit, D=2, N=2), Random(name))


def compare_with_all_orders(problem: OrderInstance, random: Random) -> None:
    """Searches with a few random durations: trying all orders shows the same makespan, or that there is no order."""
    for _ in range(3):
        lengths = defaultdict[object, int](lambda: random.randint(1, 4))
        durations = [lengths[operation.parts[0].kind, operation.parts[0].stage] for operation in problem.operations]
        varied = replace(problem, durations=durations)
        optimum = shortest_of_all(varied)
        if optimum is None:
            with pytest.raises(NoOrder) as error:
                best(varied)
            assert error.value.impossible
            continue
        found = best(varied)
        assert not [*memory(varied.schedule(found.lanes))]
        assert (found.makespan / varied.tick, found.proven) == (optimum, True)


def test_micro_batches_of_one_weight_are_taken_in_turn() -> None:
    problem = instance("dapple", costs(F=1, B=2), 4, D=4, N=8)
    weights = [2, 1, 3, 1, 2, 1, 3, 3]
    by_micro = [weights[operation.parts[0].micros[0]] for operation in problem.operations]
    weighed = replace(problem, durations=[d * weight for d, weight in zip(problem.durations, by_micro, strict=True)])
    classes = constraints_of(weighed).classes
    assert sorted(map(len, classes)) == sorted([2, 3, 3] * 4 * 2)
    assert all(len({by_micro[number] for number in numbers}) == 1 for numbers in classes)


def test_a_bound_is_never_above_an_order_and_waits_hold_in_every_order_in_turn() -> None:
    for name, limit in (("zb_h2", 8), ("v_half", 8), ("waves", 9), ("chimera", 4)):
        problem = instance(name, costs(F=2, I=3, W=1), limit)
        constraints = constraints_of(problem)
        assert problem.fits_stores(problem.lanes), "an order to try"
        own = problem.starts(problem.lanes)
        starts = constraints.in_turn(own)
        assert lower_bound(constraints) <= problem.makespan(own) == problem.makespan(starts)
        for number, waits in enumerate(constraints.waits):
            for other, lag in waits:
                assert starts[number] >= starts[other] + problem.durations[other] + lag


def test_the_same_search_finds_the_same_and_never_less_than_it_began_with() -> None:
    problem = instance("zb_v", costs(F=3, I=4, W=2), 5, P=4, N=8)
    budget = SearchBudget(seconds=600, work=0.02, seed=3)
    first, second = best(problem, budget), best(problem, budget)
    assert (first.lanes, first.bound) == (second.lanes, second.bound)
    assert first.ended is Ended.BUDGET
    assert first.bound < first.makespan
    again = search(problem, {"first": first.lanes}, SearchBudget(seconds=600, work=1e-6))
    assert again.hints == {"first": first.makespan}
    assert again.makespan <= first.makespan


def test_one_round_gets_all_the_work_where_a_single_makespan_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer rounds would begin again: zb_v (4,8) with 6 activations ended at 54 with them, where 53 is the optimum."""
    limits, solver = list[object](), cp_sat.Solver

    def recording(*rest: Any, **options: Any) -> cp_sat.Solver:
        limits.append(options["limit"])
        return solver(*rest, **options)

    problem = instance("waves", costs(F=1, B=2), P=2, N=3)
    assert (lower_bound(constraints_of(problem)), problem.makespan(problem.starts(problem.lanes) or [])) == (21, 22)
    monkeypatch.setattr("chimera_ir.orders.search.list_starts", lambda _: None)
    monkeypatch.setattr("chimera_ir.orders.search.improving", lambda *_: [])
    monkeypatch.setattr("chimera_ir.orders.search.FlowBound.next_attempt", lambda *_: None)
    monkeypatch.setattr("chimera_ir.orders.search.Solver", recording)
    assert best(problem).makespan == 21
    assert limits == [UNBOUNDED.deterministic_seconds] * 2


def test_an_order_of_few_micro_batches_is_one_of_many_with_its_middle_repeated() -> None:
    many = instance("dapple", costs(F=1, B=2), 4, D=4, N=40)
    few, numbers = first_micro_batches(many, 12)
    starts = few.starts(best(few).lanes)
    in_turn = constraints_of(few).in_turn(starts)
    orders = [many.by_start(several) for several in repeated(constraints_of(many), numbers, in_turn, 12)]
    makespans = [many.makespan(earliest) for lanes in orders if (earliest := many.starts(lanes)) is not None]
    assert len(makespans) == len(orders), "no cycles"
    assert min(makespans) == 3 * (40 + 3), "as many bubbles as with few micro-batches"


def test_an_instance_too_large_for_the_solver_is_searched_by_few_of_its_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = instance("zb_h1", costs(**SPLIT), 3, D=4, N=48)
    budget = SearchBudget(seconds=600, work=2)
    monkeypatch.setattr("chimera_ir.orders.search._MOST_FOR_SOLVER", 300)
    monkeypatch.setattr("chimera_ir.orders.search._MOST_OF_FEW", 1)
    monkeypatch.setattr("chimera_ir.orders.search.list_starts", lambda _: None)
    jammed = TimedOrder(0, [], [], waiting=[0])
    monkeypatch.setattr("chimera_ir.orders.search.improving", lambda *_: repeat(jammed))
    found = search(problem, {}, budget)
    assert problem.fits_stores(found.lanes)
    assert found.gap < Fraction(1, 8)


@pytest.mark.parametrize(
    ("name", "kinds", "limit", "parameters", "large"),
    [
        ("zb_v", {"F": 3, "I": 4, "W": 2}, 5, {"P": 4, "N": 8}, False),
        ("waves", {"F": 1, "B": 2}, 6, {"P": 4, "N": 8}, False),
        ("zb_h1", SPLIT, 3, {"D": 4, "N": 49}, True),
    ],
)
def test_a_longer_search_does_all_that_a_shorter_one_does(
    name: str,
    kinds: Mapping[str, int],
    limit: int,
    parameters: Mapping[str, int],
    large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Orders and bounds of a shorter search are the first of a longer one, so that neither gets worse."""
    if large:
        monkeypatch.setattr("chimera_ir.orders.search._MOST_FOR_SOLVER", 300)
        monkeypatch.setattr("chimera_ir.orders.search._MOST_OF_FEW", 1)
    problem, before = instance(name, costs(**kinds), limit, **parameters), list[tuple[Fraction, Fraction]]()
    for work in (1e-6, 0.03, 0.1, 0.3, 0.9):
        told = list[tuple[Fraction, Fraction]]()
        found = search(problem, {}, SearchBudget(600, work=work), lambda *now, told=told: told.append(now))  # type: ignore[misc]
        assert told[: len(before)] == before
        assert told[-1] == (found.makespan, found.bound)
        before = told
    assert len(before) > 1


def test_a_bound_above_an_order_is_an_error_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chimera_ir.orders.search.lower_bound", lambda _: 52)
    with pytest.raises(AssertionError, match="an order of 51 ticks, below the bound of 52"):
        best(instance("zb_v", costs(F=1, I=1, W=1), 8, P=4, N=8))


def test_an_interrupted_search_returns_the_best_order_so_far() -> None:
    def interrupt(makespan: Fraction, bound: Fraction) -> None:
        assert bound < makespan
        raise KeyboardInterrupt

    problem = instance("zb_v", costs(F=3, I=4, W=2), 5, P=4, N=8)
    found = search(problem, {}, UNBOUNDED, interrupt)
    assert found.ended is Ended.INTERRUPTED
    assert problem.fits_stores(found.lanes)
    assert found.bound < found.makespan


def test_no_list_schedule_jams_in_the_least_memory_of_one_micro_batch() -> None:
    for scheme in ("zb_v", "bitpipe", "waves"):
        problem = instance(scheme, costs(F=1, B=2), 2)
        found = best(problem, SearchBudget(seconds=600, work=1e-6))
        assert problem.fits_stores(found.lanes)
        with pytest.raises(NoOrder) as error:
            best(instance(scheme, costs(F=1, B=2), 1), SearchBudget(seconds=600, work=0.5))
        assert error.value.impossible
        assert {*error.value.needed.values()} == {2}


def improved(**options: object) -> Compilation:
    return chimera_ir.compile("zb_h1", options=chimera_ir.Options(search=600, **options), D=4, N=8)  # type: ignore[arg-type]


def test_a_compilation_with_a_search_is_verified_and_its_text_says_how_it_was_found() -> None:
    compilation = improved(costs=SPLIT, memory={"activations": 3}, seed=5, against="zb_h1")
    assert compilation.report.makespan == 75
    assert compilation.report.baseline.makespan == 65
    assert not compilation.report.is_baseline
    assert max(compilation.verified.live) == 3
    text = produce(compilation, Level.SCHEDULE)
    assert text.splitlines()[:4] == [
        "# order of a search: 75, proven to be the shortest",
        "# costs: F = 2, I = 3, W = 2",
        "# bounds on memory: activations <= 3",
        "# budget: 600 s, seed 5; it ended because no order is shorter",
    ]
    again = chimera_ir.compile(Source("found.sir", text))
    assert again.schedule == compilation.schedule


def test_a_search_begins_with_the_librarys_orders_of_the_same_placement() -> None:
    improvement = improved(memory={"activations": 8}).improvement
    assert improvement.result.hints == {"zb_h1": 27, "zb_h2": 24 + Fraction(3)}


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("pipedream", {}, "search: it searches among the orders of one update, and the scheme has no flush"),
        ("waves", {"memory": {"activations": 1}}, "one micro-batch after another needs activations 2"),
    ],
)
def test_what_cannot_be_searched_is_said(text: str, options: Mapping[str, object], words: str) -> None:
    with pytest.raises(CompileError, match=words):
        _ = chimera_ir.compile(text, options=chimera_ir.Options(search=600, **options)).report  # type: ignore[arg-type]


def test_the_text_of_a_program_is_refused() -> None:
    text = chimera_ir.compile("dapple", D=2, N=2).program_text
    compilation = chimera_ir.compile(Source("program.sir", text), options=chimera_ir.Options(search=1))
    with pytest.raises(CompileError, match="search with its schedule"):
        _ = compilation.schedule


def test_a_missing_solver_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_sat, "find_spec", lambda _: None)
    with pytest.raises(OptionError, match=r"pip install 'chimera_ir\[search\]'"):
        _ = improved().schedule


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory", "activations=0"), "--memory activations=0: a limit is a whole number from 1 on"),
        (("--memory", "bytes=3"), "write activations or host with a limit in micro-batches"),
        (("--memory", "weights=2"), "write activations or host with a limit"),
        (("--memory", "activations=2", "--memory", "activations=3"), "given twice"),
        (("--seconds", "0"), "not in the range"),
    ],
)
def test_mistakes_in_options_of_a_search_name_the_remedy(
    run_chimera: Run, words: tuple[str, ...], message: str
) -> None:
    ended = run_chimera("search", "zb_h1", *words)
    assert ended.status == 2
    assert message in ended.err


def test_options_of_a_search_without_one_are_refused(run_chimera: Run) -> None:
    ended = run_chimera("compile", "zb_h1", "--memory", "activations=4")
    assert (ended.status, "add --search" in ended.err) == (2, True)


def test_the_command_prints_the_order_that_it_found(run_chimera: Run) -> None:
    ended = run_chimera("search", "waves", "P=2", "N=2", "--emit", "schedule")
    assert ended.status == 0
    assert ended.out.startswith("# order of a search: 16, proven to be the shortest; began with waves 1")


def test_report_and_page_show_the_order_beside_the_one_before_with_all_clauses() -> None:
    options = chimera_ir.Options(search=600, recompute=True)
    compilation = chimera_ir.compile("waves", options=options, P=2, N=6)
    before = chimera_ir.compile("waves", options=chimera_ir.Options(recompute=True), P=2, N=6)
    assert (compilation.report.makespan, compilation.report.baseline.makespan) == (51, 52)
    assert compilation.opponent.schedule == before.schedule
    tables = document(compilation).schedules
    assert [table.name for table in tables] == ["waves P=2 w=1 N=6 hop=2 (found)", "waves P=2 w=1 N=6 hop=2 (before)"]
    assert [table.facts.makespan for table in tables] == [51, 52]
    # The picture has both on one scale: a box of the same operation is as wide in either.
    found, earlier = compilation.files["timeline.svg"].split(">before<")
    assert "makespan 51" in found
    assert "makespan 52" in earlier
    first = re.compile(r'width="([0-9.]+)"[^>]*><title>forward of micro-batch 0 on stage 0\b')
    widths = [first.findall(part) for part in (found, earlier)]
    assert widths[0] == widths[1] != []


DOCUMENTS = Path(__file__).resolve().parents[2] / "docs/examples"


@pytest.mark.parametrize("scheme", ["dapple", "zb_h1"])
def test_with_a_profile_and_a_cluster_the_replay_takes_what_the_search_promised(run_chimera: Run, scheme: str) -> None:
    """Messages are counted: nothing shares a link here. Each delay is rounded up to a nanosecond."""
    files = [f"--profile={DOCUMENTS}/halves.profile.toml", f"--cluster={DOCUMENTS}/small.cluster.toml"]
    asked = [scheme, "D=4", "N=8", *files, "--micro-batch-size=8", "--emit=report"]
    result = json.loads(run_chimera("search", *asked, "--seconds=600").out)
    before = json.loads(run_chimera("compile", *asked).out)["prediction"]["T_replay"]
    replayed, search = result["prediction"]["T_replay"], result["search"]
    assert search["proven"]
    assert search["makespan"] - 1e-6 < replayed <= search["makespan"]
    assert search["began_with"][scheme] - 1e-6 < before <= search["began_with"][scheme]
    assert replayed < before or scheme == "dapple"


def test_with_a_profile_and_a_cluster_an_order_fits_that_began_with_one_that_fits(run_chimera: Run) -> None:
    """Without the limits the best order is that of gpipe, which keeps all micro-batches and needs 21 GiB of 14."""
    files = [f"--profile={DOCUMENTS}/plan.profile.toml", f"--cluster={DOCUMENTS}/small.cluster.toml"]
    where = "dapple", "D=4", "N=8", *files, "--micro-batch-size=8", "--copies=4", "--emit=report", "--seconds=600"
    fits, free = (json.loads(run_chimera("search", *where, *more).out) for more in ([], ["--memory=activations=8"]))
    available = fits["prediction"]["memory_available"]
    assert max(fits["prediction"]["memory"]) <= available < max(free["prediction"]["memory"])
    assert fits["search"]["proven"]


def test_a_search_counts_the_waits_for_moves_of_memory() -> None:
    """Its makespan is that of the simulation, that of its hint too; workers keep one micro-batch each."""
    stages, micros = "stages s in 0..3 on s", "micros m in 0..3"
    lines = "F(m, s)\noffload(m, s) when s < 2\nreload(m, s) when s < 2\nB(m, s)"
    text = f"scheme mine()\nworkers 3\nmemory activations <= 1\npipe p {{\n{stages}\n{micros}\n{lines}\n}}"
    source = Source("mine.chim", text)
    compilation = chimera_ir.compile(source, options=chimera_ir.Options(search=1))
    improvement = compilation.improvement
    assert improvement.result.makespan == compilation.report.makespan
    assert improvement.result.hints["mine"] == chimera_ir.compile(source).report.makespan
