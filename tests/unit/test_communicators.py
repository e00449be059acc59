"""Programs with a communicator for each direction between two workers, with one for both, or with one hardware queue.

The oracle is `tests.executor`, which runs each choice by its rules and shares nothing with the proof; of the queue it
is `tests.one_queue`.
"""

import json
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.commands.common import WRONG_COMMAND
from chimera_ir.console import printed
from chimera_ir.cost import report
from chimera_ir.errors import NotProven
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import AllReduce, Communicators, Recv, Send, WaitAllReduce, WaitRecv, WaitSend
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.turns import shelf
from chimera_ir.lower.lower import lower
from chimera_ir.predict.replay import pace
from chimera_ir.profile.cluster import Link
from chimera_ir.verify.messages import Communication
from chimera_ir.verify.verify import Checked, Verified, verify_program
from tests.executor import verdict
from tests.lowered import evaluated
from tests.one_queue import finishes
from tests.pages import compare
from tests.repeatable import also
from tests.sizes import on_workers, usual
from tests.unit.command import Run
from tests.unit.test_replay import setting

SIZES = also([(4, 4)], [(2, 2), (2, 4), (4, 8)])
"""Workers and micro-batches."""


PAIR = chimera_ir.Options(communicators="pair")


@cache
def checked_library(scheme: str, workers: int, micro_batches: int) -> Checked:
    return chimera_ir.compile(scheme, **on_workers(scheme, workers, micro_batches)).verified.checked


def verified(scheme: str, workers: int, micro_batches: int, ahead: int = 1, **how: Communicators) -> Verified:
    """A library scheme whose receives are posted so many operations before their use."""
    checked = checked_library(scheme, workers, micro_batches)
    return verify_program(lower(checked.level, ahead, **how), checked)


def known(program: Verified) -> dict[Communicators, Communication]:
    return {each.communicators: each for each in program.communications}


def assert_as_executed(made: Verified) -> None:
    for communicators, communication in known(made).items():
        ends = {verdict(made.program, communicators.value, seed) for seed in range(2)}
        assert ends == {"finished" if communication.finishes else "stuck"}, communicators


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("scheme", library.names())
def test_what_is_proven_is_what_happens(scheme: str, ahead: int) -> None:
    for size in SIZES:
        assert_as_executed(verified(scheme, *size, ahead))


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("scheme", library.names())
def test_what_is_compiled_for_both_directions_is_proven_for_them(scheme: str, ahead: int) -> None:
    for size in SIZES:
        made = verified(scheme, *size, ahead, communicators=Communicators.PAIR)
        assert not made.blocked(Communicators.PAIR)
        assert_as_executed(made)


def test_communicators_are_counted_for_one_copy() -> None:
    counts = {each.value: known(verified("chimera", 4, 4))[each].count for each in Communicators}
    assert counts == {"directed": 6, "pair": 3}
    ring = {each.value: known(verified("interleaved", 4, 4))[each].count for each in Communicators}
    assert ring == {"directed": 8, "pair": 4}
    alone = verified("gpipe", 1, 2)
    assert [(each.count, each.finishes) for each in alone.communications] == [(0, True)] * 2


def test_a_circle_is_told_by_the_operations_that_are_never_over() -> None:
    told = known(verified("dapple", 2, 4))
    assert told[Communicators.DIRECTED].blocked == ""
    assert told[Communicators.PAIR].blocked == (
        "`recv m0 s1->s0 from w1 into 0` on worker 0 and `recv m1 s0->s1 from w0 into 1` on worker 1 wait for each "
        "other"
    )


@pytest.mark.parametrize(("scheme", "ahead"), [("gpipe", 0), ("gems", 0), ("breadth_first", 0), ("chimera", 1)])
def test_an_order_in_which_it_finishes_obeys_the_streams(scheme: str, ahead: int) -> None:
    """Played one by one, each event comes after all that it must wait for; no stream is entered out of turn."""
    made = verified(scheme, 4, 8, ahead, communicators=Communicators.PAIR)
    for communicators, communication in known(made).items():
        assert_in_order(made.program, communication.played.order, communicators)


