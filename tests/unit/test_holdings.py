"""Receive buffers of the library; tests/property/test_lifetimes.py counts all else that a worker holds."""

from collections import Counter

import pytest

from chimera_ir.ir.ops import Compute, Instruction, Recv
from tests.instructions import singly
from tests.unit.test_codegen import CASES, compiled, named


@pytest.mark.parametrize("case", CASES, ids=named)
def test_there_are_as_many_receive_buffers_as_are_ever_in_use(case: tuple[str, tuple[tuple[str, int], ...]]) -> None:
    program = compiled(case).program
    for lane in program.lanes:
        slots: Counter[tuple[int, int]] = Counter()
        for each in lane:
            if isinstance(each, Recv):
                shelf = each.message.source, each.message.target
                slots[shelf] = max(slots[shelf], each.slot + 1)
        assert slots == most_in_use(lane)


def most_in_use(lane: tuple[Instruction, ...]) -> Counter[tuple[int, int]]:
    """By the two stages of messages: how many are in use at most, from their posting to the end of their backward."""
    backward = {
        (micro, each.stage): place
        for place, instruction in enumerate(lane)
        for each in singly([instruction])
        if isinstance(each, Compute) and each.kind.sums
        for micro in each.micros
    }
    changes: list[tuple[int, int, tuple[int, int]]] = []
    for place, each in enumerate(lane):
        if isinstance(each, Recv):
            shelf = each.message.source, each.message.target
            end = max(backward[micro, each.message.target] for micro in each.message.micros)
            changes += [(place, 1, shelf), (end, -1, shelf)]
    now: Counter[tuple[int, int]] = Counter()
    most: Counter[tuple[int, int]] = Counter()
    for _, change, shelf in sorted(changes):
        now[shelf] += change
        most[shelf] = max(most[shelf], now[shelf])
    return most
