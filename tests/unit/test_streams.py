"""The lanes of programs with weight versions, run on the versions of the runtime, and what train.py says of them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.verify.verify import Verified
from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.lane.stream_lane import StreamLane, UpdateRange
from chimera_runtime.program.compiled_program import parsed
from chimera_runtime.program.job import Job
from chimera_runtime.stage.weight_versions import Versions, masters
from tests.lowered import scripts_of
from tests.unit.journal import journals, loaded

STREAMS = Path(__file__).resolve().parent.parent / "e2e" / "schemes" / "streams"
CASES = [
    ("pipedream", {"D": 4}),
    ("pipedream", {"D": 1}),
    ("pipedream_2bw", {"D": 4}),
    ("pipedream_2bw", {"D": 2, "N": 5}),
    ("accumulate", {"D": 4, "K": 2}),
    ("folded", {"N": 3}),
]


def compiled(name: str, parameters: dict[str, int]) -> Verified:
    path = STREAMS / f"{name}.chim"
    source = Source(path.name, path.read_text()) if path.exists() else library.source(name)
    return Compilation(Request(source, parameters)).verified


class Stage:
    """A stage whose forwards and backwards note nothing but the value of the weights: version v is v."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.weight = torch.nn.Parameter(torch.zeros(1))
        stepped = masters([self.weight])
        self.weights = Versions([self.weight], stepped, SimpleNamespace(step=lambda: stepped[0].data.add_(1)))
        self.stash, self.drop, self.step = self.weights.stash, self.weights.drop, self.weights.step
        self.read: dict[int, float] = {}
        self.read_back: dict[int, float] = {}

    def at(self, version: int) -> "Stage":
        self.weights.select(version)
        assert self.weight.item() == version
        return self

    def forward(self, micro: int, *_: object) -> None:
        self.read[micro] = self.weight.item()

    def backward(self, micro: int, *_: object) -> None:
        self.read_back[micro] = self.weight.item()

    def recompute(self, micro: int) -> None:
        assert self.read[micro] == self.weight.item()

    def outputs(self, _: int) -> tuple[()]:
        return ()

    input_gradients = outputs

    def all_reduce(self) -> None:
        """Nothing to sum."""

    wait_all_reduce = all_reduce


class Link:
    """Messages that have always arrived."""

    def post(self, *_: object, **__: object) -> None:
        """Nothing to do."""

    isend = irecv = wait = take = post


def run(written: dict[str, str], updates: int) -> Iterator[dict[int, Stage]]:
    """The stages of every worker, after so many updates."""
    for worker, journal in enumerate(journals(written)):
        stages = {number: Stage(number) for number in journal.facts.stages}
        initial = {(number,): facts.initial for number, facts in journal.facts.stages.items()}
        links = [{route: Link() for route in routes} for routes in (journal.facts.incoming, journal.facts.outgoing)]
        loads = [lambda *_: None] * 2
        parts = LaneComponents(stages, *links, *loads)
        lane = StreamLane(parts, UpdateRange(journal.job.passes, updates), initial)
        script = loaded(written[f"rank_{worker}.py"])
        for number in journal.facts.turns.of(updates):
            script["turn"](lane, number)
        yield stages


def job(written: dict[str, str]) -> Job:
    """The facts of a program."""
    return parsed(written["program.json"])[0]


@pytest.mark.parametrize(("name", "parameters"), CASES)
@pytest.mark.parametrize("updates", [1, 2, 3, 11])
def test_every_pass_reads_the_version_that_the_job_says(name: str, parameters: dict[str, int], updates: int) -> None:
    written = scripts_of(compiled(name, parameters))
    facts = job(written)
    for stages in run(written, updates):
        for stage in stages.values():
            offsets = [offset for offset, count in facts.reads[stage.number] for _ in range(count)]
            assert len(offsets) == facts.period
            turns = facts.period // facts.passes
            micros = range(updates * facts.passes)
            said = {m: max(0, m // facts.period * turns + offsets[m % facts.period]) for m in micros}
            assert stage.read == stage.read_back == said
            stage.at(updates)


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_a_worker_keeps_as_many_copies_as_the_proof_says(name: str, parameters: dict[str, int]) -> None:
    program = compiled(name, parameters)
    copies = [sum(s.weights.copies for s in stages.values()) for stages in run(scripts_of(program), 20)]
    assert copies == list(program.weights)


def test_the_versions_of_the_library_are_the_papers() -> None:
    assert job(scripts_of(compiled("pipedream", {"D": 3}))).reads == (((-2, 1),), ((-1, 1),), ((0, 1),))
    assert job(scripts_of(compiled("pipedream_2bw", {"D": 2, "N": 6}))).reads == (((-1, 6),), ((-1, 6),))
    assert job(scripts_of(compiled("dapple", {"D": 2}))).reads == ()
    assert job(scripts_of(compiled("dapple", {"D": 2}))).period == 0
