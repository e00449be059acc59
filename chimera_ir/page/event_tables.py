"""The events of a program as tables: events, what each waits for, messages, sums, moves and the turn of a stream.

The events are those of a replay (`predict.events`), in another order: first the lanes, lane by lane, then all others.
In the tables, an event is given by its row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple, assert_never

from chimera_ir.cost.durations import Costs, duration_key
from chimera_ir.flow.engine import ordered
from chimera_ir.flow.flow import Flow
from chimera_ir.ir import ops
from chimera_ir.ir.kinds import COSTED, PAIR, Kind
from chimera_ir.ir.ops import AllReduce, Micro, Operation, Pair, Send, Stage, Version, WeightGroup
from chimera_ir.ir.text.printer import absolute, group_text, line, message_text
from chimera_ir.page.tables import (
    Column,
    EventTable,
    LengthForm,
    MessageTable,
    MoveTable,
    OperationRow,
    PortTable,
    Slider,
    SumTable,
    TurnTable,
    nested,
    share,
)
from chimera_ir.predict.events import Events, Node, Port, Role
from chimera_ir.predict.setting import Charges, OperationCharges
from chimera_ir.predict.steady import turn_of

# Writes the length of each event as a sum over sliders, so that a page can replay a schedule with other costs.

MESSAGE, SUM, STEP = "message", "sum", "step"
"""The names of the sliders of messages, sums and steps, which are no operations."""

_LABELS = {MESSAGE: "a message", SUM: "a sum of gradients", STEP: "a step of the optimizer"}

_Terms = tuple[tuple[str, float], ...]
"""A length as a sum: pairs of the name of a slider and the factor on its value."""


class Lengths:
    """Collects the lengths of events as forms, and the sliders that the forms need.

    A form is a sum of sliders, each times a factor. Each form is kept once, and events of equal lengths share it.
    Without a profile a slider is a cost per micro-batch; messages and sums, free at first, take as long as their
    sliders say, a message in proportion to its micro-batches. With a profile a slider is a factor on the seconds of the
    profile.
    """

    def __init__(self, charges: Charges) -> None:
        self._charges, self._header = charges, charges.header
        durations = charges.durations if isinstance(charges, OperationCharges) else None
        self._costs = durations if isinstance(durations, Costs) else None
        self._forms: dict[_Terms, int] = {}
        self._form_of: dict[object, int] = {}

    def form(self, node: Node) -> int:
        """Returns the index in `forms` of the length of an event (``node``)."""
        key = self._key(node)
        form = self._form_of.get(key)
        if form is None:
            terms = tuple((name, coefficient) for name, coefficient in self._terms(node) if coefficient)
            form = self._form_of[key] = self._forms.setdefault(terms, len(self._forms))
        return form

    def sliders(self) -> list[Slider]:
        """The sliders that the forms need, those of operations first."""
        used = {name for terms in self._forms for name, _ in terms}
        return [self._slider(name) for name in (*COSTED, *_LABELS) if name in used]

    def forms(self) -> list[LengthForm]:
        """All forms, in the order of their indices."""
        numbers = {slider.name: number for number, slider in enumerate(self.sliders())}
        return [LengthForm(tuple((numbers[name], by) for name, by in terms)) for terms in self._forms]

    def _key(self, node: Node) -> object:
        """Returns a key such that events with equal keys have equal lengths: a form is computed once for each key."""
        role, instruction, _, seconds = node
        if role in (Role.COMPUTE, Role.MOVE):
            assert isinstance(instruction, Operation)
            return duration_key(instruction, self._charges.header)
        if role is Role.WIRE:
            assert isinstance(instruction, Send)
            return role, self._header.length(instruction.message.micros), seconds
        return role, isinstance(instruction, AllReduce), seconds

    def _terms(self, node: Node) -> Iterator[tuple[str, float]]:
        role, instruction, _, seconds = node
        match role:
            case Role.COMPUTE | Role.MOVE:
                assert isinstance(instruction, Operation)
                yield from self._compute(instruction, seconds)
            case Role.POST:
                yield (SUM if isinstance(instruction, AllReduce) else MESSAGE), seconds
            case Role.WIRE:
                assert isinstance(instruction, Send)
                length, whole = self._header.length(instruction.message.micros), self._header.units
                yield MESSAGE, seconds if self._costs is None else share(length, whole)
            case Role.NOTICE | Role.FLIGHT:
                yield MESSAGE, seconds
            case Role.SUM:
                yield SUM, seconds if self._costs is None else 1
            case Role.STEP:
                yield STEP, seconds
            case Role.BEGIN | Role.WAIT:
                pass
            case _:
                assert_never(role)

    def _compute(self, operation: Operation, seconds: float) -> Iterator[tuple[str, float]]:
        """Terms (slider, factor). Pairs have a slider if they have a cost, else the sliders of both their sides."""
        together = isinstance(operation, Pair) and self._pairs_cost(operation)
        for part in [operation] if together else operation.parts:
            if self._costs is not None:
                yield part.kind.letter, float(self._costs.share(part, self._charges.header))
            else:
                yield part.kind.letter, seconds if part is operation else self._charges.compute(part)

    def _pairs_cost(self, pair: Pair) -> bool:
        if self._costs is not None:
            return PAIR.letter in self._costs.user_set
        return self._charges.setting.joint(pair, self._charges.header) is not None

    def _slider(self, name: str) -> Slider:
        label = _LABELS[name] if name in _LABELS else COSTED[name].noun
        if self._costs is None:
            return Slider(name, label, 1, 4)
        if name in self._costs.shares:
            label += ", all slices"
        if name in self._costs.factors:
            label += ", mean of the stages"
        value = float(self._costs[name]) if name in COSTED else 0.0
        return Slider(name, label, value, max(4.0, 2 * value))


VERBS: dict[type[ops.Instruction], str] = {
    ops.Send: "send",
    ops.Recv: "recv",
    ops.WaitSend: "wait send",
    ops.WaitRecv: "wait recv",
    ops.AllReduce: "all_reduce",
    ops.WaitAllReduce: "wait all_reduce",
    ops.Step: "step",
}
"""The verb of each instruction about a message, a sum or weights; a page writes behind it which these are."""

_OF_MESSAGES = (ops.Send, ops.Recv, ops.WaitSend, ops.WaitRecv)
_OF_SUMS = (ops.AllReduce, ops.WaitAllReduce, ops.Step)

MOVING: dict[type[ops.Instruction], str] = {ops.WaitMove: "wait move"}
"""The verbs of instructions about moves of memory; a document has them only if something moves."""

_VERB_NUMBERS = {instruction: number for number, instruction in enumerate((*VERBS, *MOVING), 1)}

_Move = tuple[Kind, tuple[Micro, ...], Stage]

_SumKey = tuple[WeightGroup, Version | None]


class EventTables(NamedTuple):
    """Tables of events, and of the messages, sums and moves that these are about; with a flush there is no turn."""

    events: EventTable
    messages: MessageTable
    sums: SumTable
    moves: MoveTable
    turn: TurnTable | None


def tables(
    events: Events, rows: Sequence[OperationRow], charges: Charges, lengths: Lengths
) -> tuple[EventTables, Column]:
    """The tables of events, whose lengths ``lengths`` collects, and for each row of operations its event."""
    listed = _Listed(events, rows, charges)
    turn = listed.turn() if charges.header.asynchronous else None
    events_table, subjects = listed.events_table(lengths), (listed.messages_table(), listed.sums_table())
    return EventTables(events_table, *subjects, listed.moves_table(), turn), listed.of_rows


@dataclass(frozen=True)
class _Listed:
    """The events of a replay, numbered as there, and their rows in the tables of the page."""

    events: Events
    rows: Sequence[OperationRow]
    charges: Charges

    @cached_property
    def order(self) -> list[int]:
        """The events by their numbers in the replay, in the order of the tables: row r has event ``order[r]``."""
        in_lanes = [*chain.from_iterable(self.events.lanes)]
        return [*in_lanes, *sorted({*range(len(self.events.nodes))}.difference(in_lanes))]

    @cached_property
    def number(self) -> list[int]:
        """The row of each event in the tables, by the event's number in the replay; the inverse of `order`."""
        number = [0] * len(self.order)
        for place, event in enumerate(self.order):
            number[event] = place
        return number

    @cached_property
    def of_rows(self) -> list[int]:
        """The row of the event that runs each operation. Operations of a lane and their events have the same order."""
        nodes = self.events.nodes
        computes = [[event for event in lane if nodes[event].role is Role.COMPUTE] for lane in self.events.lanes]
        return [self.number[computes[row.worker][row.place]] for row in self.rows]

    @cached_property
    def messages(self) -> dict[ops.Message, int]:
        """Maps each message, in the order of the table, to the event of its transfer, numbered as in the replay."""
        nodes = enumerate(self.events.nodes)
        return {_message(node): event for event, node in nodes if node.role is Role.WIRE}

    @cached_property
    def sums(self) -> dict[_SumKey, int | None]:
        """Maps each sum, in the order of the table, to its event, numbered as in the replay; None if it has none."""
        sums: dict[_SumKey, int | None] = {}
        for event, node in enumerate(self.events.nodes):
            if isinstance(node.instruction, _OF_SUMS):
                key = node.instruction.group, node.instruction.version
                sums[key] = event if node.role is Role.SUM else sums.get(key)
        return sums

    @cached_property
    def moves(self) -> dict[_Move, int]:
        """Maps each move, in the order of the table, to its event, numbered as in the replay."""
        return {_move(node): event for event, node in enumerate(self.events.nodes) if node.role is Role.MOVE}

    def moves_table(self) -> MoveTable:
        words = [line(ops.Compute(*move), self.charges.header) for move in self.moves]
        return MoveTable(words, [self.number[event] for event in self.moves.values()])

    def events_table(self, lengths: Lengths) -> EventTable:
        nodes = [self.events.nodes[event] for event in self.order]
        number, before = self.number, self.events.before
        waits = nested([number[other] for other in before[event]] for event in self.order)
        form = [lengths.form(node) for node in nodes]
        verbs = VERBS | (MOVING if self.charges.header.moves else {})
        return EventTable(
            role=[node.role - 1 for node in nodes],
            verb=[_VERB_NUMBERS.get(type(node.instruction), 0) for node in nodes],
            verbs=["", *verbs.values()],
            subject=self._subjects(nodes),
            worker=[node.workers[0] for node in nodes],
            form=form,
            forms=lengths.forms(),
            before=waits.numbers,
            before_from=waits.starts,
            lane_from=list(accumulate(map(len, self.events.lanes), initial=0)),
            ports=self._ports(),
        )

    def _ports(self) -> PortTable | None:
        """Messages and moves on shared links, each with the port where it leaves and the one where it arrives."""
        if not self.events.ports:
            return None
        numbers: dict[Port, int] = {}
        leaving, arriving = (
            [numbers.setdefault(ports[end], len(numbers)) for ports in self.events.ports.values()] for end in (0, 1)
        )
        return PortTable([self.number[wire] for wire in self.events.ports], leaving, arriving)

    def _subjects(self, nodes: Sequence[Node]) -> list[int]:
        """Returns the row of each event's message, sum, move or operation in its table; -1 for a lane's begin."""
        messages = {message: row for row, message in enumerate(self.messages)}
        sums = {key: row for row, key in enumerate(self.sums)}
        operations = {event: row for row, event in reversed([*enumerate(self.of_rows)])}
        moves = {move: row for row, move in enumerate(self.moves)}

        def subject(event: int, node: Node) -> int:
            instruction = node.instruction
            if node.role is Role.BEGIN:
                return -1
            if isinstance(instruction, _OF_MESSAGES):
                return messages[instruction.message]
            if isinstance(instruction, _OF_SUMS):
                return sums[instruction.group, instruction.version]
            if isinstance(instruction, ops.Compute | ops.WaitMove) and instruction.kind.moves:
                return moves[_move(node)]
            return operations[event]

        return [subject(event, node) for event, node in enumerate(nodes)]

    def messages_table(self) -> MessageTable:
        nodes, number = self.events.nodes, self.number
        header, sizes = self.charges.header, self.charges.size
        flow = Flow(header, enumerate(row.operation for row in self.rows))
        wires = self.messages.values()
        ends = [nodes[wire].workers for wire in wires]
        links = {link: row for row, link in enumerate(sorted({*ends}))}
        awaited = {
            node.instruction.message: number[event]
            for event, node in enumerate(nodes)
            if node.role is Role.WAIT and isinstance(node.instruction, ops.WaitRecv)
        }
        posted = [{nodes[event].workers[0]: number[event] for event in self.events.posted[wire]} for wire in wires]
        return MessageTable(
            words=[message_text(message, absolute(header.slices)) for message in self.messages],
            link=[links[link] for link in ends],
            bytes=[*map(sizes, self.messages)],
            maker=[*map(flow.producer, self.messages)],
            taker=[*map(flow.consumer, self.messages)],
            send=[of_worker[source] for of_worker, (source, _) in zip(posted, ends, strict=True)],
            recv=[of_worker[target] for of_worker, (_, target) in zip(posted, ends, strict=True)],
            wire=[number[wire] for wire in wires],
            flight=[number[wire + 1] for wire in wires],
            wait=[awaited[message] for message in self.messages],
            links=[{"from": source, "to": target, "name": f"P{source} to P{target}"} for source, target in links],
        )

    def sums_table(self) -> SumTable:
        number, posted = self.number, self.events.posted
        launches = nested([] if of is None else [number[event] for event in posted[of]] for of in self.sums.values())
        return SumTable(
            words=[group_text(group) + ("" if version is None else f" v{version}") for group, version in self.sums],
            event=[-1 if of is None else number[of] for of in self.sums.values()],
            launches=launches.numbers,
            launches_from=launches.starts,
        )

    def turn(self) -> TurnTable:
        turn = turn_of(self.charges.header, self.events, ordered(self.events.before))
        waits = nested([node for node, _ in waits] for waits in turn.waits)
        return TurnTable(
            events=[self.number[event] for event in turn.events],
            before=waits.numbers,
            before_from=waits.starts,
            ago=[ago for waits in turn.waits for _, ago in waits],
            updates=turn.updates,
        )


def _message(node: Node) -> ops.Message:
    assert isinstance(node.instruction, ops.Send)
    return node.instruction.message


def _move(node: Node) -> _Move:
    instruction = node.instruction
    assert isinstance(instruction, ops.Compute | ops.WaitMove)
    return instruction.kind, instruction.micros, instruction.stage