def assert_in_order(program: Program, order: Iterable[int], communicators: Communicators) -> None:
    """The instructions of an order, with the transfers that their posts allow, one stream operation after the other."""
    lines = [(worker, line) for worker, lane in enumerate(program.lanes) for line in lane]
    queues: dict[tuple[int, int, bool], list[object]] = {}
    posted: Counter[object] = Counter()
    over: set[object] = set()
    for event in order:
        worker, line = lines[event]
        match line:
            case Send(message, peer) | Recv(message, peer):
                directed = communicators is Communicators.DIRECTED
                key = worker, peer, directed and isinstance(line, Send)
                queues.setdefault(key, []).append(message)
            case WaitSend(message) | WaitRecv(message):
                assert message in over
            case AllReduce(group, version=version):
                posted[group, version] += 1
            case WaitAllReduce(group, version=version):
                assert posted[group, version] == len(program.header.members(group))
        while ready := [m for m, ends in Counter(queue[0] for queue in queues.values() if queue).items() if ends == 2]:
            over |= {*ready}
            queues = {key: queue[1:] if queue and queue[0] in ready else queue for key, queue in queues.items()}
    assert not any(queues.values())


def late(scheme: str, workers: int = 4) -> chimera_ir.Compilation:
    """A text of a program whose receives are posted where they are needed."""
    checked = chimera_ir.compile(scheme, **on_workers(scheme, workers, 4)).verified.checked
    return chimera_ir.compile(chimera_ir.Source(f"{scheme}.sir", show(lower(checked.level, 0))))


def test_the_report_says_what_is_proven_and_where_it_blocks() -> None:
    assert json.loads(late("gpipe").report_json)["communicators"] == {
        "directed": {"count": 6, "proven": True},
        "pair": {"count": 3, "proven": True},
    }
    blocked = json.loads(chimera_ir.compile("gpipe", D=4, N=4).report_json)["communicators"]["pair"]
    assert (blocked["count"], blocked["proven"]) == (3, False)
    assert blocked["blocked"].endswith(" on worker 1 wait for each other")


@pytest.mark.parametrize(
    ("scheme", "lines"), [("gpipe", ["pair (3)"]), ("breadth_first", ["pair (4)"]), ("dapple", [])]
)
def test_the_table_of_the_report_has_a_line_for_what_is_proven(scheme: str, lines: list[str]) -> None:
    said = printed(lambda console: console.print(report.show(late(scheme).report))).splitlines()
    fewer = "finishes with fewer communicators, too: "
    assert [line.removeprefix(fewer) for line in said if line.startswith(fewer)] == lines


def test_evaluations_count_as_well() -> None:
    """Those of a schedule in two directions cross in other places than its training."""
    training, evaluation = verified("gems", 4, 4, ahead=0), evaluated(verified("gems", 4, 4))
    assert [each.finishes for each in training.communications] == [True] * 2
    assert [each.blocked[:14] for each in training.with_evaluation(lambda: evaluation)] == ["", "in evaluations"]


def test_an_evaluation_of_a_text_finishes_with_what_the_text_finishes_with() -> None:
    assert [each.finishes for each in verified("gems", 4, 4, ahead=0).communications] == [True] * 2
    assert not evaluated(verified("gems", 4, 4)).communications[1].finishes
    assert [each.blocked for each in late("gems").report.communicators] == [""] * 2


def test_what_runs_a_program_knows_what_is_proven() -> None:
    assert json.loads(late("gpipe").files["program.json"])["communicators"] == ["directed", "pair"]
    assert json.loads(late("dapple").files["program.json"])["communicators"] == ["directed"]


@pytest.mark.parametrize("scheme", ["chimera", "pipedream_2bw"])
def test_the_text_of_a_program_is_compiled_to_the_same_files(scheme: str) -> None:
    first = chimera_ir.compile(scheme, options=PAIR).files
    again = chimera_ir.compile(chimera_ir.Source(f"{scheme}.sir", first["schedule.sir"])).files
    for name in ("schedule.sir", "evaluate.sir", "program.json"):
        assert again[name] == first[name]


def test_the_text_of_a_program_that_is_not_proven_for_what_is_asked_is_refused(run: Run, tmp_path: Path) -> None:
    """It says itself when receives are posted; that of a schedule does not."""
    file = tmp_path / "a.sir"
    for text, proven in (
        (show(late("gpipe").program), True),
        (show(chimera_ir.compile("dapple").schedule), True),
        (show(chimera_ir.compile("dapple").program), False),
    ):
        file.write_text(text)
        ended = run(str(file), "--communicators", "pair", "--emit", "program")
        if proven:
            assert ended.status == 0
            continue
        ended.assert_refused(WRONG_COMMAND, "--communicators pair: `recv m0 s1->s0 from w1 into 0` on worker 0 and")
        with pytest.raises(NotProven, match="wait for each other; receives are posted as the text of a program says"):
            _ = chimera_ir.compile(file, options=PAIR).program


