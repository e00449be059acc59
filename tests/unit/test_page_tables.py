"""The tables of a page: events with the times of the replay, also at other costs, and what each row is about."""

import gzip
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

import chimera_ir
from chimera_ir import Compilation, Options
from chimera_ir.flow.engine import critical, ordered
from chimera_ir.ir.ops import Compute, Pair
from chimera_ir.ir.text.printer import line
from chimera_ir.page import tables
from chimera_ir.page.contents import document, gzipped, packed
from tests.documents import document_in, unpacked
from tests.pages import SMALL
from tests.test_architecture import ROOT

PROFILED = Options(**SMALL, copies=2)
CASES = {
    "two directions": ("chimera", {"D": 4, "N": 4}, Options(stage_costs={"F": [1, 2, 3, 5]})),
    "halves": ("chimera_halving", {"D": 4, "N": 4}, Options(costs={"F": "1/3"})),
    "pairs": ("dualpipe_v", {"P": 2, "N": 6}, Options(costs={"pair": 2})),
    "split backwards": ("zb_h1", {"D": 4, "N": 4}, Options()),
    "a stream": ("pipedream_2bw", {"D": 2, "N": 2}, Options(recompute=True)),
    "slices": ("seq1f1b", {"D": 2, "N": 2, "k": 2}, Options(costs={"F": "2,3"})),
    "a profile": ("dapple", {"D": 4, "N": 4}, PROFILED),
}


@cache
def compilation(case: str) -> Compilation:
    scheme, parameters, options = CASES[case]
    return chimera_ir.compile(scheme, options=options, **parameters)


@cache
def document_of(case: str) -> dict[str, Any]:
    return document_in(compilation(case).page)


def schedule_of(case: str) -> dict[str, Any]:
    (schedule,) = document_of(case)["schedules"]
    return schedule


def rows_of(table: Mapping[str, Any], column: str) -> list[list[int]]:
    """The rows of several numbers in two columns of a table."""
    starts = table[f"{column}_from"]
    return [table[column][start:end] for start, end in pairwise(starts)]


