"""Fakes for rank scripts: stages and links that compute nothing, and write down what a lane asks them to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from itertools import chain
from typing import Any

from chimera_runtime.lane import Lane
from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.lane.stream_lane import StreamLane, UpdateRange
from chimera_runtime.program.compiled_program import parsed
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.rank_facts import Group, RankFacts, group_text


@dataclass
class Journal:
    """Records what a lane does, in the words of the program, and checks what is handed to every call.

    Values are triples (kind, micro-batches, stage): what a forward of that stage makes (`y`), and what its backward
    makes (`dx`). In a stream weights have versions: sums, steps and stashes count them up, forwards and backwards name
    them.
    """

    job: Job
    facts: RankFacts
    worker: int
    lines: list[str] = field(default_factory=list)

    def lane(self) -> Lane:
        made, tied = (VersionedStage, VersionedWeights) if self.facts.turns else (FakeStage, FakeWeights)
        parts: tuple[Any, ...] = (
            {number: made(self, number) for number in self.facts.stages},
            {route: FakeIncoming(self, *route[:3], self.rooms(*route[:3])) for route in self.facts.incoming},
            {route: FakeOutgoing(self, *route[:3]) for route in self.facts.outgoing},
            lambda first, micro, *_stage: ("y", (first + micro,), -1),
            lambda first, micro, *_stage: ("target", first + micro),
        )
        ties = {tie.stages: tied(self, tie.stages) for tie in self.facts.ties}
        if not self.facts.turns:
            return Lane(LaneComponents(*parts, ties))
        return StreamLane(LaneComponents(*parts, ties), UpdateRange(self.job.passes), self.facts.initial)

    def rooms(self, source: int, target: int, _worker: int) -> Sequence[int]:
        """For how many micro-batches each slot of a link has room."""
        facts = self.facts.stages[target]
        value = "y" if source < target else "dx"
        return facts.slots[value][self.job.makers(value, target).index(source)]

    def evaluated_rooms(self, source: int, target: int) -> Sequence[int]:
        """The same of an evaluation."""
        return self.facts.evaluation.slots[target][self.job.feeding[target].index(source)]

    def run(self, script: Mapping[str, Any], updates: int) -> None:
        """Runs the lane of a script: one update or, in a stream, so many."""
        lane = self.lane()
        if not isinstance(lane, StreamLane):
            script["update"](lane)
            return
        lane.run.updates = updates
        for number in self.facts.turns.of(updates):
            script["turn"](lane, number)

    def evaluate(self, script: Mapping[str, Any]) -> None:
        """Runs the forwards alone."""
        facts = self.facts.evaluation
        parts = LaneComponents(
            {number: EvaluatedStage(self, number) for number in self.facts.stages},
            {route: FakeIncoming(self, *route[:3], self.evaluated_rooms(*route[:2])) for route in facts.incoming},
            {route: FakeOutgoing(self, *route[:3]) for route in facts.outgoing},
            lambda first, micro, *_stage: ("y", (first + micro,), -1),
            lambda first, micro, *_stage: ("target", first + micro),
        )
        script["evaluate"](Lane(parts))


def journals(written: Mapping[str, str]) -> list[Journal]:
    """A journal for every worker of a program."""
    job, ranks = parsed(written["program.json"])
    return [Journal(job, facts, worker) for worker, facts in enumerate(ranks)]


def loaded(text: str, name: str = "rank") -> dict[str, Any]:
    """What a rank script defines."""
    module: dict[str, Any] = {"__name__": name}
    exec(compile(text, name, "exec", dont_inherit=True), module)
    return module


def group(micros: Micros) -> tuple[int, ...]:
    return micros if isinstance(micros, tuple) else (micros,)


def listed(journal: Journal, micros: Micros) -> str:
    slices = journal.job.slices
    if slices > 1:
        return ",".join(f"m{micro // slices} q{micro % slices}" for micro in group(micros))
    return ",".join(f"m{micro}" for micro in group(micros))


def values_of(kind: str, micros: tuple[int, ...], stages: Sequence[int]) -> tuple[Any, ...]:
    """What a stage is handed of several: the values of one after the other."""
    return tuple(chain.from_iterable((kind, micros, stage) for stage in stages))


def made_for(kind: str, micros: Micros, readers: Sequence[int]) -> set[Any]:
    """What a stage makes: a value for each of several stages that read it, or one for the only one."""
    return (
        {(kind, micros, reader) for reader in readers} if len(readers) > 1 else {(kind, micros)} if readers else set()
    )


class FakeLink:
    def __init__(self, journal: Journal, source: int, target: int, worker: int) -> None:
        self.journal, self.source, self.target, self.worker = journal, source, target, worker
        self.kind = "y" if source < target else "dx"
        self.under_way: set[Micros] = set()

    def text(self, micros: Micros) -> str:
        return f"{listed(self.journal, micros)} s{self.source}->s{self.target}"


class FakeOutgoing(FakeLink):
    def isend(self, micros: Micros, tensors: Any) -> None:
        assert tensors == (self.kind, group(micros), self.source)
        self.under_way.add(micros)
        self.journal.lines.append(f"send {self.text(micros)} to w{self.worker}")

    def wait(self, micros: Micros) -> None:
        self.under_way.remove(micros)
        self.journal.lines.append(f"wait send {self.text(micros)}")


class FakeIncoming(FakeLink):
    def __init__(self, journal: Journal, source: int, target: int, worker: int, rooms: Sequence[int]) -> None:
        super().__init__(journal, source, target, worker)
        self.rooms = rooms
        self.arrived: set[Micros] = set()

    def irecv(self, micros: Micros, into: int) -> None:
        assert len(group(micros)) <= self.rooms[into]
        self.under_way.add(micros)
        self.journal.lines.append(f"recv {self.text(micros)} from w{self.worker} into {into}")

    def wait(self, micros: Micros) -> None:
        self.under_way.remove(micros)
        self.arrived.add(micros)
        self.journal.lines.append(f"wait recv {self.text(micros)}")

    def take(self, micros: Micros) -> Any:
        self.arrived.remove(micros)
        return self.kind, group(micros), self.source


class FakeWeights:
    """The weights of a stage or a tie."""

    def __init__(self, journal: Journal, stages: Group) -> None:
        self.journal, self.name = journal, group_text(stages)

    def all_reduce(self) -> None:
        self.journal.lines.append(f"all_reduce {self.name}")

    def wait_all_reduce(self) -> None:
        self.journal.lines.append(f"wait all_reduce {self.name}")

    def step(self) -> None:
        self.journal.lines.append(f"step {self.name}")


class VersionedWeights(FakeWeights):
    """Weights whose sums and steps count the versions that they lead to."""

    def __init__(self, journal: Journal, stages: Group) -> None:
        super().__init__(journal, stages)
        self.sums = self.steps = 0
        self.stashed: set[int] = set()

    def all_reduce(self) -> None:
        self.sums += 1
        self.journal.lines.append(f"all_reduce {self.name} v{self.sums}")

    def wait_all_reduce(self) -> None:
        self.journal.lines.append(f"wait all_reduce {self.name} v{self.sums}")

    def stash(self, version: int) -> None:
        assert version == self.steps
        self.stashed.add(version)
        self.journal.lines.append(f"stash {self.name} v{version}")

    def drop(self, version: int) -> None:
        self.stashed.remove(version)
        self.journal.lines.append(f"drop {self.name} v{version}")

    def step(self) -> None:
        self.steps += 1
        self.journal.lines.append(f"step {self.name} v{self.steps}")


class FakeStage(FakeWeights):
    def __init__(self, journal: Journal, number: int) -> None:
        super().__init__(journal, (number,))
        self.number = number
        self.version = ""
        self.waiting: set[int] = set()
        self.halfway: set[int] = set()
        self.again: set[int] = set()
        self.under_way: set[tuple[str, Micros]] = set()
        self.on_host: set[tuple[str, Micros]] = set()
        self.made: set[tuple[str, Micros] | tuple[str, Micros, int]] = set()
        self.feeding, self.fed = journal.job.feeding[number], journal.job.fed[number]

    def forward(self, micros: Micros, inputs: Any, targets: Any = None) -> None:
        numbers = group(micros)
        if self.feeding:
            assert inputs == values_of("y", numbers, self.feeding)
        else:
            loaded = tuple(("y", (micro,), -1) for micro in numbers)
            assert inputs == (loaded if isinstance(micros, tuple) else loaded[0])
        last = not self.fed
        judged = tuple(("target", micro) for micro in numbers)
        assert targets == ((judged if isinstance(micros, tuple) else judged[0]) if last else None)
        self.waiting |= {*numbers}
        self.made |= made_for("y", micros, self.fed)
        self.journal.lines.append(f"F {listed(self.journal, micros)} s{self.number}{self.version}")

    def outputs(self, micros: Micros, *reader: int) -> Any:
        self.made.remove(("y", micros, *reader))
        return "y", group(micros), self.number

    def recompute(self, micros: Micros) -> None:
        assert self.waiting >= {*group(micros)}
        assert self.again.isdisjoint(group(micros))
        self.again |= {*group(micros)}
        self.journal.lines.append(f"recompute {listed(self.journal, micros)} s{self.number}{self.version}")

    def backward(self, micros: Micros, gradients: Any = ()) -> None:
        assert gradients == values_of("dx", group(micros), self.fed)
        assert self.waiting >= {*group(micros)}
        assert ("", micros) not in self.on_host
        self.waiting -= {*group(micros)}
        self.again -= {*group(micros)}
        self.made |= made_for("dx", micros, self.feeding)
        self.journal.lines.append(f"B {listed(self.journal, micros)} s{self.number}{self.version}")

    def pair(self, forward: tuple[Any, ...], other: "FakeStage", backward: tuple[Any, ...]) -> None:
        self.forward(*forward)
        other.backward(*backward)
        self.journal.lines[-2:] = [" & ".join(self.journal.lines[-2:])]

    def backward_input(self, micros: Micros, gradients: Any = ()) -> None:
        self.backward(micros, gradients)
        self.halfway |= {*group(micros)}
        self.journal.lines[-1] = f"I {listed(self.journal, micros)} s{self.number}{self.version}"

    def backward_weights(self, micros: Micros) -> None:
        assert self.halfway >= {*group(micros)}
        assert ("_operands", micros) not in self.on_host
        self.halfway -= {*group(micros)}
        self.journal.lines.append(f"W {listed(self.journal, micros)} s{self.number}{self.version}")

    def input_gradients(self, micros: Micros, *reader: int) -> Any:
        self.made.remove(("dx", micros, *reader))
        return "dx", group(micros), self.number

    def _launch(self, kind: str, micros: Micros) -> None:
        what = kind.removeprefix("offload").removeprefix("reload")
        assert (self.halfway if what else self.waiting) >= {*group(micros)}
        assert ((what, micros) in self.on_host) == kind.startswith("reload")
        self.under_way.add((kind, micros))
        self.journal.lines.append(f"{kind} {listed(self.journal, micros)} s{self.number}{self.version}")

    def _wait(self, kind: str, micros: Micros) -> None:
        self.under_way.remove((kind, micros))
        self.on_host ^= {(kind.removeprefix("offload").removeprefix("reload"), micros)}
        self.journal.lines.append(f"wait {kind} {listed(self.journal, micros)} s{self.number}{self.version}")

    offload = partialmethod(_launch, "offload")
    reload = partialmethod(_launch, "reload")
    wait_offload = partialmethod(_wait, "offload")
    wait_reload = partialmethod(_wait, "reload")
    offload_operands = partialmethod(_launch, "offload_operands")
    reload_operands = partialmethod(_launch, "reload_operands")
    wait_offload_operands = partialmethod(_wait, "offload_operands")
    wait_reload_operands = partialmethod(_wait, "reload_operands")


class EvaluatedStage(FakeStage):
    """A stage that nothing but forwards may be asked of."""

    def begin(self, update: int) -> None:
        raise AssertionError

    def backward(self, micros: Micros, gradients: Any = ()) -> None:
        raise AssertionError

    def all_reduce(self) -> None:
        raise AssertionError

    def step(self) -> None:
        raise AssertionError


class VersionedStage(VersionedWeights, FakeStage):
    """A stage whose forwards and backwards are told their versions."""

    def __init__(self, journal: Journal, number: int) -> None:
        FakeStage.__init__(self, journal, number)
        self.sums = self.steps = 0
        self.stashed: set[int] = set()

    def at(self, version: int) -> "VersionedStage":
        assert version == self.steps or version in self.stashed
        self.version = f" v{version}"
        return self
