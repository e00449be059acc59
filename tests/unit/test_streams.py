"""The lanes of programs with weight versions, run on the versions of the runtime, and what train.py says of them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chimera_ir import library
from chimera_ir.codegen.render import scripts
from chimera_ir.compilation import Compilation
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.verify.verify import Verified
from support.job import Job
from support.versions import Versions, masters

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
        self.inputs = self.gradients = [()] * 100
        self.read: dict[int, float] = {}
        self.read_back: dict[int, float] = {}

    def at(self, version: int) -> "Stage":
        self.weights.select(version)
        assert self.weight.item() == version
        return self

    def forward(self, micro: int, *_: object) -> Any:
        self.read[micro] = self.weight.item()
        return SimpleNamespace(micro=micro, take=tuple)

    def backward(self, state: Any, *_: object) -> tuple[()]:
        self.read_back[state.micro] = self.weight.item()
        return ()

    def forward_keep_input(self, micro: int, inputs: object) -> Any:
        return self.forward(micro, inputs), ()

    forward_loss = forward
    backward_loss = backward_recompute = backward

    def all_reduce(self) -> Any:
        return SimpleNamespace(wait=lambda: None)


class Lane:
    """What a script is called with: messages that have always arrived."""

    def __init__(self, stages: list[int]) -> None:
        self.stages = {number: Stage(number) for number in stages}
        self.stage = self.stages.__getitem__

    def peer(self, _: int) -> Any:
        def post(*_: object, **__: object) -> Any:
            return SimpleNamespace(tensors=(), wait=lambda: None)

        return SimpleNamespace(isend=post, irecv=post)

    def input(self, _: int) -> None:
        return None

    target = input


def run(written: dict[str, str], updates: int) -> Iterator[Lane]:
    """Every lane, after so many updates."""
    for name in sorted(name for name in written if name.startswith("rank_")):
        script: dict[str, Any] = {"__name__": name}
        exec(compile(written[name], name, "exec", dont_inherit=True), script)
        lane = Lane([*script["SLOTS"]])
        script["stream"](lane, updates)
        yield lane


def job(written: dict[str, str]) -> Job:
    """The facts of train.py."""
    text = written["train.py"]
    module: dict[str, Any] = {"Job": Job}
    exec(text[text.index("JOB = Job(") : text.index("if __name__")], module)
    found: Job = module["JOB"]
    return found


@pytest.mark.parametrize(("name", "parameters"), CASES)
@pytest.mark.parametrize("updates", [1, 2, 3, 11])
def test_every_pass_reads_the_version_that_the_job_says(name: str, parameters: dict[str, int], updates: int) -> None:
    written = scripts(compiled(name, parameters))
    facts = job(written)
    for lane in run(written, updates):
        for stage in lane.stages.values():
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
    copies = [sum(s.weights.copies for s in lane.stages.values()) for lane in run(scripts(program), 20)]
    assert copies == list(program.weights)


def test_the_versions_of_the_library_are_the_papers() -> None:
    assert job(scripts(compiled("pipedream", {"D": 3}))).reads == (((-2, 1),), ((-1, 1),), ((0, 1),))
    assert job(scripts(compiled("pipedream_2bw", {"D": 2, "N": 6}))).reads == (((-1, 6),), ((-1, 6),))
    assert job(scripts(compiled("dapple", {"D": 2}))).reads == ()
    assert job(scripts(compiled("dapple", {"D": 2}))).period == 0
