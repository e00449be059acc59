"""Agreement of ranks: finds facts that should be equal on all ranks and are not.

A fact is known to some ranks. Each of them adds three numbers to a sum over all ranks, which travels with the loss of
an update: 1, the digest d of the fact, and d*d. If n ranks have added something, their digests are equal exactly where
n * sum(d*d) == sum(d)**2. All ranks see the same sum, so all of them find a difference at the same update. Only then do
they exchange the facts' values, through the store.
"""

import io
import json
import math
import pickle
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime.blame import ModelError, describe
from chimera_runtime.errors import BadCheckpoint, Misuse, PeerLost, RanksDiffer
from chimera_runtime.errors import start as mistakes
from chimera_runtime.program.job import Job, Place
from chimera_runtime.program.rank_facts import Group, group_name
from chimera_runtime.ranks.messages import BlockingWait, Names, Pending, Settle, unrecorded
from chimera_runtime.ranks.monitor import Monitor
from chimera_runtime.ranks.refusals import Refusals
from chimera_runtime.ranks.rendezvous import wait_for_key
from chimera_runtime.values.mesh_tensors import meshes_of, reduce_over
from chimera_runtime.values.nested import mapped, plain, taken_apart

# The control group: what ranks exchange outside of the schedule, as tensors by gloo and as texts in a store.

T = TypeVar("T")


