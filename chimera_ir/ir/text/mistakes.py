"""Explains lines that the grammar does not know, by their first word."""

from difflib import get_close_matches

from chimera_ir.diagnostics.catalogue.irtext import MalformedLine, UnknownKind
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span

FORMS = {
    "plan": "plan NAME",
    "schedule": "schedule NAME",
    "program": "program NAME",
    "parameters": "parameters D=4 N=4",
    "workers": "workers 4",
    "stages": "stages 4",
    "micro_batches": "micro_batches 4",
    "updates": "updates 10 period 1",
    "memory": "memory activations <= 4",
    "sync": "sync lazy 0..2",
    "pipe": "pipe down on 0 1 2 3 micros 0..4",
    "worker": "worker 0:",
    "F": "F m0 s1",
    "B": "B m0 s1",
    "send": "send m0 s1->s2 to w2",
    "recv": "recv m0 s1->s2 from w1 into 0",
    "wait": "wait recv m0 s1->s2",
    "all_reduce": "all_reduce s1",
    "step": "step s1",
    "stash": "stash s1 v0",
    "drop": "drop s1 v0",
}
"""The first word of every kind of line, with an example of a correct line."""

_WAITS = {
    "send": "wait send m0 s1->s2",
    "recv": "wait recv m0 s1->s2",
    "all_reduce": "wait all_reduce s1",
}

_EXCERPT = 40


def explain(text: str, start: int, *, plan: bool) -> Diagnostic:
    """The diagnostic of a line that the grammar does not know.

    Parameters
    ----------
    text
        The line, without its indentation.
    start
        Where the line begins in the text.
    plan
        Whether the line is in a plan, where operations have clocks.
    """
    words = text[:_EXCERPT].split()
    word = words[0] if words else text[:_EXCERPT]
    span = Span(start, start + len(text.rstrip()))
    if word == "wait" and len(words) > 1 and words[1] in _WAITS:
        return MalformedLine(span, f"wait {words[1]}", _WAITS[words[1]])
    if plan and word in ("F", "B"):
        return MalformedLine(span, word, f"{FORMS[word]} @ 3 on w1")
    if word in FORMS:
        return MalformedLine(span, word, FORMS[word])
    return UnknownKind(Span(start, start + len(word)), _printable(word), _advice(word))


def _advice(word: str) -> str:
    close = get_close_matches(word, FORMS, n=1)
    if close:
        return f"did you mean `{close[0]}`, as in `{FORMS[close[0]]}`?"
    return "operations are F, B, send, recv, wait, all_reduce, step, stash and drop"


def _printable(word: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in word)
