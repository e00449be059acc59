"""Writes lanes with loops, so that instructions that repeat are written once.

A script for a stream has one turn, which also serves warm-up and drain: its calls for updates outside the run do
nothing. Other lanes consist of the pieces that `rolling` finds: a prologue, a loop over the steady state, an epilogue,
or several of those.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from chimera_ir.codegen.notation import Notation
from chimera_ir.codegen.rolling import Loop, Piece, Straight, roll, unrolled
from chimera_ir.codegen.statements import Scribe
from chimera_ir.ir.ids import Micro, WeightGroup
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Instruction, Pair, Recv, singles
from chimera_ir.ir.text.printer import Numbers, absolute, numbered_line, numbers_of
from chimera_ir.ir.turns import Initial, Ring, Turn, extent, lowest, served_update, shelf

_COLUMN = 74
"""The most characters of a statement whose comment is aligned with those of the other statements."""

_SCREEN = 120
"""The most characters of a line."""


def counter(header: Header) -> str:
    """Returns the name of the variable that counts the turns of a stream, by the first update of each.

    It is ``m`` if updates have one micro-batch, else ``k``.
    """
    return "m" if header.per_update == 1 else "k"


def turn_lines(scribe: Scribe, turn: Turn) -> Iterator[str]:
    """Yields the lines of a script for a turn, with numbers relative to its first update and micro-batch."""
    header = scribe.header
    rings = {line.message: turn.rings[shelf(line.message)] for line in turn.instructions if isinstance(line, Recv)}
    notation = Notation(step=header.period, rings=rings, variable="m", counter=counter(header))
    outer = replace(scribe, notation=notation)
    # The script is a function of the turn's number; a stretch that repeats within a turn is a loop inside it.
    for piece in roll(header, turn.instructions, turn.slots):
        if isinstance(piece, Straight) or not _in_step(piece, notation):
            yield from _commented(outer, unrolled(piece), numbers_of(header, turn))
            continue
        first = _first_micro(piece)
        end = first + piece.rounds * piece.step
        inner = replace(notation, micro=first, step=piece.step, rings=piece.rings, variable="n")
        start, stop = notation.micros([first]), notation.micros([Micro(end)])
        yield from _loop(replace(scribe, notation=inner), piece, start, stop)


def _in_step(loop: Loop, notation: Notation) -> bool:
    """Tells whether one formula (`Notation.slot`) gives the slot of each receive, in every round and every turn.

    There is such a formula if each receive either never changes its slot, or goes one step further in the same ring (a
    circle of slots) with each micro-batch, both from round to round and from turn to turn. ``notation`` has the rings
    of the turn, ``loop`` those from round to round.
    """

    def fits(ring: Ring, turn: Ring) -> bool:
        if ring.step % ring.slots == turn.step % turn.slots == 0:
            return True
        apart = (ring.step - loop.step) % ring.slots, (turn.step - notation.step) % turn.slots
        return ring[1:] == turn[1:] and apart == (0, 0)

    return all(fits(ring, notation.rings[message]) for message, ring in loop.rings.items())


def lane_lines(scribe: Scribe, pieces: Iterable[Piece]) -> Iterator[str]:
    """The lines of a script for the pieces of a lane."""
    for number, piece in enumerate(pieces):
        yield from [""] if number else []
        if isinstance(piece, Straight):
            yield from _commented(scribe, piece.instructions, absolute(scribe.header.slices))
            continue
        first = _first_micro(piece)
        notation = Notation(first, piece.step, piece.rings, "m")
        yield from _loop(replace(scribe, notation=notation), piece, str(first), str(first + piece.rounds * piece.step))


def _loop(scribe: Scribe, loop: Loop, start: str, stop: str) -> Iterator[str]:
    by = f", {loop.step}" if loop.step > 1 else ""
    yield f"for {scribe.notation.variable} in range({start}, {stop}{by}):"
    yield from (
        f"    {line}" for line in _commented(scribe, loop.instructions, _in_rounds(scribe.notation), indented=8)
    )


def _first_micro(loop: Loop) -> Micro:
    """Returns the micro-batch that the first round of a loop counts from: that of its first forward.

    Without a forward it is that of the first instruction.
    """
    computes = singles(line for line in loop.instructions if isinstance(line, Compute | Pair))
    forward = next((operation for operation in computes if operation.kind.opens), loop.instructions[0])
    return Micro(extent(forward).first)


def _commented(
    scribe: Scribe, instructions: Iterable[Instruction], numbers: Numbers, indented: int = 4
) -> Iterator[str]:
    """Yields the statements of instructions, each with a comment that shows the instruction as a line of the program.

    The comment is beside the statement or, if the line would be too long, above it. ``numbers`` are the functions that
    write micro-batches, versions and slots in comments. ``indented`` is how many blanks will stand before a line.
    """
    written = [(scribe.statement(line), numbered_line(line, numbers)) for line in instructions]
    width = max((len(code) for code, _ in written if len(code) <= _COLUMN), default=0)
    for code, comment in written:
        together = f"{code:<{width}}  # {comment}"
        yield from [together] if indented + len(together) <= _SCREEN else [f"# {comment}", code]


def _in_rounds(notation: Notation) -> Numbers:
    """Returns the functions that write micro-batches, versions and slots in comments, as ``m-3`` in ``B m-3 s0``.

    The numbers are relative to the round of a loop, as ``notation`` writes them in statements.
    """
    return Numbers(
        micro=lambda micro: notation.micros([micro]).replace(" ", ""),
        version=lambda version: f"v({notation.version(version)})".replace(" ", ""),
        slot=lambda recv: notation.slot(recv.message, recv.slot),
    )


def reach(header: Header, turn: Turn, initials: Mapping[WeightGroup, Initial]) -> tuple[int, int]:
    """Returns where the turns of a worker begin and end, so that every update of a run is complete.

    The result is ``(first, behind)``, in updates: for a run of U updates the turns begin at the updates ``range(first,
    U + behind, per_turn)``. ``initials`` is the result of `initial`.
    """
    step = header.per_turn
    served = [(served_update(header, line), lowest(initials, line)) for line in turn.instructions]
    ahead = max((update - least for update, least in served), default=0)
    return -(ahead // step) * step, -min((update for update, _ in served), default=0)
