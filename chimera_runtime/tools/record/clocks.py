"""Offsets between the clocks of the ranks: the monotonic clocks of two machines are unrelated."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from chimera_runtime.ranks.control_group import ControlGroup

ROUNDS = 16


@dataclass(frozen=True)
class OffsetEstimate:
    """Rank 0's clock minus this rank's clock, at the time ``at`` of this rank's clock, in nanoseconds.

    The true difference is within ``uncertainty`` of ``offset``.
    """

    at: int
    offset: int
    uncertainty: int


def estimate(ask: Callable[[], int], clock: Callable[[], int], rounds: int = ROUNDS) -> OffsetEstimate:
    """Estimates the offset of another clock as NTP does: from the shortest of several rounds of question and answer.

    The other clock was read at some moment of the round; the middle of the round is off by half of it at most.
    """
    answers = []
    for _ in range(rounds):
        sent = clock()
        theirs = ask()
        answers.append((clock() - sent, sent, theirs))
    length, sent, theirs = min(answers)
    middle = sent + length // 2
    return OffsetEstimate(middle, theirs - middle, length - length // 2)


def compare(control_group: ControlGroup) -> OffsetEstimate:
    """Measures the offset to rank 0; every rank calls it, and rank 0 answers one rank after the other.

    Raises `PeerLost` if another rank does not answer within the time-out.
    """
    token = torch.zeros(1, dtype=torch.int64)
    if control_group.place.rank == 0:
        for rank in control_group.place.ranks[1:]:
            for _ in range(ROUNDS):
                control_group.recv(token, rank, "for a question about the time")
                control_group.send(torch.tensor([time.monotonic_ns()]), rank, "an answer about the time")
        return OffsetEstimate(time.monotonic_ns(), 0, 0)

    def ask() -> int:
        control_group.send(token, 0, "a question about the time")
        control_group.recv(token, 0, "for an answer about the time")
        return int(token.item())

    return estimate(ask, time.monotonic_ns)
