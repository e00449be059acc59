"""Explains lines that the grammar does not know, by their first word."""

from difflib import get_close_matches

from chimera_ir.diagnostics.catalogue.irtext import MalformedLine, MisspeltKind, UnknownKind
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.kinds import KINDS
from chimera_ir.plural import listed
from chimera_ir.source import Span

_HEADER = {
    "plan": "plan NAME",
    "schedule": "schedule NAME",
    "program": "program NAME",
    "parameters": "parameters D=4 N=4",
    "workers": "workers 4",
    "stages": "stages 4",
    "micro_batches": "micro_batches 4",
    "kinds": "kinds F",
    "updates": "updates 1 per turn",
    "memory": "memory activations <= 4",
    "sync": "sync lazy 0..2",
    "tied": "tied s0 s3",
    "weigh": "weigh 2 0..4",
    "pipe": "pipe down on 0 1 2 3 micros 0..4",
    "worker": "worker 0:",
}

_LINES = {
    **{letter: f"{letter} m0 s1" for letter in KINDS},
    "F &": "F m2 s1 & B m0 s1",
    "send": "send m0 s1->s2 to w2",
    "recv": "recv m0 s1->s2 from w1 into 0",
    "wait": "wait recv m0 s1->s2",
    "all_reduce": "all_reduce s1",
    "step": "step s1",
    "wait send": "wait send m0 s1->s2",
    "wait recv": "wait recv m0 s1->s2",
    "wait all_reduce": "wait all_reduce s1",
    **{f"wait {letter}": f"wait {letter} m0 s1" for letter, kind in KINDS.items() if kind.moves},
    "stash": "stash s1 v",
    "drop": "drop s1 v",
}

FORMS = _HEADER | _LINES
"""The first word or words of every kind of line, with an example of a correct line."""

FORMS_OF_TURN = FORMS | {
    **{letter: f"{letter} m s1" if kind.moves else f"{letter} m s1 v" for letter, kind in KINDS.items()},
    "send": "send m s1->s2 to w2",
    "recv": "recv m+1 s1->s2 from w1 into 0 of 2",
    "wait": "wait recv m s1->s2",
    "all_reduce": "all_reduce s1 v+1",
    "step": "step s1 v+1",
    "wait send": "wait send m-1 s1->s2",
    "wait recv": "wait recv m s1->s2",
    "wait all_reduce": "wait all_reduce s1 v+1",
    **{f"wait {letter}": f"wait {letter} m s1" for letter, kind in KINDS.items() if kind.moves},
}
"""The examples of `FORMS` as lines of a turn, which count micro-batches and versions from the turn."""

_EXCERPT = 40


def explain(text: str, start: int, *, plan: bool, turn: bool) -> Diagnostic:
    """The diagnostic of a line that the grammar does not know.

    ``text`` is the line without its indentation, which begins at ``start``; ``plan`` says whether it is in a plan,
    where operations have clocks, ``turn`` whether it is in a turn.
    """
    forms, clock = FORMS_OF_TURN if turn else FORMS, " @ 3 on w1" if plan else ""
    pair, words = FORMS["F &"], text[:_EXCERPT].split()
    word = words[0] if words else text[:_EXCERPT]
    span = Span(start, start + len(text.rstrip()))
    if word == "wait" and " ".join(words[:2]) in forms:
        word = " ".join(words[:2])
    if word in KINDS and "&" in text:
        return MalformedLine(span, "pair", pair + clock)
    if word in forms:
        return MalformedLine(span, word, forms[word] + (clock if word in KINDS else ""))
    choices = listed(line for line in _LINES if " " not in line)
    at, shown = Span(start, start + len(word)), _printable(word)
    close = get_close_matches(word, forms, n=1)
    return MisspeltKind(at, shown, choices, close[0], forms[close[0]]) if close else UnknownKind(at, shown, choices)


def _printable(word: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in word)
