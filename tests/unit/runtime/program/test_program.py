"""The facts of a program and its scripts: they belong together, and are read as they were written."""

import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.codegen import facts
from chimera_runtime.check.reference import seed_of
from chimera_runtime.errors import Misuse
from chimera_runtime.program.compiled_program import INTERFACE, CompiledProgram, load
from chimera_runtime.program.job import Feed
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.program.rank_facts import (
    VALUES,
    EvaluationFacts,
    HostedMicros,
    KeptMicros,
    RankFacts,
    Route,
    StageFacts,
    Turns,
    spread,
)
from tests.unit.runtime.thread_ranks import job


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledProgram:
    """A directory with scripts of this program and of others."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "rank_0.py").write_text(f'INTERFACE = {INTERFACE}\nPROGRAM = "ours"\n')
    (tmp_path / "rank_1.py").write_text(f'INTERFACE = {INTERFACE}\nPROGRAM = "another"\n')
    (tmp_path / "rank_3.py").write_text(f'INTERFACE = {INTERFACE + 1}\nPROGRAM = "ours"\n')
    return CompiledProgram(tmp_path, job(), ())


def test_a_ranks_script_is_of_the_program_that_is_started(compiled: CompiledProgram) -> None:
    assert compiled.script(0).PROGRAM == "ours"
    with pytest.raises(Misuse, match=r"rank_1\.py is of another program than program\.json: compile again"):
        compiled.script(1)


def test_a_script_that_is_missing_is_no_fault_of_ours(compiled: CompiledProgram) -> None:
    with pytest.raises(Misuse, match=r"has no rank_2\.py: compile again"):
        compiled.script(2)
    (compiled.directory / "rank_2.py").write_text("import nowhere\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        compiled.script(2)


def test_a_script_for_another_interface_is_one_message(compiled: CompiledProgram) -> None:
    with pytest.raises(Misuse, match=r"rank_3\.py was written for interface \d+ of chimera_runtime, and this is "):
        compiled.script(3)


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ((), [(True, True, False), (True, True, True), (True, True, True)]),
        ((0,), [(False, False, False), (True, True, False), (True, True, True)]),
        ((1,), [(True, True, False), (True, False, True), (True, True, True)]),
        ((0, 2), [(False, False, False), (True, True, False), (True, False, True)]),
    ],
)
def test_a_stage_has_backwards_if_it_or_one_before_it_is_trained(
    frozen: tuple[int, ...], expected: list[tuple[bool, bool, bool]]
) -> None:
    assert [*job(stages=3, frozen=frozen).backwards] == expected


def test_scripts_are_written_for_the_interface_that_the_runtime_has() -> None:
    """The compiler does not import the runtime, so the number stands in both."""
    assert facts.INTERFACE == INTERFACE


OURS = f'"interface": {INTERFACE}'


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "{", "[" * 100_000, f"{{{OURS}}}", f'{{{OURS}, "ranks": [{{}}]}}', "\0"]
)
def test_facts_that_are_damaged_are_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "program.json").write_text(text)
    with pytest.raises(Misuse, match=r"program\.json is not as it was written: compile again"):
        load(tmp_path)


def test_facts_for_another_interface_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "program.json").write_text(f'{{"interface": {INTERFACE + 1}}}')
    with pytest.raises(Misuse, match=r"program\.json was written for interface "):
        load(tmp_path)


def test_a_directory_without_a_program_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.out").mkdir()
    (tmp_path / "file.out").touch()
    for name in ("nothere.out", "empty.out", "file.out"):
        with pytest.raises(Misuse) as refused:
            load(Path(name))
        assert str(refused.value) == f"{name} is no output directory: `chimera compile SCHEME --out {name}` writes one"
        assert refused.value.__suppress_context__, "the traceback is about the directory, not about a file inside"


STAGE = StageFacts({"y": ((1, 2), (1,)), "dx": ((1,), (2,))}, 3, {"y": 2, "dx": 1}, ((0, 2), (4, 5)), (-1, 0))
RANKS = (
    RankFacts(
        {0: STAGE},
        (Route(1, 0, 1),),
        (Route(0, 1, 1), Route(0, 1, 3)),
        ((KeptMicros(0, 2, 1, 1, 2, 1, 3),), (KeptMicros(0, 1, 0),)),
        Turns(-2, 3, 2, 1),
        ((0, 1), (2, 3)),
        (),
        EvaluationFacts({1: ((1, 2), (1,))}, (Route(0, 1, 1),), (Route(0, 1, 3),)),
        on_host=((HostedMicros(0, 3),),),
    ),
    RankFacts({}, (), (), (), None, (), ((0, 2),), EvaluationFacts({}, (), ())),
)


def as_written(rank: RankFacts) -> dict[str, Any]:
    """The entry of a rank in program.json, where slots have the names of a stage's attributes, and sent values none."""
    written = asdict(rank)
    for stage in written["stages"].values():
        slots = stage.pop("slots")
        stage |= {value.slots: slots[letter] for letter, value in VALUES.items()}
        stage["sending"] = [stage["sending"][letter] for letter in VALUES]
    return written


