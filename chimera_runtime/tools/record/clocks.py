"""How far the clocks of the ranks are apart: the monotonic clocks of two machines have nothing in common."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from chimera_runtime.ranks.control_group import ControlGroup

ROUNDS = 16


@dataclass(frozen=True)
class ClockOffset:
    """What has to be added to this rank's clock to have that of rank 0, when this rank's clock says ``at``.

    The true offset is within ``uncertainty`` of ``offset``; all in nanoseconds.
    """

    at: int
    offset: int
    uncertainty: int


def estimate(ask: Callable[[], int], clock: Callable[[], int], rounds: int = ROUNDS) -> ClockOffset:
    """The offset of another clock, as NTP finds it: by asking for its time, of several rounds in the shortest.

    The answer was read at some moment of the round. Its middle is wrong by half of the round at most.
    """
    asked = []
    for _ in range(rounds):
        sent = clock()
        theirs = ask()
        asked.append((clock() - sent, sent, theirs))
    length, sent, theirs = min(asked)
    middle = sent + length // 2
    return ClockOffset(middle, theirs - middle, length - length // 2)


def compare(control_group: ControlGroup) -> ClockOffset:
    """The offset to rank 0; every rank calls it, and rank 0 answers them one after the other.

    Raises
    ------
    PeerLost
        If another rank does not answer within the time-out.
    """
    token = torch.zeros(1, dtype=torch.int64)
    if control_group.place.rank == 0:
        for rank in control_group.place.ranks[1:]:
            for _ in range(ROUNDS):
                control_group.recv(token, rank, "for a question about the time")
                control_group.send(torch.tensor([time.monotonic_ns()]), rank, "an answer about the time")
        return ClockOffset(time.monotonic_ns(), 0, 0)

    def ask() -> int:
        control_group.send(token, 0, "a question about the time")
        control_group.recv(token, 0, "for an answer about the time")
        return int(token.item())

    return estimate(ask, time.monotonic_ns)
