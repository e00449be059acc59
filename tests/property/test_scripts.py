"""Scripts of random orders: stages on workers in uneven ways, ragged pipes, with and without a flush."""

import itertools

from hypothesis import event, given
from hypothesis import strategies as st

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.ir.kinds import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Kind
from chimera_ir.ir.levels import Header, Pipe, Schedule
from chimera_ir.ir.ops import Compute, Micro, Stage, Version, Worker
from chimera_ir.ir.text.printer import show
from chimera_ir.lower.lower import lower
from chimera_ir.verify.scripts import scripts, worker_scripts
from chimera_ir.verify.verify import Verified, verify_lowered, verify_schedule
from tests.lowered import evaluated, scripts_of
from tests.repeatable import examples
from tests.unit.journal import journals, loaded
from tests.unit.test_codegen import lanes, ranks
from tests.unit.test_scripts import changes

_FEW = examples(60)


@st.composite
def pipes_of_micros(draw: st.DrawFn) -> list[int]:
    """The pipe of each micro-batch, in the order in which they start: in blocks of any sizes, in turn, or mixed."""
    count = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    in_blocks = [pipe for pipe, size in enumerate(sizes) for _ in range(size)]
    match draw(st.sampled_from(["blocks", "in turn", "mixed"])):
        case "blocks":
            return in_blocks
        case "in turn":
            rows = itertools.zip_longest(*([pipe] * size for pipe, size in enumerate(sizes)))
            return [pipe for row in rows for pipe in row if pipe is not None]
        case _:
            return draw(st.permutations(in_blocks))


@st.composite
def schedules(draw: st.DrawFn, streams: bool) -> Schedule:
    """Lanes sorted by a clock that is linear in the micro-batch; of a stream, enough updates to show its turn."""
    pattern = draw(pipes_of_micros())
    stages, workers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    place = st.lists(st.integers(0, workers - 1), min_size=stages, max_size=stages)
    placed = [tuple(map(Worker, draw(place))) for _ in range(max(pattern) + 1)]
    rate = draw(st.sampled_from([2, 3, 2 * stages]))
    lag = draw(st.integers(stages, 3 * stages + 6))
    later = None if streams or draw(st.booleans()) else draw(st.integers(1, 9))
    age = draw(st.integers(0, 3))
    turns = (lag + stages) // (rate * len(pattern)) + age + 2
    updates = 2 * turns + 7 if streams else 1
    total = updates * len(pattern)
    recompute = tuple(sorted(draw(st.sets(st.integers(0, stages - 1), max_size=1))))
    header = Header(
        scheme="uneven",
        parameters=(),
        workers=workers,
        stages=stages,
        micro_batches=total,
        pipes=tuple(
            Pipe(
                f"p{number}",
                place_of,
                tuple(Micro(m) for m in range(total) if pattern[m % len(pattern)] == number),
                tuple(map(Stage, recompute)),
            )
            for number, place_of in enumerate(placed)
        ),
        updates=updates,
        period=len(pattern) if streams else 0,
    )
    lanes_of: list[list[tuple[tuple[int, int], Compute]]] = [[] for _ in range(workers)]
    backwards: dict[Kind, int] = {BACKWARD: 0} if later is None else {INPUT_GRADIENT: 0, WEIGHT_GRADIENT: later}
    for m, s in itertools.product(range(total), range(stages)):
        version = Version(max(0, m // len(pattern) - age)) if streams else None
        clocks = {FORWARD: rate * m + s, **{k: rate * m + lag + stages - s + by for k, by in backwards.items()}}
        for number, (kind, clock) in enumerate(clocks.items()):
            operation = Compute(kind, (Micro(m),), Stage(s), version=version)
            lanes_of[placed[pattern[m % len(pattern)]][s]].append(((clock, number), operation))
    ordered = (sorted(lane, key=lambda entry: entry[0]) for lane in lanes_of)
    return Schedule(header, tuple(tuple(operation for _, operation in lane) for lane in ordered))


def compiled(schedule: Schedule) -> Verified | None:
    """The verified program; None if the schedule is refused, by diagnostics alone."""
    checked = verify_schedule(schedule, None)
    if checked.findings.errors:
        event("refused")
        return None
    try:
        return verify_lowered(lower(checked.level), checked)
    except Rejected:
        event("no program")
        return None


def differing(verified: Verified, files: dict[str, str]) -> set[str]:
    """The scripts that do something else than their lanes, by the fakes of `journal`."""
    wanted = lanes(show(verified.program))
    found = set()
    for number, (text, lane, journal) in enumerate(zip(ranks(files), wanted, journals(files), strict=True)):
        try:
            journal.run(loaded(text), verified.program.header.updates)
        except Exception:
            found.add(f"rank_{number}.py")
        if journal.lines != lane:
            found.add(f"rank_{number}.py")
    return found


@_FEW
@given(st.booleans().flatmap(lambda streams: schedules(streams)), st.data())
def test_scripts_of_any_order_do_their_lanes_and_a_changed_one_is_rejected_as_soon_as_it_does_not(
    schedule: Schedule, data: st.DataObject
) -> None:
    verified = compiled(schedule)
    if verified is None:
        return
    files, evaluation = scripts_of(verified), evaluated(verified).program
    event("a loop" if any("\n    for " in text for text in ranks(files)) else "no loop")
    assert [*scripts(verified.program, evaluation, worker_scripts(verified.header, files))] == []
    assert differing(verified, files) == set()
    name = data.draw(st.sampled_from([f"rank_{worker}.py" for worker in range(schedule.header.workers)]))
    changed = [text for _, text in changes(files[name])]
    if changed:
        wrong = files | {name: data.draw(st.sampled_from(changed))}
        rejected = {
            found.script
            for found in scripts(verified.program, evaluation, worker_scripts(verified.header, wrong))
            if found.function != "evaluate"
        }
        assert rejected == differing(verified, wrong)
