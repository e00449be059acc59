"""Sums, means, maxima, outputs and answers that ranks exchange outside of the schedule."""

import io
import json
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.ranks.control_group import ControlGroup
from chimera_runtime.values.mesh_tensors import meshes_of, reduce_over
from chimera_runtime.values.nested import mapped, taken_apart
from chimera_runtime.values.tensors import plain

_SUMS = "for the loss of an evaluation"
_WEIGHTS = "for what a mini-batch counts on the other ranks of a mesh"
_OUTPUTS = "for the outputs of an evaluation"


def added_over_all(control_group: ControlGroup, *numbers: float) -> list[float]:
    """Returns the sum of each number over all ranks. Raises `PeerLost` if a rank is late, or has ended."""
    sums = torch.tensor(numbers, dtype=torch.float64)
    control_group.reduce(sums, _SUMS)
    return sums.tolist()


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
    """Returns the largest ``number`` over the ranks of all pipelines that hold parts of the same parameters.

    Every rank of these pipelines calls it, with its modules. Errors as in `added_over_all`.
    """
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

    Raises `PeerLost` if a rank does not answer in time, or has ended.
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
    """Returns a value with tensors as a tensor of bytes, to be sent; of a view only the visible elements are stored."""
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