@dataclass(eq=False)
class ControlGroup:
    """All ranks of the pipelines: they send each other tensors by gloo, and leave texts for each other in a store.

    ``place`` is this rank's place, with ranks counted within the pipelines; ``members`` are the numbers of the ranks in
    the default process group. ``names`` writes the messages about waits that have failed. A wait may take ``timeout``
    seconds. Where messages do not go by gloo, ``monitor`` keeps the time of waits, as these do not block the host.
    """

    group: dist.ProcessGroup  # until `release`
    store: Store
    place: Place
    members: tuple[int, ...]
    names: Names
    timeout: float
    monitor: Monitor | None = None
    refusals: Refusals = field(default_factory=Refusals)

    def wait_for_key(self, key: str, source: int, what: str, seconds: float | None = None) -> bytes:
        """Returns what rank ``source`` leaves in the store under ``key``; ``what`` names the wait in the error."""
        doing = f"rank {self.place.rank} (worker {self.place.worker}): wait {what}"
        return wait_for_key(self.store, key, source, doing, self.timeout if seconds is None else seconds)

    def collect(self, key: str, value: Any, what: str) -> list[Any]:
        """Returns the ``value`` of every rank, in the order of ranks, through the store as JSON; all ranks call it."""
        self.store.set(f"{key}/{self.place.rank}", json.dumps(value))
        return [json.loads(self.wait_for_key(f"{key}/{rank}", rank, what)) for rank in self.place.ranks]

    def decide(self, key: str, value: Any, verdict: Callable[[list[Any]], T], what: str) -> T:
        """Returns on all ranks the ``verdict`` of rank 0 on the ``value`` of every rank, which no other rank reads."""
        self.store.set(f"{key}/{self.place.rank}", json.dumps(value))
        if self.place.rank == 0:
            values = [json.loads(self.wait_for_key(f"{key}/{rank}", rank, what)) for rank in self.place.ranks]
            self.store.set(key, json.dumps(verdict(values)))
        decided: T = json.loads(self.wait_for_key(key, 0, what))
        return decided

    @contextmanager
    def waiting(self, operation: str, peers: Sequence[int] = ()) -> Iterator[None]:
        """Turns failures of the communication inside into an error that names the operation and the peers.

        Raises `PeerLost` if it fails or is late, or an earlier wait was; `Misuse` after `release`.
        """
        if not hasattr(self, "group"):
            raise Misuse(mistakes.PIPELINE_IS_CLOSED)
        self.check()
        try:
            yield
        except RuntimeError as error:
            self.check()
            raise self.lost(operation, peers, error) from None

    def lost(self, operation: str, peers: Sequence[int], error: Exception) -> PeerLost:
        """Returns the error for a failed wait for ``peers``; no peers stand for all other ranks."""
        only = [1 - self.place.rank] if len(self.members) == 2 else []
        return self.names.lost(operation, peers or only, error)

    def check(self) -> None:
        """Raises `PeerLost` if a wait has not ended in time, torchrun has died, or another rank cannot go on."""
        self.names.require_launcher()
        self.refusals.check()
        if self.monitor is not None:
            self.monitor.check()

    def release(self) -> None:
        """Drops the communicator: torch frees its threads and descriptors with the last reference."""
        del self.group

    @cached_property
    def wait(self) -> Settle:
        """Function that waits for a posted message or sum; the error of a late one is its own or the monitor's."""
        return BlockingWait(self.timeout) if self.monitor is None else self.monitor.settle

    def settle(self, work: Pending | None, operation: str, peers: Sequence[int] = ()) -> None:
        """Waits for an operation outside of the schedule; errors as in `waiting`."""
        with self.waiting(operation, peers):
            if work is not None:
                work.wait(timedelta(seconds=self.timeout))

    def send(self, tensor: torch.Tensor, rank: int, operation: str) -> None:
        """Sends a tensor to a rank; errors as in `waiting`."""
        with self.waiting(operation, [rank]):
            work = dist.isend(plain(tensor.detach().cpu()), self.members[rank], group=self.group)
        self.settle(work, operation, [rank])

    def recv(self, tensor: torch.Tensor, rank: int, operation: str, tag: int = 0) -> None:
        """Receives a tensor from a rank; errors as in `waiting`."""
        with self.waiting(operation, [rank]):
            work = dist.irecv(tensor, self.members[rank], group=self.group, tag=tag)
        self.settle(work, operation, [rank])

    def post_reduce(
        self, tensor: torch.Tensor, operation: str, kind: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> dist.Work | None:
        """Posts the sum, or another ``kind`` of reduction, of a tensor over all ranks; `settle` waits for it."""
        with self.waiting(operation):
            work: dist.Work | None = unrecorded(dist.all_reduce, tensor, kind, group=self.group, async_op=True)
            return work

    def reduce(self, tensor: torch.Tensor, operation: str, kind: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replaces a tensor by its sum, or another ``kind`` of reduction, over all ranks; errors as in `waiting`."""
        self.settle(self.post_reduce(tensor, operation, kind), operation)

    def barrier(self, operation: str) -> None:
        """Waits until all ranks have called `barrier`; errors as in `waiting`."""
        with self.waiting(operation):
            work = dist.barrier(self.group, async_op=True)
        self.settle(work, operation)


# Sums, means, maxima, outputs and answers that ranks exchange outside of the schedule.

_SUMS = "for the loss of an evaluation"
_WEIGHTS = "for what a mini-batch counts on the other ranks of a mesh"
_INPUTS = "for the inputs that micro-batches of an evaluation have"
_OUTPUTS = "for the outputs of an evaluation"


def added_over_all(control_group: ControlGroup, *numbers: float) -> list[float]:
    """Returns the sum of each number over all ranks. Raises `PeerLost` if a rank is late, or has ended."""
    sums = torch.tensor(numbers, dtype=torch.float64)
    control_group.reduce(sums, _SUMS)
    return sums.tolist()


def largest_in_copy(control_group: ControlGroup, numbers: torch.Tensor) -> torch.Tensor:
    """Returns the largest of each number over the ranks of this copy, which all call it; errors as `added_over_all`."""
    place = control_group.place
    first, *others = [place.rank_of(place.copy, worker) for worker in range(place.workers)]
    largest = numbers.clone()
    if place.rank != first:
        control_group.send(largest, first, _INPUTS)
        control_group.recv(largest, first, _INPUTS)
        return largest
    for rank in others:
        received = torch.empty_like(largest)
        control_group.recv(received, rank, _INPUTS)
        largest = largest.maximum(received)
    for rank in others:
        control_group.send(largest, rank, _INPUTS)
    return largest


def averaged_in_mesh(
    control_group: ControlGroup, numbers: Sequence[float], mesh: Any, *, device: torch.device
) -> list[float]:
    """Returns the means of numbers over the ranks of a mesh, which all call it; errors as in `added_over_all`."""
    means = torch.tensor(numbers, dtype=torch.float64, device=device)
    with control_group.waiting(_WEIGHTS):
        reduce_over(mesh, means, lambda work: control_group.settle(work, _WEIGHTS))
    return means.tolist()


def largest_of_rows(
    control_group: ControlGroup, modules: Iterable[torch.nn.Module], number: float, device: torch.device
) -> float:
    """Returns the largest ``number`` over all ranks whose pipelines hold parts of the same parameters."""
    if len(control_group.members) == dist.get_world_size():
        return number
    largest = torch.tensor([number], dtype=torch.float64, device=device)
    with control_group.waiting(_WEIGHTS):
        for mesh in meshes_of(p for module in modules for p in module.parameters()):
            reduce_over(mesh, largest, lambda work: control_group.settle(work, _WEIGHTS), largest=True)
    largest = largest.cpu()
    control_group.reduce(largest, _WEIGHTS, dist.ReduceOp.MAX)
    return float(largest)


def gathered(
    control_group: ControlGroup, workers: Sequence[int], outputs: dict[int, Any], *, everywhere: bool = True
) -> dict[int, Any]:
    """Returns the outputs of all micro-batches, by micro-batch in ascending order, with tensors on the CPU.

    ``workers`` are the workers of this copy that have computed outputs; ``outputs`` has those of this rank. All ranks
    of the copy call it and get the result; if not ``everywhere``, the ``workers`` alone do.
    """
    place = control_group.place
    by_micro: dict[int, Any] = {}
    ranks = {worker: place.rank_of(place.copy, worker) for worker in (range(place.workers) if everywhere else workers)}
    for worker in workers:
        source = ranks[worker]
        if source == place.rank:
            content = mapped(outputs, torch.Tensor.cpu)
            bits = _packed(content)
            for rank in (rank for rank in ranks.values() if rank != source):
                control_group.send(torch.tensor([len(bits)]), rank, _OUTPUTS)
                control_group.send(bits, rank, _OUTPUTS)
        else:
            length = torch.zeros(1, dtype=torch.int64)
            control_group.recv(length, source, _OUTPUTS)
            received = bytearray(int(length))
            control_group.recv(torch.frombuffer(received, dtype=torch.uint8), source, _OUTPUTS)
            content = torch.load(io.BytesIO(received), weights_only=False)
        by_micro |= content
    return {micro: by_micro[micro] for micro in sorted(by_micro)}


def _packed(content: Any) -> torch.Tensor:
    """Returns a value as bytes to be sent; of a view only the visible elements are stored."""
    buffer = io.BytesIO()
    torch.save(mapped(content, torch.Tensor.clone), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def send_value(control_group: ControlGroup, value: Any, rank: int, operation: str) -> None:
    """Sends a value to a rank, tensor by tensor; `receive_value` receives it. Errors as in `ControlGroup.send`."""
    tensors, form = taken_apart(value)
    head = pickle.dumps((form, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]))
    control_group.send(torch.tensor([len(head)]), rank, operation)
    control_group.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), rank, operation)
    for tensor in tensors:
        if tensor.numel():
            control_group.send(plain(tensor.detach().cpu()).reshape(-1).view(torch.uint8), rank, operation)


def receive_value(control_group: ControlGroup, rank: int, operation: str) -> Any:
    """Receives what a rank sends by `send_value`, with tensors on the CPU; errors as in `ControlGroup.recv`."""
    length = torch.zeros(1, dtype=torch.int64)
    control_group.recv(length, rank, operation)
    head = torch.zeros(int(length), dtype=torch.uint8)
    control_group.recv(head, rank, operation)
    form, described = pickle.loads(head.numpy().tobytes())
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in described]
    for tensor in tensors:
        if tensor.numel():
            control_group.recv(tensor.view(-1).view(torch.uint8), rank, operation)
    return form.filled(tensors)


class Enquiry:
    """Questions of rank 0, which works for any time, to the other ranks, which `serve` meanwhile.

    ``name`` is a prefix of keys in the store. ``answers`` has a function for each kind of question; it gets the rest of
    the question, numbers and texts. ``what`` names the waits of the other ranks in errors.
    """

    def __init__(
        self, control_group: ControlGroup, name: str, answers: Mapping[str, Callable[..., Any]], what: str
    ) -> None:
        self.control_group = control_group
        self.name = name
        self._answers = answers
        self._what = what
        self._count = 0

    def ask(self, rank: int, kind: str, *rest: Any) -> Any:
        """Returns on rank 0 the answer of a rank, with tensors on the CPU if that is another one."""
        if rank == 0:
            return self._answers[kind](*rest)
        self._publish("ask", rank, kind, *rest)
        return receive_value(self.control_group, rank, f"for an answer, {self._what}")

    def end(self, *outcome: Any) -> None:
        """Ends `serve` on the other ranks, which returns the outcome."""
        self._publish("end", *outcome)

    def serve(self) -> list[Any]:
        """Answers the questions of rank 0 until `end`, for any time: if rank 0 dies, torchrun ends this rank."""
        while True:
            key = f"{self.name}/{self._next()}"
            words: list[Any] = json.loads(self.control_group.wait_for_key(key, 0, self._what, math.inf))
            if words[0] == "end":
                return words[1:]
            _, rank, kind, *rest = words
            if rank == self.control_group.place.rank:
                send_value(self.control_group, self._answers[kind](*rest), 0, self._what)

    def _publish(self, *words: Any) -> None:
        self.control_group.store.set(f"{self.name}/{self._next()}", json.dumps(words))

    def _next(self) -> int:
        self._count += 1
        return self._count


# Exchange of objects outside of training: values of any kind, and errors that all ranks raise together.


class ObjectExchange:
    """Exchange of Python objects among the ranks of a group of gloo; all ranks call each method.

    ``what`` says in messages what is exchanged. A rank waits ``timeout`` seconds for another one, which may have files
    to read or write first; then every method raises `PeerLost`.
    """

    def __init__(self, group: dist.ProcessGroup | None, what: str, timeout: float) -> None:
        self.group = group
        self._what = what
        self._timeout = timedelta(seconds=timeout)
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def close(self) -> None:
        """Destroys the group; no exchange may follow."""
        dist.destroy_process_group(self.group)
        del self.group

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in their order."""
        values: list[Any] = [None] * self.size
        with self.peer_lost_errors():
            dist.monitored_barrier(self.group, self._timeout)  # the gather has no time-out of its own
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_results(self, call: Callable[[], T], refused: Callable[[str], str] = str) -> list[T]:
        """Returns the results of a call on all ranks; if it raises an error on any rank, all ranks raise an error.

        A rank whose own call failed raises that error; the others raise the error of the first rank whose call failed.
        `Misuse` and errors of the user's code stay as they are. Any other becomes a `BadCheckpoint`:
        ``refused(cause)``.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = call()
        except (Misuse, ModelError) as raised:
            error = raised
        except BadCheckpoint as raised:
            error = BadCheckpoint(refused(f"{raised}"))
        except PeerLost:
            raise
        except Exception as raised:
            error = BadCheckpoint(refused(mistakes.error_of_a_rank(rank=self.rank, error=raised)))
            error.__cause__ = raised
        results = self.all_gather((_error_text(error), value))
        if error is not None:
            raise error
        for failure, _ in results:
            if failure is not None:
                kind, words = failure
                raise kind(words)
        return [value for _, value in results]

    def on_all_ranks(self, call: Callable[[], T], refused: Callable[[str], str] = str) -> T:
        """Makes a call on every rank, and returns this rank's result; ``refused`` and errors as in `gather_results`."""
        results: list[T] = []
        self.gather_results(lambda: results.append(call()), refused)
        return results[0]

    def require_none(self, complaint: str | None, kind: type[Exception]) -> None:
        """Raises the first rank's complaint on all ranks, as an error of class ``kind``; passes if no rank has one."""
        first = next(filter(None, self.all_gather(complaint)), None)
        if first is not None:
            raise kind(first)

    @contextmanager
    def peer_lost_errors(self) -> Iterator[None]:
        """Turns errors of the communication inside into `PeerLost`."""
        try:
            yield
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            late = re.search(r"Rank (\d+) failed to pass", cause)
            if late is not None:
                cause = f"no answer from rank {late[1]} within {self._timeout.total_seconds():g} s (timeout)"
            raise mistakes.objects_are_late(rank=self.rank, what=self._what, why=cause) from None


def _error_text(error: Exception | None) -> tuple[type[Exception], str] | None:
    if error is None:
        return None
    if isinstance(error, ModelError):
        return BadCheckpoint, describe(error)
    return type(error), f"{error}"


Text = dict[str, str]
"""The value of a fact as text for messages: the text of each of its parts, by name."""

Fact = tuple[int, Callable[[], Text]]
"""The digest of a value, and a function that returns the value as text."""

Key = tuple[str, int | Group, int]
"""Key of a fact: its kind; the copy or weight group that it is about, else 0; for data the part of it, else 0."""

Facts = Mapping[Key, Fact]

TERMS: Key = ("terms", 0, 0)
STEPS: Key = ("steps", 0, 0)
POSITION: Key = ("position", 0, 0)
PARTS = ("inputs", "targets", "keyword arguments")

_BITS = 20
_PATIENCE = 5.0
"""Seconds that a rank waits for the values of other ranks, which may be stuck in the next update."""

_MOST = 4
"""Number of differences of a fact that a message lists."""

_TITLES = {
    "terms": "ranks differ in what they give step",
    "steps": "ranks differ in the steps of their optimizers",
    "position": "ranks are given different mini-batches of their loaders",
    "data": "ranks of copy {of} are given different {part}",
    "settings": "optimizers of different ranks step {of} in different ways",
    "weights": "the replicas of {of} have drifted apart",
}
_ADVICE = {
    "terms": "let every rank make the same updates with the same arguments",
    "steps": "call the optimizer's step() on every rank after the same updates, with a GradScaler after "
    "pipe.unscale_(scaler, optimizer); to leave a stage as it is, set its learning rate to 0",
    "position": "make the loaders alike, and let every rank take each of their mini-batches",
    "data": "every rank of a copy gives the same mini-batch, drawn with the same seeds, or None for what it does not "
    "use; pipe.loader does that",
    "settings": "give what several ranks hold the same optimizer with the same settings on all of them, and step "
    "schedulers on every rank",
    "weights": "go on from the last checkpoint, and change weights, by hand or by an optimizer, on all ranks that hold "
    "them alike; keep in a buffer (register_buffer) what a forward changes; a rank that computes otherwise may have "
    "faulty hardware",
}
_SCALE_ADVICE = "call pipe.unscale_(scaler, optimizer) on every rank before scaler.step(optimizer)"
SCALE = "scale of the GradScaler"


def digest_of(text: str) -> int:
    """A digest of a text, the same in every process."""
    return short(crc32(text.encode()))


def short(number: int) -> int:
    """Returns the last 20 bits of a digest: small enough for sums of squares to be exact in float64."""
    return number & ((1 << _BITS) - 1)


def fact_of(terms: Mapping[str, float]) -> Fact:
    """Makes a fact of numbers by their names."""
    return short(hash((*terms.values(),))), lambda: {name: f"{value}" for name, value in terms.items()}


def settings_of(group: Group) -> Key:
    """Key of the settings with which optimizers step a weight group."""
    return ("settings", group, 0)


def weights_of(group: Group) -> Key:
    """Key of the weights of a weight group."""
    return ("weights", group, 0)


class FactComparison:
    """Finds out, by one sum over all ranks, whether they agree in facts (data, settings, weights).

    All ranks list the same keys of facts. ``shared`` are the weight groups that several ranks hold.
    """

    def __init__(self, control_group: ControlGroup, job: Job) -> None:
        self._control_group = control_group
        self._place = place = control_group.place
        self._job = job
        self.shared = tuple(group for group in job.groups if len(place.ranks_of(job.members(group))) > 1)
        # Each key has three places in the sum: the number of ranks that know the fact, the sum of their digests, and
        # the sum of the squares of these.
        keys = [TERMS, STEPS, POSITION]
        keys += [("data", copy, part) for copy in range(place.copies) for part in range(len(PARTS))]
        keys += [of(group) for of in (settings_of, weights_of) for group in self.shared]
        ends = (len(job.members(stages)) for stages in (job.sources, job.sinks))
        self._users = *ends, place.workers  # for each part of the data, in a copy
        self._places = {key: 3 * number for number, key in enumerate(keys)}
        self._zeros = [0.0] * (3 * len(keys)) if len(control_group.members) > 1 else []
        self._comparisons = 0

    def numbers(self, facts: Facts) -> list[float]:
        """Returns the numbers that this rank adds to the sum: 1, digest and its square for each fact, else zeros."""
        numbers = self._zeros.copy()
        if numbers:
            for key, (digest, _) in facts.items():
                place = self._places[key]
                numbers[place : place + 3] = (1.0, digest, digest * digest)
        return numbers

    def number(self) -> int:
        """Counts a comparison and returns its number, the same on all ranks."""
        self._comparisons += 1
        return self._comparisons

    def differing(self, sums: Sequence[float]) -> list[Key]:
        """Returns the keys of the facts in which ranks differ that know them, from the sum of all `numbers`."""
        remaining = iter(sums)
        if all(n * squares == total * total for n, total, squares in zip(remaining, remaining, remaining, strict=True)):
            return []
        keys = [key for key, i in self._places.items() if sums[i] * sums[i + 2] != sums[i + 1] * sums[i + 1]]
        parts = {copy: {part for kind, of, part in keys if (kind, of) == ("data", copy)} for _, copy, _ in keys}
        return [key for key in keys if key[0] != "data" or self._is_harmful(parts[key[1]])]

    def _is_harmful(self, parts: Set[int]) -> bool:
        """Whether ranks of a copy must not differ in ``parts``: inputs (0), targets (1), keyword arguments (2).

        A part that only one rank uses may differ, as the others may draw another random variant of it. If two parts
        differ, the ranks have probably loaded different mini-batches, and inputs of one would meet targets of another.
        """
        return len(parts) > 1 or any(self._users[part] > 1 for part in parts)

    def error(self, number: int, where: str, keys: Sequence[Key], facts: Facts) -> RanksDiffer:
        """Exchanges values with the other ranks for a few seconds, and returns an error that describes them."""
        place = {str(self._places[key]): text() for key, (_, text) in facts.items() if key in keys}
        values = self._exchanged(number, place, {rank for key in keys for rank in self._ranks(key)})
        complaints = [self._complaint(key, values) for key in keys]
        advice = dict.fromkeys(advice for _, advice in complaints)
        return mistakes.facts_differ(where, [difference for difference, _ in complaints], advice)

    def _exchanged(self, number: int, mine: Mapping[str, Text], ranks: Iterable[int]) -> dict[int, dict[str, Text]]:
        control, me = self._control_group, self._place.rank
        deadline = time.monotonic() + min(_PATIENCE, control.timeout)
        values: dict[int, dict[str, Text]] = {me: dict(mine)}
        with suppress(RuntimeError):  # the store is gone
            control.store.set(f"differ/{number}/{me}", json.dumps(mine))
            for rank in sorted({*ranks} - {me}):
                with suppress(PeerLost):
                    left = max(0.0, deadline - time.monotonic())
                    text = control.wait_for_key(f"differ/{number}/{rank}", rank, "for a value", left)
                    values[rank] = json.loads(text)
        return dict(sorted(values.items()))

    def _ranks(self, key: Key) -> Sequence[int]:
        kind, of, _ = key
        place = self._place
        if isinstance(of, tuple):
            return place.ranks_of(self._job.members(of))
        return [place.rank_of(of, worker) for worker in range(place.workers)] if kind == "data" else place.ranks

    def _complaint(self, key: Key, values: Mapping[int, Mapping[str, Text]]) -> tuple[str, str]:
        kind, of, part = key
        index = str(self._places[key])
        texts = {rank: of_rank[index] for rank, of_rank in values.items() if index in of_rank}
        names = list(dict.fromkeys(name for text in texts.values() for name in text))
        differences = [words for name in names if (words := _compared(name, texts))]
        if len(differences) > _MOST:
            differences[_MOST:] = [f"and {len(differences) - _MOST} more"]
        silent = [rank for rank in self._ranks(key) if rank not in values]
        if not differences:
            differences = [
                f"{name} is {text[name]} on {_in_words([rank])}" for rank, text in texts.items() for name in text
            ]
        if silent:
            differences.append(f"no answer from {_in_words(silent)}")
        title = _TITLES[kind].format(of=group_name(of) if isinstance(of, tuple) else of, part=PARTS[part])
        advice = _SCALE_ADVICE if kind == "terms" and SCALE in " ".join(differences) else _ADVICE[kind]
        return f"{title} ({', '.join(differences)})", advice


def _compared(name: str, texts: Mapping[int, Text]) -> str | None:
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, text in texts.items():
        holders[text.get(name, "not there")].append(rank)
    if len(holders) == 1:
        return None
    return f"{name} is " + " and ".join(f"{value} on {_in_words(ranks)}" for value, ranks in holders.items())


def _in_words(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *most, last = ranks
    return f"ranks {', '.join(map(str, most))} and {last}"
