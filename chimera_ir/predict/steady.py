"""How long an update takes where one follows the other: the critical cycle of a program's events.

Events of one turn are those of any other, moved in time, and what waits for what is the same in every turn. The largest
ratio of seconds to turns of all cycles of waits is found exactly, without waiting for the start to fade.
"""

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple, assert_never

from chimera_ir.flow.cycles import NO_CYCLE, Waits, critical
from chimera_ir.flow.fold import folded
from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import AllReduce, Compute, Drop, Recv, Send, Stash, Step, WaitAllReduce, WaitRecv, WaitSend
from chimera_ir.ir.turns import updates_a_turn
from chimera_ir.predict.events import Events, Node, Role


class Turn(NamedTuple):
    """The events that come again and again: node n is event ``events[n]`` of its turn and takes ``seconds[n]``.

    ``waits`` are those of `cost.cycles`; where a turn overlaps with others, some are for a turn that begins later. A
    turn makes so many ``updates``.
    """

    events: Sequence[int]
    waits: Waits
    seconds: Sequence[float]
    updates: int


def turn_of(header: Header, found: Events, order: Sequence[int]) -> Turn:
    """What a program repeats where its updates follow one another without a barrier.

    Parameters
    ----------
    order
        The numbers of the events, each after all that it waits for.
    """
    return _folded(header, found, order) if header.asynchronous else _whole(found, order)


def _folded(header: Header, found: Events, order: Sequence[int]) -> Turn:
    """Of a program that shows turns of a stream.

    Where messages share ports they may take longer in one turn than in another; those in the middle stand for all.
    """

    def place(number: int) -> tuple[tuple[object, ...], int] | None:
        node = found.nodes[number]
        if node.role is Role.BEGIN:
            return None
        return _reduced(header, node)

    turn = folded(order, found.before, place)
    seconds = [found.nodes[events[len(events) // 2]].seconds for events in turn.events]
    return Turn(turn.numbers, turn.waits, seconds, updates_a_turn(header))


def _whole(found: Events, order: Sequence[int]) -> Turn:
    """Of a synchronous program, whose update is a turn: each lane begins once it has ended the one before.

    Whatever else could wait for the update before is over by then: a lane ends after all its messages and sums. An
    eager message may still be under way, but not when the next update's first one is sent over its link: the stages
    below have their backwards after it, and their next forwards after the sums of these.
    """
    last = {lane[0]: lane[-1] for lane in found.lanes if lane}
    node = {number: place for place, number in enumerate(order)}
    waits = [
        ((node[last[number]], 1),) if number in last else tuple((node[other], 0) for other in found.before[number])
        for number in order
    ]
    return Turn(order, waits, [found.nodes[number].seconds for number in order], 1)


def period(turn: Turn) -> float:
    """Seconds per update in the long run, on the critical cycle, in whole numbers of a unit that rounds no float.

    Raises
    ------
    ValueError
        If nothing in the program comes again: it was not verified.
    """
    exact = [each.as_integer_ratio() for each in turn.seconds]
    unit = lcm(*(denominator for _, denominator in exact))
    cycle = critical(turn.waits, [numerator * (unit // denominator) for numerator, denominator in exact]).cycle
    if cycle == NO_CYCLE and any(turn.seconds):
        raise ValueError("the program is too short to show a steady state; only a verified one has its time")
    return float(cycle.ratio / unit) / turn.updates


def _reduced(header: Header, node: Node) -> tuple[tuple[object, ...], int]:
    """What an event is within its turn, and the turn."""
    match node.what:
        case Compute(kind, micros, stage):
            return _of_micros(header, node, kind, micros, stage)
        case Send(message) | Recv(message) | WaitSend(message) | WaitRecv(message):
            return _of_micros(header, node, type(node.what), message.micros, message.source, message.target)
        case AllReduce(stage, version=version) | WaitAllReduce(stage, version=version) | Step(stage, version=version):
            turn, update = divmod((version or 0) - 1, updates_a_turn(header))
            return (node.role, type(node.what), update, stage, *node.workers), turn
        case Stash() | Drop():
            raise ValueError("keeping and dropping weights takes no time: they are no events")
        case _:
            assert_never(node.what)


def _of_micros(
    header: Header, node: Node, kind: Kind | type, micros: Sequence[Micro], *stages: Stage
) -> tuple[tuple[object, ...], int]:
    turn = min(micros) // header.period
    within = tuple([micro - turn * header.period for micro in micros])
    return (node.role, kind, within, *stages), turn
