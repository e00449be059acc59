"""Reads the header of a level of IR: checks that it is bounded and consistent, and reports all mistakes together."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction
from math import lcm

from lark import Token

from chimera_ir.diagnostics.catalogue import irtext as say
from chimera_ir.diagnostics.catalogue.names import FrozenNotSupported, GraphNotSupported
from chimera_ir.diagnostics.catalogue.values import AllFrozen
from chimera_ir.diagnostics.model import Attempts, Diagnostic, Rejected, reject
from chimera_ir.ir.graph import Absence, Feed, NamedStages, graph_mistakes
from chimera_ir.ir.kinds import KINDS, Kind
from chimera_ir.ir.levels import (
    MAX_LENGTH,
    MAX_MICRO_BATCHES,
    MAX_SHARE,
    MAX_STAGES,
    MAX_WORKERS,
    Bound,
    Header,
    Pipe,
    Quantity,
    Strategy,
    normalized,
)
from chimera_ir.ir.ops import Micro, Stage, WeightGroup, Worker, alternatives, unmade
from chimera_ir.plural import listed, plural
from chimera_ir.source import Span

# Explains lines that the grammar does not know, by their first word.

HEADER_LINES = {
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
    "frozen": "frozen 0..2",
    "named": "named image 0..1 text 1..4",
    "feeds": "feeds s0->s2 as pixels",
    "absent": "absent image 2..3",
    "keep": "keep 1/4 0..2",
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

FORMS = HEADER_LINES | _LINES
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
    """The diagnostic of a line, without its indentation, that the grammar does not know, in a plan or a turn."""
    forms, clock = FORMS_OF_TURN if turn else FORMS, " @ 3 on w1" if plan else ""
    pair, words = FORMS["F &"], text[:_EXCERPT].split()
    word = words[0] if words else text[:_EXCERPT]
    span = Span(start, start + len(text.rstrip()))
    if word == "wait" and " ".join(words[:2]) in forms:
        word = " ".join(words[:2])
    if word in KINDS and "&" in text:
        return say.MalformedLine(span, "pair", pair + clock)
    if word in forms:
        return say.MalformedLine(span, word, forms[word] + (clock if word in KINDS else ""))
    choices = listed(line for line in _LINES if " " not in line)
    at = Span(start, start + len(word))
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in word)
    close = get_close_matches(word, forms, n=1)
    return (
        say.MisspeltKind(at, shown, choices, close[0], forms[close[0]])
        if close
        else say.UnknownKind(at, shown, choices)
    )


_LIMITS = {"WORKERS": MAX_WORKERS, "STAGES": MAX_STAGES, "MICRO_BATCHES": MAX_MICRO_BATCHES}
_REQUIRED = (*_LIMITS, "PIPE")
_DIGITS = 20
_LARGEST = 10 ** (_DIGITS - 1) - 1
_NUMBERS = re.compile("-?[0-9]+")


def span(token: Token) -> Span:
    """The characters of the text that a token stands for, such as those of a line."""
    start = token.start_pos or 0
    return Span(start, start + len(token))


def integers(token: Token, text: str) -> list[int]:
    """All numbers in ``text``, a piece of the line ``token``; raises `Rejected` for one with too many digits."""
    numbers: list[str] = _NUMBERS.findall(text)
    for number in numbers:
        if len(number) > _DIGITS:
            raise Rejected([say.NumberOutOfRange(span(token), "number", f"{number[:8]}…", -_LARGEST, _LARGEST)])
    return [int(number) for number in numbers]


def require(token: Token, what: str, value: int, last: int, first: int = 0) -> None:
    """Raises `Rejected` if a number of the line ``token``, called ``what``, is not one of ``first`` to ``last``."""
    if not first <= value <= last:
        raise Rejected([say.NumberOutOfRange(span(token), what, str(value), first, last)])


def read_header(title: Token, lines: list[Token]) -> Header:
    """The header of a text: pipes place each stage on a worker within range, and micro-batches are 0 .. N-1.

    Raises `Rejected` with the mistakes: several at once, unless one may be the cause of another.
    """
    reader = _HeaderReader(title)
    for token in lines:
        reader.take(token)
    return reader.finish()


class _HeaderReader:
    """Takes the lines of a header one by one; records the mistakes of a line, and leaves out such a line."""

    def __init__(self, title: Token) -> None:
        self._title = title
        self._counts: dict[str, int] = {}
        self._parameters: dict[str, int] = {}
        self._halves = False
        self._slices = 1
        self._lengths: tuple[int, ...] = ()
        self._bounds: dict[Quantity, tuple[Token, list[int | Fraction]]] = {}
        self._lines: dict[str, list[Token]] = defaultdict(list)
        self._attempts = Attempts()

    def take(self, token: Token) -> None:
        """Reads a header line, or keeps it for `finish`."""
        with self._attempts.step():
            match token.type:
                case "PARAMETERS":
                    self._take_parameters(token)
                case "MEMORY":
                    self._take_bound(token)
                case "WORKERS" | "STAGES" | "MICRO_BATCHES":
                    self._take_count(token)
                case "KINDS" | "UPDATES" | "FROZEN" | "NAMED" if self._lines[token.type]:
                    raise Rejected([say.HeaderTwice(span(token), f"`{token.type.lower()}`")])
                case _:
                    self._lines[token.type].append(token)

    def _take_parameters(self, token: Token) -> None:
        for word in token.split()[1:]:
            name, _, value = word.partition("=")
            if name in self._parameters:
                raise Rejected([say.HeaderTwice(span(token), f"parameter {name}")])
            self._parameters[name] = integers(token, value)[0]

    def _take_bound(self, token: Token) -> None:
        quantity = Quantity(token.split()[1])
        if quantity in self._bounds:
            raise Rejected([say.BoundTwice(span(token), quantity.value)])
        limits = [Fraction(*integers(token, word)) for word in token.split("<=")[1].split()]
        self._bounds[quantity] = token, [int(limit) if limit.denominator == 1 else limit for limit in limits]

    def _take_count(self, token: Token) -> None:
        counts, _, lengths = token.partition("lengths")
        word, (number, *slices) = token.type.lower(), integers(token, counts)
        self._halves |= token.split()[-1] == "halves"
        if token.type in self._counts:
            raise Rejected([say.HeaderTwice(span(token), f"`{word}`")])
        self._counts[token.type] = number
        if token.split()[-1] == "halves" and number % 2:
            raise Rejected([say.HalvesLeftOver(span(token), number)])
        require(token, word, number, _LIMITS[token.type], 1)
        for count in slices:
            require(token, "slices", count, number, 1)
            if number % count:
                raise Rejected([say.SlicesLeftOver(span(token), number, count)])
            self._slices = count
            self._lengths = _lengths(token, integers(token, lengths), count)

    def finish(self) -> Header:
        """The header; raises ``Rejected`` with the mistakes so far, and the lines that are missing."""
        present = {*self._counts, *self._lines}
        words = [kind.lower() for kind in _REQUIRED if kind not in present]
        missing = [say.MissingHeader(span(self._title), word, FORMS[word]) for word in words]
        if self._attempts.failed or missing:
            raise Rejected([*self._attempts.failed, *missing])
        only = self._read_kinds()
        updates, period = self._read_updates()
        header = Header(
            scheme=self._title.split()[1],
            parameters=tuple(self._parameters.items()),
            workers=self._counts["WORKERS"],
            stages=self._counts["STAGES"],
            micro_batches=self._counts["MICRO_BATCHES"],
            pipes=self._read_pipes(),
            bounds=tuple(self._read_bounds()),
            halves=self._halves,
            strategies=self._read_strategies(),
            updates=updates,
            period=period,
            only=only,
            ties=self._read_ties(),
            slices=self._slices,
            weights=self._read_weights(),
            lengths=self._lengths,
            frozen=self._read_frozen(),
            shares=self._read_shares(),
            named=self._read_named(),
            feeds=tuple(map(self._read_feed, self._lines["FEEDS"])),
        )
        reject(graph_mistakes(header, [*map(span, self._lines["FEEDS"])]))
        header = replace(header, absent=tuple(self._read_absences(header)))
        return header.recomputing_for_backwards()

    def _read_bounds(self) -> Iterator[Bound]:
        workers = self._counts["WORKERS"]
        for quantity, (token, limits) in self._bounds.items():
            if len(limits) not in (1, workers):
                raise Rejected([say.BoundLength(span(token), quantity.value, len(limits), workers)])
            yield Bound(quantity, tuple(limits * (workers // len(limits))), span(token))

    def _read_kinds(self) -> tuple[Kind, ...]:
        if not self._lines["KINDS"]:
            return ()
        (token,) = self._lines["KINDS"]
        letters = token.split()[1:]
        for place, letter in enumerate(letters):
            if letter in letters[:place]:
                raise Rejected([say.HeaderTwice(span(token), f"kind {letter}")])
        listed = [kind for kind in KINDS.values() if not (kind.recomputes or kind.moves)]
        kinds = tuple(kind for kind in listed if kind.letter in letters)
        for reader, value in unmade(kinds):
            raise Rejected([say.KindLacking(span(token), str(token), reader.noun, value.reason)])
        finished = {kind for several in alternatives(kinds) for kind in several}
        for unfinished in (kind for kind in kinds if kind not in finished):
            raise Rejected([say.KindUnfinished(span(token), str(token), plural(unfinished.noun))])
        if not any(kind.sums for kind in kinds):
            self._require_nothing_about_updates(token)
        return () if len(kinds) == len(listed) else kinds

    def _require_nothing_about_updates(self, kinds: Token) -> None:
        lines = (*self._lines["UPDATES"], *self._lines["SYNC"], *self._lines["FROZEN"], *self._lines["KEEP"])
        words = [(token, token.split()[0]) for token in lines]
        words += [(token, "recompute") for token in self._lines["PIPE"] if "recompute" in token.split()[4:]]
        if words:
            raise Rejected([say.NoUpdates(span(token), word, str(kinds), span(kinds)) for token, word in words])

    def _read_updates(self) -> tuple[int, int]:
        if not self._lines["UPDATES"]:
            return 1, 0
        (token,) = self._lines["UPDATES"]
        updates, *periods = integers(token, token)
        micro_batches, level = self._counts["MICRO_BATCHES"], self._title.split()[0]
        if updates and micro_batches // updates % self._slices:
            raise Rejected([say.SlicesLeftOver(span(token), micro_batches // updates, self._slices)])
        if not periods and level == "plan":
            raise Rejected([say.TurnInPlan(span(token), level)])
        if periods and level != "plan":
            raise Rejected([say.WrongUpdates(span(token), level)])
        if not periods:
            if updates < 1 or micro_batches % updates:
                raise Rejected([say.UnevenTurn(span(token), micro_batches // self._slices, updates)])
            return updates, micro_batches
        period = periods[0]
        if updates < 1 or micro_batches % updates:
            raise Rejected([say.UnevenUpdates(span(token), micro_batches, updates, period, self._slices)])
        if period < 1 or period % (micro_batches // updates):
            raise Rejected([say.PeriodTooShort(span(token), micro_batches, updates, period, self._slices)])
        return updates, period

    def _read_strategies(self) -> tuple[tuple[Stage, Strategy], ...]:
        chosen: dict[Stage, Strategy] = {}
        for token in self._lines["SYNC"]:
            for stage in self._read_stages(token, integers(token, token)):
                if stage in chosen:
                    raise Rejected([say.SyncTwice(span(token), f"{stage}")])
                chosen[stage] = Strategy(token.split()[1])
        return tuple(sorted(chosen.items()))

    def _read_frozen(self) -> tuple[Stage, ...]:
        for token in self._lines["FROZEN"]:
            stages = self._read_stages(token, integers(token, token))
            if self._lines["UPDATES"]:
                raise Rejected([FrozenNotSupported(span(token))])
            if len(stages) == self._counts["STAGES"]:
                raise Rejected([AllFrozen(span(token), len(stages))])
            return stages
        return ()

    def _read_named(self) -> tuple[NamedStages, ...]:
        for token in self._lines["NAMED"]:
            words = token.split()[1:]
            ends, count = integers(token, " ".join(words[1::2])), self._counts["STAGES"]
            if self._lines["UPDATES"]:
                raise Rejected([GraphNotSupported(span(token))])
            starts = [0, *ends[1::2]]
            for name, start, stop, follows in zip(words[::2], ends[::2], ends[1::2], starts, strict=False):
                if start != follows or not start < stop <= count:
                    raise Rejected([say.NumberOutOfRange(span(token), "run", f"{start}..{stop}", follows, count - 1)])
                if words.count(name) > 1:
                    raise Rejected([say.HeaderTwice(span(token), f"`{name}`")])
            require(token, "stages", ends[-1], count, count)
            runs = zip(words[::2], map(Stage, ends[::2]), map(Stage, ends[1::2]), strict=True)
            return tuple(map(NamedStages._make, runs))
        return ()

    def _read_feed(self, token: Token) -> Feed:
        edge, _, keyword = token.partition(" as ")
        if self._lines["UPDATES"]:
            raise Rejected([GraphNotSupported(span(token))])
        for stage in integers(token, edge):
            require(token, "stage", stage, self._counts["STAGES"] - 1)
        source, target = map(Stage, integers(token, edge))
        return Feed(source, target, keyword.strip())

    def _read_absences(self, header: Header) -> Iterator[Absence]:
        micros: dict[str, tuple[Micro, ...]] = {}
        names = [group.name for group in header.named]
        for token in self._lines["ABSENT"]:
            _, name, runs = token.split(maxsplit=2)
            if name not in names:
                raise Rejected(
                    [say.NoSuchGroup(span(token), name, listed([f"`{known}`" for known in names]) or "none")]
                )
            if name in micros:
                raise Rejected([say.HeaderTwice(span(token), f"`absent {name}`")])
            micros[name] = tuple(map(Micro, _run(token, integers(token, runs), header.micro_batches - 1)))
            if len(micros[name]) != header.slices * len({micro // header.slices for micro in micros[name]}):
                raise Rejected([say.SlicesLeftOver(span(token), len(micros[name]), header.slices)])
        return (Absence(name, micros[name]) for name in names if name in micros)

    def _read_shares(self) -> tuple[Fraction, ...]:
        shares: dict[Stage, Fraction] = {}
        for token in self._lines["KEEP"]:
            text = token.split()[1]
            share = Fraction(*integers(token, text))
            if not 0 < share <= MAX_SHARE:
                raise Rejected([say.ShareOutOfRange(span(token), text, MAX_SHARE)])
            for stage in self._read_stages(token, integers(token, token.partition(text)[2])):
                if stage in shares:
                    raise Rejected([say.ShareTwice(span(token), f"{stage}")])
                shares[stage] = share
            if (common := lcm(*(share.denominator for share in shares.values()))) > MAX_SHARE:
                raise Rejected([say.SharesTooFine(span(token), f"{common:,}", MAX_SHARE)])
        everything = range(self._counts["STAGES"] if {*shares.values()} - {1} else 0)
        return tuple(shares.get(Stage(stage), Fraction(1)) for stage in everything)

    def _read_weights(self) -> tuple[int, ...]:
        weights: dict[int, int] = {}
        for token in self._lines["WEIGH"]:
            weight, *ends = integers(token, token)
            if weight < 1:
                raise Rejected([say.NumberOutOfRange(span(token), "weight", str(weight), 1, _LARGEST)])
            for micro in _run(token, ends, self._counts["MICRO_BATCHES"] - 1):
                if micro in weights:
                    raise Rejected([say.HeaderTwice(span(token), f"micro-batch {micro}")])
                weights[micro] = weight
        everything = range(self._counts["MICRO_BATCHES"] if {*weights.values()} - {1} else 0)
        return tuple(weights.get(micro, 1) for micro in everything)

    def _read_ties(self) -> tuple[WeightGroup, ...]:
        ties: dict[WeightGroup, None] = {}
        for token in self._lines["TIED"]:
            tie = self._read_tie(token)
            if tie in ties:
                raise Rejected([say.HeaderTwice(span(token), f"`{token}`")])
            ties[tie] = None
        return tuple(sorted(ties))

    def _read_tie(self, token: Token) -> WeightGroup:
        stages, last = integers(token, token), self._counts["STAGES"] - 1
        for number, stage in enumerate(stages):
            require(token, "stage", stage, last)
            if stage in stages[:number]:
                raise Rejected([say.HeaderTwice(span(token), f"stage {stage}")])
        return tuple(map(Stage, sorted(stages)))

    def _read_pipes(self) -> tuple[Pipe, ...]:
        pipes: dict[str, Pipe] = {}
        earlier: set[int] = set()
        with Attempts() as attempts:
            for token in self._lines["PIPE"]:
                with attempts.step():
                    pipe = self._read_pipe(token, earlier)
                    if pipe.name in pipes:
                        raise Rejected([say.HeaderTwice(span(token), f"pipe {pipe.name}")])
                    pipes[pipe.name] = pipe
        micro_batches = self._counts["MICRO_BATCHES"]
        if len(earlier) < micro_batches:
            first = next(micro for micro in range(micro_batches) if micro not in earlier)
            others = (micro_batches - len(earlier)) // self._slices - 1
            placed, whole, after = len(earlier) // self._slices, micro_batches // self._slices, first + self._slices
            pipes_span = span(self._lines["PIPE"][0])
            raise Rejected([say.MicroMissing(pipes_span, first // self._slices, placed, whole, first, after, others)])
        return tuple(pipes.values())

    def _read_pipe(self, token: Token, earlier: set[int]) -> Pipe:
        where = span(token)
        words = token.split()
        name, micros = words[1], words.index("micros", 4)
        starts = [place for place, word in enumerate(words) if word == "recompute" and place > micros]
        if micros - 3 != self._counts["STAGES"]:
            raise Rejected([say.PlacementLength(where, name, micros - 3, self._counts["STAGES"])])
        workers = integers(token, " ".join(words[3:micros]))
        for worker in workers:
            require(token, "worker", worker, self._counts["WORKERS"] - 1)
        ends = integers(token, " ".join(words[micros : min(starts, default=len(words))]))
        if torn := [end for end in ends if end % self._slices]:
            raise Rejected([say.SlicesLeftOver(where, torn[0], self._slices)])
        numbers = self._read_runs(token, ends, earlier)
        pipe = Pipe(name, tuple(map(Worker, workers)), tuple(map(Micro, numbers)))
        ends = [*starts[1:], len(words)]
        return self._recomputing(
            token, pipe, [words[start:end] for start, end in zip(starts, ends, strict=bool(starts))]
        )

    def _recomputing(self, token: Token, pipe: Pipe, parts: list[list[str]]) -> Pipe:
        """The pipe with the stages that recompute by the words of ``parts``, as in ``recompute 0..2 of 0..4``.

        Without ``of`` they recompute all micro-batches of the pipe.
        """
        again: dict[Stage, tuple[Micro, ...]] = {}
        for words in parts:
            end = words.index("of") if "of" in words else len(words)
            micros = pipe.micros
            if end < len(words):
                of_pipe = {*pipe.micros}
                micros = tuple(
                    map(Micro, _run(token, integers(token, " ".join(words[end:])), self._counts["MICRO_BATCHES"] - 1))
                )
                for place, micro in enumerate(micros):
                    if micro not in of_pipe:
                        raise Rejected([say.MicroElsewhere(span(token), micro, pipe.name)])
                    if micro in micros[:place]:
                        raise Rejected([say.HeaderTwice(span(token), f"micro-batch {micro}")])
            for stage in self._read_stages(token, integers(token, " ".join(words[:end]))):
                if stage in again:
                    raise Rejected([say.HeaderTwice(span(token), f"stage {stage}")])
                again[stage] = micros
        some = ((stage, micros) for stage, micros in sorted(again.items()) if {*micros} != {*pipe.micros})
        return replace(pipe, recompute=tuple(sorted(again)), recomputed=tuple(some))

    def _read_stages(self, token: Token, ends: list[int]) -> tuple[Stage, ...]:
        stages: set[int] = set()
        for stage in _run(token, ends, self._counts["STAGES"] - 1):
            if stage in stages:
                raise Rejected([say.HeaderTwice(span(token), f"stage {stage}")])
            stages.add(stage)
        return tuple(map(Stage, sorted(stages)))

    def _read_runs(self, token: Token, ends: list[int], earlier: set[int]) -> Iterator[int]:
        """Yields the micro-batches in runs, and adds them to ``earlier``, which must not have them yet."""
        last = self._counts["MICRO_BATCHES"] - 1
        for micro in _run(token, ends, last):
            if micro in earlier:
                raise Rejected([say.MicroTwice(span(token), micro // self._slices, last // self._slices)])
            earlier.add(micro)
            yield micro


def _lengths(token: Token, lengths: list[int], slices: int) -> tuple[int, ...]:
    if lengths and len(lengths) != slices:
        raise Rejected([say.LengthsOfOthers(span(token), len(lengths), slices)])
    for length in lengths:
        require(token, "length", length, MAX_LENGTH, 1)
    return normalized(lengths)


def _run(token: Token, ends: list[int], last: int) -> Iterator[int]:
    """Yields the numbers in the runs start, end, start, end ..; raises ``Rejected`` at a wrong run."""
    for start, end in zip(ends[::2], ends[1::2], strict=True):
        if start >= end or end > last + 1:
            raise Rejected([say.NumberOutOfRange(span(token), "run", f"{start}..{end}", 0, last)])
        yield from range(start, end)
