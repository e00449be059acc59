"""Lanes as loops: repeated instructions are written once.

The lane of an asynchronous program is a loop over its turns. Warm-up and drain are turns without some statements: every
statement is guarded by a condition that the update it serves exists. Other lanes consist of the pieces that `rolling`
finds: a prologue, a loop over the steady state, an epilogue, or several of those.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from chimera_ir.codegen.notation import InTables, Round
from chimera_ir.codegen.rolling import Loop, Piece, Straight, roll, unrolled
from chimera_ir.codegen.statements import Rooms, Scribe, Statements
from chimera_ir.ir.ids import Micro, Version, Worker
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Instruction, Recv
from chimera_ir.ir.text.printer import line as instruction_line
from chimera_ir.ir.turns import body, extent, initial, lowest, updates_a_turn

_COLUMN = 74
"""The most characters of a statement whose comment is aligned with the others."""

_SCREEN = 120
"""The most characters of a line."""

_NUMBERS = re.compile(r"\bm(?P<micro>[0-9]+)|\bv(?P<version>[0-9]+)|(?<=into )(?P<slot>[0-9]+)")


def turn_loop(header: Header, worker: Worker, lane: Sequence[Instruction], rooms: Rooms, names: set[str]) -> list[str]:
    """The lines of a lane that repeats: a loop over the updates k, or over m if every micro-batch is an update.

    Values are entries of dictionaries, whose names are added to ``names``.
    """
    turn = body(header, lane)
    assert turn is not None, "a verified lane repeats"
    each_turn = updates_a_turn(header)
    rounds = Round(
        turn.turn * header.period, header.period, turn.rings, turn.turn * each_turn, initial=initial(header, turn)
    )
    notation = InTables(names, rounds, "m" if header.per_update == 1 else "k")
    updates = [_update(header, rounds, instruction) for instruction in turn.instructions]
    ahead = max(
        (u - lowest(rounds.initial, instruction) for u, instruction in zip(updates, turn.instructions, strict=True)),
        default=0,
    )
    start, stop = -(ahead // each_turn) * each_turn, _plus("updates", -min(updates, default=0))
    by = f", {each_turn}" if each_turn > 1 else ""
    micro = [f"    m = {header.per_update} * k"] if header.per_update > 1 else []
    scribe = Scribe(header, worker, rooms, notation)
    lines = [f"    {line}" for line in _turn(scribe, notation, rounds, turn.instructions)]
    return [f"for {notation.counter} in range({start}, {stop}{by}):", *micro, *lines]


def _turn(
    scribe: Scribe, notation: InTables, rounds: Round, instructions: Sequence[Instruction], depth: int = 2
) -> Iterator[str]:
    """The lines of a turn, with inner loops over the micro-batches of an update."""
    for piece in roll(scribe.header, instructions):
        if isinstance(piece, Straight) or not _in_step(piece, rounds):
            yield from _guarded(scribe, notation, rounds, unrolled(piece), depth)
            continue
        first = _first_micro(piece)
        inner = InTables(notation.names, replace(rounds, micro=first, step=piece.step, rings=piece.rings, variable="n"))
        inner.counter = notation.counter
        end = first + piece.rounds * piece.step
        by = f", {piece.step}" if piece.step > 1 else ""
        yield f"for n in range({_plus('m', first - rounds.micro)}, {_plus('m', end - rounds.micro)}{by}):"
        lines = _guarded(replace(scribe, notation=inner), inner, rounds, piece.instructions, depth + 1)
        yield from (f"    {line}" for line in lines)


def _in_step(loop: Loop, rounds: Round) -> bool:
    """Whether the slots of an inner loop follow from its micro-batches, in every turn."""
    return all(
        ring.messages == loop.step and rounds.rings[key].messages == rounds.step for key, ring in loop.rings.items()
    )


def _guarded(
    scribe: Scribe, notation: InTables, rounds: Round, instructions: Iterable[Instruction], depth: int
) -> Iterator[str]:
    """Statements under the condition that the update that they serve exists."""

    def served(instruction: Instruction) -> tuple[int, int]:
        return _update(scribe.header, rounds, instruction), lowest(rounds.initial, instruction)

    for (update, least), group in groupby(instructions, key=served):
        number = _plus(notation.counter, update)
        there = f"{number} == {least} or 0 < {number} < updates" if least else f"0 <= {number} < updates"
        yield f"if {there}:"
        written = [(scribe.statements(instruction), _comment(notation, instruction)) for instruction in group]
        yield from (f"    {line}" for line in commented(written, indented=4 * depth + 4))


def rolled(scribe: Scribe, pieces: Iterable[Piece], names: set[str]) -> Iterator[str]:
    """The lines of a lane with loops. Values are entries of dictionaries, whose names are added to ``names``."""
    for number, piece in enumerate(pieces):
        yield from [""] if number else []
        if isinstance(piece, Straight):
            straight_scribe = replace(scribe, notation=InTables(names))
            yield from commented(
                [
                    (straight_scribe.statements(instruction), instruction_line(instruction))
                    for instruction in piece.instructions
                ]
            )
            continue
        first = _first_micro(piece)
        notation = InTables(names, Round(first, piece.step, piece.rings))
        loop_scribe = replace(scribe, notation=notation)
        by = f", {piece.step}" if piece.step > 1 else ""
        yield f"for m in range({first}, {first + piece.rounds * piece.step}{by}):"
        written = [
            (loop_scribe.statements(instruction), _comment(notation, instruction)) for instruction in piece.instructions
        ]
        yield from (f"    {line}" for line in commented(written, indented=8))


def _first_micro(loop: Loop) -> int:
    """The micro-batch from which a loop counts: that of its first forward, or of its first instruction."""
    computes = [
        instruction for instruction in loop.instructions if isinstance(instruction, Compute) and instruction.kind.opens
    ]
    return extent(computes[0] if computes else loop.instructions[0]).first


def commented(written: Iterable[tuple[Statements, str]], indented: int = 4) -> Iterator[str]:
    """Statements with a comment beside the first of each instruction, or above it if the line would be too long.

    ``del`` follows the last use of a name.
    """
    listed = list(written)
    width = max((len(code[0]) for (code, _), _ in listed if len(code[0]) <= _COLUMN), default=0)
    for (code, spent), comment in listed:
        together = f"{code[0]:<{width}}  # {comment}"
        if indented + len(together) <= _SCREEN:
            yield together
        else:
            yield from (f"# {comment}", code[0])
        yield from code[1:]
        if spent:
            yield f"del {', '.join(spent)}"


def _update(header: Header, rounds: Round, instruction: Instruction) -> int:
    """The update that an instruction serves, relative to the first update of the turn."""
    first, _, of_updates = extent(instruction)
    return (first if of_updates else first // header.per_update) - rounds.update


def _plus(name: str, by: int) -> str:
    return name if by == 0 else f"{name} {'+' if by > 0 else '-'} {abs(by)}"


def _comment(notation: InTables, instruction: Instruction) -> str:
    """The line of the program, relative to the turn: ``B m-3 s0 v(m-6)``."""

    def relative(number: re.Match[str]) -> str:
        if number["micro"]:
            return notation.micro(Micro(int(number["micro"]))).replace(" ", "")
        if number["version"]:
            return f"v({notation.version(Version(int(number['version'])))})".replace(" ", "")
        assert isinstance(instruction, Recv)
        return notation.slot(instruction.message, instruction.slot)

    return _NUMBERS.sub(relative, instruction_line(instruction))
