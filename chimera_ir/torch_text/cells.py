"""The cells of a schedule of torch.distributed.pipelining: a row for each rank, a cell for each action.

    0F0,0F1,0SEND_F0,,0RECV_B0,0B0        2F0: the forward of micro-batch 0 on stage 2
    1RECV_F0,1F0,1B0,1SEND_B0             (0F7;7B3)OVERLAP_F_B: a pair
                                          0WAIT_SEND_F0, 0WAIT_REDUCE_GRAD: waits, since torch 2.15

The kinds F, I, W and B are those of the table. Files from before 2025 write B for I, and BW for B. An empty cell, or
``None``, is a column in which the rank does nothing. Columns mean nothing else: the order in a row counts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from chimera_ir.diagnostics.catalogue import torchcells as say
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.kinds import ACTIVATIONS, GRADIENTS, KINDS, PAIR, Value
from chimera_ir.ir.levels import MAX_MICRO_BATCHES, MAX_STAGES
from chimera_ir.ir.ops import Compute, Operation, Pair, Recv, Send
from chimera_ir.source import Source, Span

MOST_MISTAKES = 50
"""The most malformed cells that are reported."""

TRANSFERS: dict[str, tuple[type[Send | Recv], Value]] = {
    "SEND_F": (Send, ACTIVATIONS),
    "RECV_F": (Recv, ACTIVATIONS),
    "SEND_B": (Send, GRADIENTS),
    "RECV_B": (Recv, GRADIENTS),
}
"""The instruction that each action about a message posts, and the value in the message."""

WAITS = {"WAIT_SEND_F": "SEND_F", "WAIT_SEND_B": "SEND_B"}
"""The send that each wait is for."""

UNSHARD, RESHARD, REDUCE_GRAD, WAIT_REDUCE_GRAD = "UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"
REDUCTIONS = (REDUCE_GRAD, WAIT_REDUCE_GRAD)
_ON_WEIGHTS = (UNSHARD, RESHARD, *REDUCTIONS)


@dataclass(frozen=True, slots=True)
class MessageCell:
    """A send, a receive or a wait for a send, as in ``1SEND_F0``; ``stage`` is that of the rank which posts it."""

    word: str
    stage: Stage
    micro: Micro
    origin: Span

    def __str__(self) -> str:
        return f"{self.stage}{self.word}{self.micro}"


@dataclass(frozen=True, slots=True)
class WeightsCell:
    """An action of FSDP on the weights or gradients of a stage, as in ``1UNSHARD``."""

    word: str
    stage: Stage
    origin: Span

    def __str__(self) -> str:
        return f"{self.stage}{self.word}"


Cell = Operation | MessageCell | WeightsCell


class _Action(NamedTuple):
    """The parts of an action as written: ``word`` is the letter of a kind, or another verb such as SEND_F.

    In older files a letter may stand for another kind.
    """

    stage: int
    word: str
    micro: int
    span: Span


_Actions = tuple[_Action] | tuple[_Action, _Action]
"""The action of a cell, or the two of a pair."""

_CELL = re.compile(r"[^,\n\s](?:[^,\n]*[^,\n\s])?")
_QUOTED = re.compile(r'"\s*([^"]*?)\s*"')
_OF_MICROS = "|".join((*WAITS, *TRANSFERS, "BW", "F", "I", "W", "B"))
_ACTION = re.compile(rf"([0-9]+)(?:({'|'.join(_ON_WEIGHTS)})|({_OF_MICROS})([0-9]*))")
_OVERLAP = re.compile(r"\(\s*([^;()]*?)\s*;\s*([^;()]*?)\s*\)OVERLAP_F_B")
_OF_BEFORE_2025 = {"B": "I", "BW": "B"}
_DIGITS = 10


def count_cells(text: str) -> int:
    """The number of cells of a text that are not empty."""
    return sum(1 for _ in _CELL.finditer(text))


def rows_of(source: Source) -> list[list[Cell]]:
    """The cells of each row, those that are empty left out.

    Blank rows at the end are left out. Raises `Rejected` with all malformed cells, or if there are none at all.
    """
    mistakes: list[Diagnostic] = []
    rows, start = list[list[_Actions]](), 0
    for text in source.text.split("\n"):
        rows.append([*_read(text, start, mistakes)])
        start += len(text) + 1
    if mistakes:
        raise Rejected(mistakes[:MOST_MISTAKES])
    while rows and not rows[-1]:
        del rows[-1]
    if not rows:
        raise Rejected([say.NoCells(Span(0, 0))])
    letters = _letters([action for row in rows for cell in row for action in cell])
    return [[_cell(cell, letters) for cell in row] for row in rows]


def _read(row: str, start: int, mistakes: list[Diagnostic]) -> Iterator[_Actions]:
    for match in _CELL.finditer(row):
        text, place = match[0], start + match.start()
        if quoted := _QUOTED.fullmatch(text):
            text, place = quoted[1], place + quoted.start(1)
        if text in ("", "None"):
            continue
        overlap = _OVERLAP.fullmatch(text)
        spans = [overlap.span(1), overlap.span(2)] if overlap else [(0, len(text))]
        try:
            first, *others = [_action(text[a:b], place + a) for a, b in spans]
            if others and {first.word, others[0].word} != {kind.letter for kind in PAIR.kinds}:
                raise Rejected([say.PairOfOthers(Span(place, place + len(text)), text)])
        except Rejected as rejected:
            mistakes.extend(rejected.diagnostics)
        else:
            yield (first, others[0]) if others else (first,)


def _action(text: str, start: int) -> _Action:
    """Reads a text as one action; ``start`` is where the text begins in the file, for the place of a mistake.

    Raises `Rejected` if the text is no action, or has numbers beyond the limits.
    """
    span, match = Span(start, start + len(text)), _ACTION.match(text)
    if match is None:
        raise Rejected([say.MalformedCell(span, text)])
    if match[3] and not match[4]:
        raise Rejected([say.MicroUnsaid(span, text)])
    if match.end() < len(text):
        raise Rejected([say.TrailingText(span, text, match[0])])
    for what, number, limit in (("stage", match[1], MAX_STAGES), ("micro-batch", match[4] or "0", MAX_MICRO_BATCHES)):
        if len(number) > _DIGITS or int(number) >= limit:
            raise Rejected([say.NumberTooHigh(span, what, number, 0, limit - 1)])
    return _Action(int(match[1]), match[2] or match[3], int(match[4] or 0), span)


def _letters(actions: list[_Action]) -> dict[str, str]:
    """Maps the letters of an older file to those of today's kinds; empty for a file of today.

    Raises `Rejected` if both notations occur.
    """
    first = {action.word: action for action in reversed(actions)}
    if "BW" in first and "I" in first:
        raise Rejected([say.NotationsMixed(first["BW"].span, first["I"].span)])
    return _OF_BEFORE_2025 if "BW" in first or ("W" in first and "I" not in first) else {}


def _cell(actions: _Actions, letters: dict[str, str]) -> Cell:
    (stage, word, micro, span), *others = actions
    if word in TRANSFERS or word in WAITS:
        return MessageCell(word, Stage(stage), Micro(micro), span)
    if word in _ON_WEIGHTS:
        return WeightsCell(word, Stage(stage), span)
    parts = [
        Compute(KINDS[letters.get(action.word, action.word)], (Micro(action.micro),), Stage(action.stage), action.span)
        for action in actions
    ]
    if not others:
        return parts[0]
    forward, backward = sorted(parts, key=lambda part: PAIR.kinds.index(part.kind))
    return Pair(forward, backward, Span(min(span, others[0].span).start, max(span, others[0].span).end))
