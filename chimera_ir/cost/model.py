"""Durations of operations: the F, B, I and W of the paper, exact."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import assert_never

from chimera_ir.cost.numbers import exact
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Backward, Compute, Forward

KINDS = ("F", "B", "I", "W")
"""The kinds of compute operation, in the order in which reports name them."""

_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18}|/[0-9]{1,18})?|\.[0-9]{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Costs:
    """How long an operation over one micro-batch takes, by kind, in a unit of the user's choice.

    ``F`` is a forward, ``B`` a full backward, ``I`` and ``W`` are its halves: input gradient and weight gradient. The
    defaults are the paper's: a backward is twice the work of a forward (section 2), and three times where it runs the
    forward again (section 3.4): ``recomputing``, which a user who sets B sets to the same.
    """

    F: Fraction = Fraction(1)
    B: Fraction = Fraction(2)
    I: Fraction = Fraction(1)  # noqa: E741 - the language's letter
    W: Fraction = Fraction(1)
    recomputing: Fraction = Fraction(3)

    @staticmethod
    def parse(kind: str, text: str) -> Fraction:
        """The duration that a user wrote for a kind: ``"0.1"`` is one tenth and ``"1/3"`` one third, exactly.

        Raises
        ------
        ValueError
            If there is no such kind, or the text is not a positive integer, decimal or fraction; the message is meant
            for the user.

        Examples
        --------
        >>> Costs.parse("B", "0.1")
        Fraction(1, 10)
        """
        if kind not in KINDS:
            raise ValueError(f"no kind of operation is called '{kind}': the kinds are F, B, I and W")
        if not _NUMBER.fullmatch(text) or re.search(r"/0+$", text):
            raise ValueError(
                f"the cost of {kind} is an integer, a decimal or a fraction (2, 0.5, 1/3), not '{text[:40]}'"
            )
        value = Fraction(text)
        if value == 0:
            raise ValueError(f"the cost of {kind} is greater than 0: an operation that takes no time is no operation")
        return value

    def using(self, kind: str, text: str) -> "Costs":
        """These costs with one of them as the user wrote it; errors as in `parse`."""
        value = self.parse(kind, text)
        return replace(self, B=value, recomputing=value) if kind == "B" else replace(self, **{kind: value})

    def told(self, header: Header) -> tuple[tuple[str, Fraction], ...]:
        """Each kind with its cost, as a report names them: B is that of recomputing backwards where all are.

        Where only some are and it differs, it is named beside B.
        """
        if all(len(pipe.recompute) == header.stages for pipe in header.pipes):
            return replace(self, B=self.recomputing).items()
        some = any(pipe.recompute for pipe in header.pipes) and self.recomputing != self.B
        return (*self.items(), *([("B_recomputing", self.recomputing)] if some else []))

    def summary(self, header: Header) -> str:
        """The costs of the kinds that occur, in one line."""
        told = ((kind, cost) for kind, cost in self.told(header) if kind not in ("I", "W"))
        return ", ".join(f"{kind.replace('_', ' ')} = {exact(cost)}" for kind, cost in told)

    def scaled(self, factor: Fraction) -> "Costs":
        """The costs of stages that are larger by a factor."""
        F, B, I, W = (cost * factor for _, cost in self.items())  # noqa: E741
        return Costs(F, B, I, W, self.recomputing * factor)

    def items(self) -> tuple[tuple[str, Fraction], ...]:
        """Each kind with its cost, in the order of `KINDS`."""
        return (("F", self.F), ("B", self.B), ("I", self.I), ("W", self.W))

    def duration(self, operation: Compute, header: Header) -> Fraction:
        """How long an operation takes: over k micro-batches k times as long as over one, over half a one half."""
        size = Fraction(len(operation.micros), header.parts)
        match operation:
            case Forward():
                return self.F * size
            case Backward(micros=micros, stage=stage):
                return (self.recomputing if header.recomputes(micros[0], stage) else self.B) * size
            case _:
                assert_never(operation)
