"""Writes the length of each event as a sum over sliders, so that a page can replay a schedule with other costs."""

from collections.abc import Iterator
from typing import assert_never

from chimera_ir.cost.durations import Costs, duration_key
from chimera_ir.ir.kinds import COSTED, PAIR
from chimera_ir.ir.ops import AllReduce, Operation, Pair, Send
from chimera_ir.page.operation_tables import share
from chimera_ir.page.tables import LengthForm, Slider
from chimera_ir.predict.charges import Charges, OperationCharges
from chimera_ir.predict.events import Node, Role

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
        if key not in self._form_of:
            terms = tuple((name, coefficient) for name, coefficient in self._terms(node) if coefficient)
            self._form_of[key] = self._forms.setdefault(terms, len(self._forms))
        return self._form_of[key]

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
        """Yields the terms of an operation's length, each as (slider, factor): the slider is that of its kind.

        A pair has a slider of its own if pairs have a cost, else the sliders of both its sides.
        """
        together = isinstance(operation, Pair) and self._pairs_cost(operation)
        for part in [operation] if together else operation.parts:
            if self._costs is not None:
                yield part.kind.letter, float(self._costs.share(part, self._charges.header))
            else:
                yield part.kind.letter, seconds if part is operation else self._charges.compute(part)

    def _pairs_cost(self, pair: Pair) -> bool:
        """Whether pairs have a cost of their own."""
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