def test_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Lists as tuples, numbers of stages as numbers, whatever is nested in what."""
    whole = job(recomputing=(0,), period=2, reads=(((-1, 2),), ((0, 1), (1, 1))))
    facts = {"interface": INTERFACE, **asdict(whole), "ranks": [as_written(rank) for rank in RANKS]}
    (tmp_path / "program.json").write_text(json.dumps(facts))
    compiled = load(tmp_path)
    assert (compiled.job, compiled.ranks, compiled.directory) == (whole, RANKS, tmp_path)
    hash(compiled.job)


def test_turns_grow_with_the_updates() -> None:
    assert [*Turns(-2, 3, 2, 1).of(4)] == [-2, 0, 2, 4, 6]
    assert [*Turns(0, 0, 1, 0).of(3)] == [0, 1, 2]


def test_the_turns_that_can_be_run_begin_like_those_of_every_longer_run() -> None:
    """A turn with ``ahead`` 1 is about updates up to the next one, which has to be there."""
    turns = Turns(-2, 3, 2, 1)
    assert [[*turns.safe(updates)] for updates in range(5)] == [[-2], [-2], [-2, 0], [-2, 0], [-2, 0, 2]]


def test_runs_are_half_open() -> None:
    assert [*spread(((0, 2), (4, 5), (7, 7)))] == [0, 1, 4]


def test_a_job_counts_passes_cycles_and_holders() -> None:
    """Two pipes in opposite directions over three workers, micro-batches in halves."""
    both = job(workers=3, stages=3, micro_batches=4, parts=2, placement=((0, 1, 2), (2, 1, 0)))
    assert (both.passes, both.cycle) == (8, 8)
    assert both.holders == ((0, 2), (1,), (0, 2))
    assert job(period=5).cycle == 5


# Numbers of micro-batches and the seeds that follow from them.


@given(first=st.integers(0, 100), micro=st.integers(0, 1000), passes=st.integers(1, 64))
def test_a_micro_batch_has_its_place_in_its_update_however_it_is_counted(first: int, micro: int, passes: int) -> None:
    """From the first of an update on, or over the whole run."""
    from_update, from_start = Numbering(0, 0, passes, passes, first), Numbering(0, 0, passes, passes)
    assert from_update.place(micro) == from_start.place(first * passes + micro)
    update, number = from_update.place(micro)
    assert 0 <= number < passes
    assert (update - first) * passes + number == micro


def test_seeds_are_those_that_are_documented() -> None:
    """Written apart: the reference makes them of the same parts, with code of its own."""
    numbering = Numbering(seed=7, copy=2, passes=4, cycle=4, first=3)
    assert numbering.forward_seed(5, stage=1) == seed_of("forward", 7, 4, 2, 1, 1)
    assert numbering.step_seed(3, 1) == seed_of("step", 7, 3, 1)


def test_no_two_forwards_of_a_run_share_a_seed() -> None:
    numberings = [Numbering(0, copy, 2, 2) for copy in range(3)]
    seeds = [n.forward_seed(micro, stage) for n, micro, stage in product(numberings, range(8), range(4))]
    assert len(set(seeds)) == len(seeds)


def test_a_step_has_one_seed_on_all_copies() -> None:
    assert len({Numbering(0, copy, 2, 2).step_seed(1, 1) for copy in range(4)}) == 1


# Which stages feed and are fed at run time.


def test_stages_are_a_chain() -> None:
    three = job(stages=3, placement=((0, 0, 0),))
    assert three.fed == ((1,), (2,), ())
    assert three.feeding == ((), (0,), (1,))
    assert (three.sources, three.sinks) == ((0,), (2,))


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_stage_feeds_exactly_those_that_it_feeds_into(stages: int) -> None:
    chain = job(stages=stages, placement=((0,) * stages,))
    edges = {(source, target) for source in range(stages) for target in chain.fed[source]}
    assert edges == {(source, target) for target in range(stages) for source in chain.feeding[target]}
    assert len(edges) == stages - 1


def test_edges_of_a_graph_come_in_the_order_of_arguments() -> None:
    feeds = (Feed(2, 3), Feed(1, 3), Feed(0, 3, "pixels"), Feed(0, 1))
    named = (("image", 0, 2), ("sound", 2, 3), ("text", 3, 4))
    graph = job(stages=4, placement=((0, 0, 0, 0),), feeds=feeds, named=named)
    assert graph.fed == ((1, 3), (3,), (3,), ())
    assert graph.feeding == ((), (0,), (), (2, 1, 0))
    assert (graph.sources, graph.sinks) == ((0, 2), (3,))
    assert (graph.makers("y", 3), graph.makers("dx", 0)) == ((2, 1, 0), (1, 3))
    assert [*map(graph.stage_name, range(4))] == ["image[0]", "image[1]", "sound[0]", "text[0]"]


def test_each_source_gets_its_entry_of_a_dict_with_the_names_of_all() -> None:
    graph = job(
        stages=3,
        placement=((0, 0, 0),),
        feeds=(Feed(0, 2), Feed(1, 2)),
        named=(("image", 0, 1), ("sound", 1, 2), ("text", 2, 3)),
    )
    whole = {"image": 1, "sound": 2}
    assert [graph.of_end(whole, stage, graph.sources) for stage in graph.sources] == [1, 2]
    for other in (7, {"image": 1, "sound": 2, "text": 3}):
        assert graph.of_end(other, 1, graph.sources) == other
    assert [graph.of_end({"image": 1}, stage, graph.sources) for stage in graph.sources] == [1, None]
    assert graph.of_end({"text": 3}, 2, graph.sinks) == {"text": 3}, "there is one sink"
