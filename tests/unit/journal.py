"""A runtime of fakes for rank scripts: it computes nothing, and writes down what a lane asks it to do."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class Journal:
    """Records what a lane does, in the words of the program, and checks what is handed to every call.

    Knows of the runtime only what its interface says. Messages are triples (kind, micro-batches, stage): what a forward
    of that stage makes (`y`), and what its backward makes (`dx`). ``groups`` are the micro-batches of the messages, by
    the first of them and the two stages. In an ``asynchronous`` lane weights have versions: sums, steps and stashes
    count them up, forwards and backwards name them.
    """

    worker: int
    stages: int
    groups: Mapping[tuple[int, int, int], tuple[int, ...]]
    lines: list[str] = field(default_factory=list)
    asynchronous: bool = False
    tags: list[tuple[str, int, int]] = field(default_factory=list)

    def lane(self) -> SimpleNamespace:
        made = VersionedStage if self.asynchronous else FakeStage
        return SimpleNamespace(
            stage=lambda s: made(self, s),
            peer=lambda w: FakePeer(self, w),
            input=lambda m: ("y", (m,), -1),
            target=lambda m: ("target", m),
        )

    def route(self, tag: int) -> tuple[tuple[int, ...], int, int]:
        """The micro-batches and the two stages that a tag stands for."""
        micro, rest = divmod(tag, 2 * self.stages)
        source, backwards = divmod(rest, 2)
        target = source - 1 if backwards else source + 1
        return self.groups[micro, source, target], source, target


@dataclass
class FakePeer:
    journal: Journal
    worker: int

    def isend(self, tensors: Any, tag: int) -> Any:
        self.journal.tags.append(("isend", self.worker, tag))
        micros, source, target = self.journal.route(tag)
        assert tensors == ("y" if source < target else "dx", micros, source)
        text = f"{listed(micros)} s{source}->s{target}"
        self.journal.lines.append(f"send {text} to w{self.worker}")
        return SimpleNamespace(wait=lambda: self.journal.lines.append(f"wait send {text}"))

    def irecv(self, buffers: Any, tag: int) -> Any:
        self.journal.tags.append(("irecv", self.worker, tag))
        micros, source, target = self.journal.route(tag)
        kind, stage, slot = buffers
        assert (kind, stage) == ("inputs" if source < target else "gradients", target)
        text = f"{listed(micros)} s{source}->s{target}"
        self.journal.lines.append(f"recv {text} from w{self.worker} into {slot}")
        return FakeReceipt(self.journal, text, ("y" if source < target else "dx", micros, source))


class FakeReceipt:
    def __init__(self, journal: Journal, text: str, content: tuple[str, tuple[int, ...], int]) -> None:
        self.journal, self.text, self.content, self.arrived = journal, text, content, False

    def wait(self) -> None:
        self.journal.lines.append(f"wait recv {self.text}")
        self.arrived = True

    @property
    def tensors(self) -> tuple[str, tuple[int, ...], int]:
        assert self.arrived, f"{self.text} is read before it has arrived"
        return self.content


class FakeStage:
    def __init__(self, journal: Journal, number: int) -> None:
        self.journal, self.number = journal, number
        self.version = ""
        self.inputs = Slots("inputs", number)
        self.gradients = Slots("gradients", number)

    def forward(self, micro: int, inputs: Any) -> Any:
        assert self.number < self.journal.stages - 1
        return self._forward(micro, inputs)

    def forward_loss(self, micro: int, inputs: Any, target: Any) -> Any:
        assert self.number == self.journal.stages - 1
        assert target == ("target", micro)
        return self._forward(micro, inputs)

    def _forward(self, micro: int, inputs: Any) -> Any:
        assert inputs == ("y", (micro,), self.number - 1)
        self.journal.lines.append(f"F m{micro} s{self.number}{self.version}")
        return SimpleNamespace(micro=micro, stage=self.number, kept=False, take=lambda: ("y", (micro,), self.number))

    def forward_keep_input(self, micro: int, inputs: Any) -> Any:
        (state,), outputs = self.forward_keep_inputs((micro,), (inputs,) if self.number == 0 else inputs)
        return state, outputs

    def forward_keep_inputs(self, micros: tuple[int, ...], inputs: Any) -> Any:
        assert self.number < self.journal.stages - 1
        return self._keep(micros, inputs), ("y", micros, self.number)

    def forward_loss_keep_input(self, micro: int, inputs: Any, target: Any) -> Any:
        (state,) = self.forward_loss_keep_inputs((micro,), (inputs,) if self.number == 0 else inputs, (target,))
        return state

    def forward_loss_keep_inputs(self, micros: tuple[int, ...], inputs: Any, targets: Any) -> Any:
        assert self.number == self.journal.stages - 1
        assert targets == tuple(("target", micro) for micro in micros)
        return self._keep(micros, inputs)

    def _keep(self, micros: tuple[int, ...], inputs: Any) -> Any:
        apart = tuple(("y", (micro,), -1) for micro in micros)
        assert inputs == (apart if self.number == 0 else ("y", micros, self.number - 1))
        self.journal.lines.extend(f"F m{micro} s{self.number}{self.version}" for micro in micros)
        return tuple(SimpleNamespace(micro=micro, stage=self.number, kept=True) for micro in micros)

    def backward(self, state: Any, gradients: Any) -> Any:
        assert gradients == ("dx", (state.micro,), self.number + 1)
        return self._backward(state, kept=False)

    def backward_recompute(self, state: Any, gradients: Any) -> Any:
        assert gradients == ("dx", (state.micro,), self.number + 1)
        return self._backward(state, kept=True)

    def backward_loss(self, state: Any) -> Any:
        assert self.number == self.journal.stages - 1
        return self._backward(state, kept=False)

    def backward_loss_recompute(self, state: Any) -> Any:
        assert self.number == self.journal.stages - 1
        return self._backward(state, kept=True)

    def _backward(self, state: Any, *, kept: bool) -> Any:
        assert (state.stage, state.kept) == (self.number, kept)
        self.journal.lines.append(f"B m{state.micro} s{self.number}{self.version}")
        return ("dx", (state.micro,), self.number)

    def all_reduce(self) -> Any:
        self.journal.lines.append(f"all_reduce s{self.number}")
        return SimpleNamespace(wait=lambda: self.journal.lines.append(f"wait all_reduce s{self.number}"))

    def step(self) -> None:
        self.journal.lines.append(f"step s{self.number}")


class VersionedStage(FakeStage):
    """A stage whose sums and steps count the versions that they lead to; its forwards and backwards are told theirs."""

    def __init__(self, journal: Journal, number: int) -> None:
        super().__init__(journal, number)
        self.sums = self.steps = 0
        self.stashed: set[int] = set()

    def at(self, version: int) -> "VersionedStage":
        assert version == self.steps or version in self.stashed
        self.version = f" v{version}"
        return self

    def all_reduce(self) -> Any:
        self.sums += 1
        text = f"all_reduce s{self.number} v{self.sums}"
        self.journal.lines.append(text)
        return SimpleNamespace(wait=lambda: self.journal.lines.append(f"wait {text}"))

    def stash(self, version: int) -> None:
        assert version == self.steps
        self.stashed.add(version)
        self.journal.lines.append(f"stash s{self.number} v{version}")

    def drop(self, version: int) -> None:
        self.stashed.remove(version)
        self.journal.lines.append(f"drop s{self.number} v{version}")

    def step(self) -> None:
        self.steps += 1
        self.journal.lines.append(f"step s{self.number} v{self.steps}")


@dataclass
class Slots:
    kind: str
    stage: int

    def __getitem__(self, slot: int) -> tuple[str, int, int]:
        return self.kind, self.stage, slot


def listed(micros: tuple[int, ...]) -> str:
    return ",".join(f"m{micro}" for micro in micros)


def fake_part(tensors: Any, start: int, stop: int, of: int) -> Any:
    kind, micros, stage = tensors
    if kind in ("inputs", "gradients"):
        assert (start, stop < of) == (0, True)
        return tensors
    assert len(micros) == of
    return kind, micros[start:stop], stage


def fake_join(messages: Any) -> Any:
    ((kind, stage),) = {(kind, stage) for kind, _, stage in messages}
    return kind, tuple(micro for _, micros, _ in messages for micro in micros), stage


def groups_of(program: list[list[str]]) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """The micro-batches of every message, by the first of them and the two stages."""
    found = (re.match(r"send (\S+) s(\d+)->s(\d+)", line) for lane in program for line in lane)
    groups = ((tuple(int(m[1:]) for m in each[1].split(",")), int(each[2]), int(each[3])) for each in found if each)
    return {(micros[0], source, target): micros for micros, source, target in groups}


def one_by_one(lane: list[str]) -> list[str]:
    """The lines of a lane, those of compute operations once for each of their micro-batches."""
    lines: list[str] = []
    for line in lane:
        kind, micros, *rest = line.split()
        many = micros.split(",") if kind in "FB" else [micros]
        lines += [" ".join([kind, micro, *rest]) for micro in many]
    return lines