def times_of(schedule: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Start and end of each event, where sliders stand at first."""
    events = schedule["events"]
    costs = [slider["value"] for slider in schedule["sliders"]]
    lengths = [sum(by * costs[slider] for slider, by in form["of"]) for form in events["forms"]]
    before = rows_of(events, "before")
    times = [(0.0, 0.0)] * len(before)
    for event in ordered(before):
        start = max((times[other][1] for other in before[event]), default=0.0)
        times[event] = start, start + lengths[events["form"][event]]
    return times


def operations_of(schedule: Mapping[str, Any]) -> Iterator[tuple[int, str, float, float]]:
    """The operations of a schedule with their times, as the page has them."""
    times, operations = times_of(schedule), schedule["operations"]
    rows = zip(operations["worker"], operations["words"], operations["event"], strict=True)
    return ((worker, words, *times[event]) for worker, words, event in rows)


def replayed(compiled: Compilation) -> Iterator[tuple[int, str, float, float]]:
    """The operations of a compilation with their times, as the replay has them."""
    header = compiled.replay.header
    for worker, lane in enumerate(compiled.replay.lanes):
        for event in lane:
            if isinstance(event.instruction, Compute | Pair):
                yield from ((worker, line(part, header), event.start, event.end) for part in event.instruction.parts)


@pytest.mark.parametrize("case", CASES)
def test_operations_have_the_times_of_the_replay(case: str) -> None:
    """tests/unit/test_played_pages.py moves the sliders."""
    rows, others = [*operations_of(schedule_of(case))], [*replayed(compilation(case))]
    assert [row[:2] for row in rows] == [row[:2] for row in others]
    assert [row[2:] for row in rows] == [pytest.approx(row[2:], rel=1e-12, abs=1e-15) for row in others]


def test_slices_have_patterns_of_their_own_and_numbers_of_their_micro_batches() -> None:
    (schedule,) = document_in(chimera_ir.compile("seq1f1b_interleaved", P=2, v=2, N=2, k=2).page)["schedules"]
    operations, looks = schedule["operations"], schedule["looks"]
    rows = zip(operations["words"], operations["look"], strict=True)
    slices = {(looks[look]["pattern"], words.split()[2]) for words, look in rows}
    assert slices == {(0, "q0"), (1, "q1"), (2, "q0"), (3, "q1")}
    assert all(re.match(r"m\d q\d s\d->s\d$", words) for words in schedule["messages"]["words"])


@pytest.mark.parametrize("case", CASES)
def test_messages_and_sums_know_their_events_and_operations(case: str) -> None:
    schedule = schedule_of(case)
    events, operations, messages = schedule["events"], schedule["operations"], schedule["messages"]
    words = [
        f"{events['verbs'][verb]} {messages['words'][subject]}" if 1 <= verb <= 4 else ""
        for verb, subject in zip(events["verb"], events["subject"], strict=True)
    ]
    assert len(messages["words"]) == len(compilation(case).replay.messages)
    before = rows_of(events, "before")
    for row, text in enumerate(messages["words"]):
        micros, source, target = re.fullmatch(r"(?:\w+ )?(m[\d,m]+(?: q\d+)?) s(\d+)->s(\d+)", text).groups()  # type: ignore[union-attr]
        maker, taker, link = messages["maker"][row], messages["taker"][row], messages["links"][messages["link"][row]]
        assert (operations["stage"][maker], operations["stage"][taker]) == (int(source), int(target))
        assert f" {micros} " in f"{operations['words'][maker]} "
        assert (operations["worker"][maker], operations["worker"][taker]) == (link["from"], link["to"])
        assert words[messages["wait"][row]] == f"wait recv {text}"
        assert messages["flight"][row] in before[messages["wait"][row]]
        assert messages["wire"][row] in before[messages["flight"][row]]
        assert messages["send"][row] in before[messages["wire"][row]]
        assert events["worker"][messages["recv"][row]] == link["to"]
    launches = rows_of(schedule["sums"], "launches")
    for row, event in enumerate(schedule["sums"]["event"]):
        assert sorted({events["worker"][launch] for launch in launches[row]}) == [
            events["worker"][launch] for launch in launches[row]
        ]
        assert event == -1 or set(launches[row]) <= set(before[event])


@pytest.mark.parametrize("case", CASES)
def test_memory_reaches_the_peaks_of_the_report(case: str) -> None:
    schedule, report = schedule_of(case), compilation(case).report
    prediction = compilation(case).prediction
    for table in schedule["memory"]:
        amounts, peaks = [*table["start"]], [*table["start"]]
        for worker, amount in zip(table["changes"]["worker"], table["changes"]["amount"], strict=True):
            amounts[worker] += amount
            peaks[worker] = max(peaks[worker], amounts[worker])
        assert peaks == table["peak"]
        assert max(amounts) == max(table["start"])
        if prediction is not None and table["unit"] == "bytes":
            assert peaks == [need.total for need in prediction.memory]
        else:
            assert peaks == [*(report.activations if table["unit"] == "M_a" else report.stashed_inputs)]
    units = [table["unit"] for table in schedule["memory"]]
    assert units == ["M_a", *["inputs"] * (case == "a stream"), *["bytes"] * (case == "a profile")]


def without_numbers(words: str) -> list[str]:
    """An operation without micro-batches and version, which are others in a turn."""
    return [word for word in words.split() if word[0] not in "mv"]


@pytest.mark.parametrize("case", CASES)
def test_an_operation_knows_its_lines_in_every_text(case: str) -> None:
    document, operations = document_of(case), schedule_of(case)["operations"]
    scheme, program, *scripts = document["texts"]
    letter = [words.split()[0] for words in operations["words"]]
    for row, (words, worker) in enumerate(zip(operations["words"], operations["worker"], strict=True)):
        line_of_scheme = scheme["text"].split("\n")[scheme["line"][row] - 1]
        assert letter[row] in line_of_scheme or letter[row] == "recompute"
        line_of_program = program["text"].split("\n")[program["line"][row] - 1].strip()
        assert words in line_of_program or without_numbers(words) == without_numbers(line_of_program)
        for script in scripts:
            line_of_script = script["text"].split("\n")[script["line"][row] - 1]
            assert (script["line"][row] > 0) is (script["rank"] == worker)
            if script["rank"] == worker:
                # The remark has the operation or, in a loop, the form of it.
                remark = line_of_script.partition("  # ")[2].split(" & ")
                assert any(form.split()[0] == letter[row] and f" {words.split()[2]}" in f" {form}" for form in remark)
    assert [script["name"] for script in scripts] == [f"rank_{n}.py" for n in range(len(scripts))]


def test_operations_of_a_second_schedule_are_matched_by_what_they_do() -> None:
    options = Options(against="dapple")
    document = document_in(chimera_ir.compile("chimera", options=options, D=4, N=4).page)
    first, second = (schedule["operations"] for schedule in document["schedules"])
    assert [schedule["name"] for schedule in document["schedules"]] == ["chimera D=4 N=4 f=1", "dapple D=4 N=4"]
    assert sorted(document["matches"]) == [*range(32)]
    assert [second["words"][row] for row in document["matches"]] == first["words"]
    assert document["schedules"][1]["facts"]["makespan"] == 21
    assert "speed: 1.31 times as fast as dapple: 16 against 21 (messages cost nothing)" in document["notes"]


def test_halves_of_a_backward_are_matched_with_the_whole_one_and_it_with_the_first() -> None:
    document = document_in(chimera_ir.compile("zb_h1", options=Options(against="dapple"), D=2, N=4).page)
    first, second = (schedule["operations"]["words"] for schedule in document["schedules"])
    whole = {"F": "F", "I": "B", "W": "B"}
    assert [second[row] for row in document["matches"]] == [whole[words[0]] + words[1:] for words in first]
    assert [first[row] for row in document["matched_by"]] == [words.replace("B", "I") for words in second]


def test_the_turn_of_a_stream_has_its_period() -> None:
    schedule = schedule_of("a stream")
    turn, times = schedule["turn"], times_of(schedule)
    starts = turn["before_from"]
    ago = [turn["ago"][start:end] for start, end in pairwise(starts)]
    waits = [list(zip(*columns, strict=True)) for columns in zip(rows_of(turn, "before"), ago, strict=True)]
    lengths = [round(times[event][1] - times[event][0]) for event in turn["events"]]
    assert critical(waits, lengths).cycle.ratio / turn["updates"] == schedule["facts"]["makespan"]
    assert [case for case in CASES if schedule_of(case)["turn"]] == ["a stream"]


CONTRACT = ROOT / "templates" / "page" / "document.d.ts"
INTERFACES = {
    "PageDocument": tables.PageDocument,
    "Schedule": tables.ScheduleTables,
    "OperationKind": tables.OperationKind,
    "Facts": tables.Facts,
    "Look": tables.Look,
    "Slider": tables.Slider,
    "Operations": tables.OperationTable,
    "Events": tables.EventTable,
    "Ports": tables.PortTable,
    "Form": tables.LengthForm,
    "Messages": tables.MessageTable,
    "Sums": tables.SumTable,
    "TurnOfStream": tables.TurnTable,
    "Memory": tables.MemoryTable,
    "SourceText": tables.SourceText,
    "Mistake": tables.ShownMistake,
}


@pytest.mark.parametrize("name", INTERFACES)
def test_a_table_has_the_columns_that_the_scripts_read(name: str) -> None:
    declared = re.search(rf"^interface {name} {{\n(.*?)^}}", CONTRACT.read_text(encoding="utf-8"), re.M | re.S)
    assert sorted(re.findall(r"^  (\w+):", declared[1], re.M)) == sorted(
        column.name for column in fields(INTERFACES[name])
    )


def test_integers_that_no_column_of_four_bytes_holds_are_numbers_of_eight() -> None:
    rows = [*range(-3, 300), 2**31 - 1, -(2**31), 2**40]
    for numbers in (rows, rows[:-1], rows[:-3], [0.5, 1], [7]):
        table = tables.TurnTable(numbers, [], [0], [], 1)
        assert unpacked(packed(table)) == {"events": numbers, "before": [], "before_from": [0], "ago": [], "updates": 1}


def test_sliders_and_words_of_unequal_slices_and_stages_say_what_they_are() -> None:
    costs = chimera_ir.Options(costs={"F": "2,3,4,5"})
    shown = document(chimera_ir.compile("seq1f1b", options=costs, k=4))
    sliders = {slider.name: (slider.label, slider.value) for slider in shown.schedules[0].sliders}
    assert sliders["F"] == ("forward, all slices", 14)
    assert sliders["B"] == ("backward", 2)
    (path,) = (note for note in shown.notes if "critical path" in note)
    assert "8.75 F + 8.75 B = 186.5, where the slices on it make F = 19.3" in path
    costs = chimera_ir.Options(stage_costs={"F": [4, 4, 4, 6]})
    (slider, *_) = document(chimera_ir.compile("dapple", options=costs, D=4)).schedules[0].sliders
    assert (slider.name, slider.label, slider.value) == ("F", "forward, mean of the stages", 4.5)


def test_what_the_costs_of_backwards_include_is_said_where_something_recomputes() -> None:
    said = {
        name: str(document(chimera_ir.compile(name)).schedules[0].remarks) for name in ("dapple", "chimera_doubling")
    }
    assert ["recompute" in said[name] for name in said] == [False, True]


def test_compressed_bytes_name_no_time_and_no_system() -> None:
    data = gzipped(b"a text", level=6)
    assert data[:10] == bytes.fromhex("1f8b08000000000000ff")
    assert gzip.decompress(data) == b"a text"