def test_the_command_asks_for_it_by_the_word_of_train_py(run: Run) -> None:
    asked = run("dapple", "--communicators", "pair", "--emit", "program").out
    assert asked == show(chimera_ir.compile("dapple", options=PAIR).program)
    assert asked != run("dapple", "--communicators", "directed", "--emit", "program").out


CHOICES = tuple(Communicators)


@pytest.fixture(scope="module")
def programs() -> list[tuple[Verified, Verified]]:
    """The library for one communicator per direction, and for both."""
    made: list[tuple[Verified, Verified]] = []
    for scheme, settings in usual():
        directed = chimera_ir.compile(scheme, **settings).verified
        pair = lower(directed.checked.level, communicators=Communicators.PAIR)
        made.append((directed, verify_program(pair, directed.checked)))
    return made


@pytest.mark.parametrize("choice", CHOICES)
def test_so_many_programs_of_the_library_are_proven_as_the_page_says(
    choice: Communicators, programs: list[tuple[Verified, Verified]], update_goldens: bool
) -> None:
    proven: Counter[str] = Counter()
    for program in (each[CHOICES.index(choice)] for each in programs):
        known = program.with_evaluation(lambda program=program: evaluated(program, communicators=choice))  # type: ignore[misc]
        proven.update(each.communicators.value for each in known if each.finishes)
    counts = [proven[each.value] for each in Communicators]
    sentence = f"| `--communicators {choice.value}` | {{}} | {{}} | {{}} |"
    compare("gpus.md", sentence, len(programs), *counts, update=update_goldens)


@pytest.mark.parametrize("part", [0.1, 0.5])
def test_so_much_longer_do_updates_take_as_the_page_says(
    part: float, programs: list[tuple[Verified, Verified]], update_goldens: bool
) -> None:
    link = Link(part, part)
    longer: list[float] = []
    for pair_of_programs in programs:
        of_stages = setting(pair_of_programs[0].program.header.stages, link=link, costs=(1.0, 2.0, 3.0))
        directed, pair = (pace(each.program, of_stages) for each in pair_of_programs)
        longer.append(100 * (pair / directed - 1))
    figures = (f"{number:.1f}" for number in (fmean(longer), min(longer), max(longer)))
    compare("gpus.md", f"| {part} + {part} | {{}} % | {{}} to {{}} % |", *figures, update=update_goldens)


def test_so_many_programs_need_other_receive_buffers_as_the_page_says(
    programs: list[tuple[Verified, Verified]], update_goldens: bool
) -> None:
    changes = [buffers(pair.level) - buffers(directed.level) for directed, pair in programs]
    fewer, more = sum(change < 0 for change in changes), sum(change > 0 for change in changes)
    sentence = "{} of the {} have fewer receive buffers, {} have more"
    compare("gpus.md", sentence, fewer, len(programs), more, update=update_goldens)


def test_so_many_programs_of_the_library_finish_with_a_single_hardware_queue_as_the_page_says(
    programs: list[tuple[Verified, Verified]], update_goldens: bool
) -> None:
    names = [scheme for scheme, _ in usual()]
    hanging = [name for name, (program, _) in zip(names, programs, strict=True) if not finishes(program.program, 1)]
    several = {name for name, (program, _) in zip(names, programs, strict=True) if finishes(program.program, 2)}
    figures = len(programs), len(programs) - len(hanging)
    compare("gpus.md", "of {} programs of the library {} finish", *figures, update=update_goldens)
    assert {*hanging} == {"chimera_doubling", "dualpipe", "dualpipe_v", "encoder_decoder", "interleaved"}
    assert several == {"dapple_recompute", "eager_1f1b"}


def test_it_is_what_is_posted_ahead_that_holds_up_what_is_behind_it_in_a_single_queue() -> None:
    """Where all messages go one way before any goes back, and receives are posted where they are needed, nothing is."""
    ahead, late = (verified("gpipe", 4, 4, count).program for count in (1, 0))
    assert [finishes(ahead, 2), finishes(late, 2)] == [False, True]


def buffers(level: Program | ProgramStream) -> int:
    if isinstance(level, ProgramStream):
        return sum(count for turn in level.turns for _, count in turn.slots)
    return sum(len({(shelf(recv.message), recv.slot) for recv in parts.recvs.lines}) for parts in level.parts)
