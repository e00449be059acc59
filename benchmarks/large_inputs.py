"""Inputs that are far too large, or wrong in very many places: what is refused, and has to be refused soon.

An input has a size. `NUMBERS` have it in a number, so that it must not matter at all; `TEXTS` are as long as it says.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Input(NamedTuple):
    """A text with the suffix of its file, and the parameters that are set."""

    suffix: str
    text: str
    settings: Mapping[str, int] = {}


def scheme(
    header: str = "", *, stages: str = "0..2 on s", micros: str = "0..2", clock: str = "2*m + s", more: str = ""
) -> Input:
    """A scheme of one pipe, most of which is given."""
    pipe = f"pipe p {{\n  stages s in {stages}\n  micros m in {micros}\n  F(m, s) @ {clock}\n  B(m, s) @ 2*m + 9 - s\n"
    return Input(".chim", f"scheme a\n{header}\n{pipe}  {more}\n}}\n")


def stream(version: str, *, stages: int = 2, every: int = 1, clock: str = "2*m + s") -> Input:
    """An asynchronous scheme of one pipe."""
    reads = f"reads version {version}"
    return scheme(f"update every {every}", stages=f"0..{stages} on s", micros="0..", clock=clock, more=reads)


def pipes(count: int, header: str = "", micros: str = "0..1") -> Input:
    """An indexed pipe."""
    lines = f"stages s in 0..2 on s\n micros m in {micros}\n F(m, s) @ 2*i + s\n B(m, s) @ 2*i + 3 - s\n"
    return Input(".chim", f"scheme a\n{header}\npipe p[i in 0..{count}] {{\n {lines}}}\n")


def turn(line: str) -> Input:
    """A program without end, of one line."""
    return ir("program", 1, 1, 1, f"worker 0:\n  {line}", more="updates 1 per turn\n")


def ir(level: str, workers: int, stages: int, micros: int, body: str = "", more: str = "") -> Input:
    """An IR text with one pipe on worker 0."""
    head = f"{level} a\nworkers {workers}\nstages {stages}\nmicro_batches {micros}\n{more}"
    return Input(".sir", f"{head}pipe p on {'0 ' * stages}micros 0..{micros}\n{body}\n")


def cycle(count: int) -> Input:
    """A schedule in which all workers wait for each other: down one pipe and up another, which meet at both ends."""
    down, up = range(count), [0, *range(count, 2 * count - 2), count - 1]
    lanes: dict[int, list[str]] = {worker: [] for worker in range(2 * count - 2)}
    for micro, place in ((1, up), (0, down)):
        for stage, worker in enumerate(place):
            lanes[worker] += [f"F m{micro} s{stage}", f"B m{micro} s{stage}"]
    lanes[count - 1] = [f"{kind} m{micro} s{count - 1}" for micro in (0, 1) for kind in "FB"]
    body = "\n".join("\n  ".join([f"worker {worker}:", *lines]) for worker, lines in lanes.items())
    places = [" ".join(map(str, place)) for place in (down, up)]
    head = f"schedule a\nworkers {len(lanes)}\nstages {count}\nmicro_batches 2\n"
    return Input(".sir", f"{head}pipe down on {places[0]} micros 0..1\npipe up on {places[1]} micros 1..2\n{body}\n")


def words(count: int, form: str, join: str = "\n") -> str:
    """As many copies of a form with a number in it."""
    return join.join(form.format(i) for i in range(count))


_PIPE = scheme().text.removeprefix("scheme a\n")
_COMMA = ",\n"
_HALVES = " + ".join(["m % {0} / 2"] * 90)

NUMBERS: Mapping[str, Callable[[int], Input]] = {
    "stages": lambda n: scheme(stages=f"0..{n} on s"),
    "stages on one worker": lambda n: scheme(stages=f"0..{n} on 0"),
    "stages of a stream": lambda n: stream("max(0, m - 1)", stages=n),
    "workers": lambda n: scheme(f"workers {n}"),
    "micro-batches": lambda n: scheme(micros=f"0..{n}"),
    "micro-batches on either side": lambda n: scheme(micros=f"-{n}..{n}"),
    "micro-batches by steps": lambda n: scheme(micros=f"0..{n} by {n}"),
    "the clocks of a stream": lambda n: stream("max(0, m - 1)", clock=f"2*m + {n}*s"),
    "guarded operations": lambda n: scheme(micros=f"0..{n}", clock="m when m < 0"),
    "pipes": pipes,
    "pipes without micro-batches": lambda n: pipes(n, micros="0..0"),
    "an update": lambda n: stream(f"max(0, m/{n} - 1)", every=n),
    "old versions": lambda n: stream(f"max(0, m - {n})"),
    "versions behind a corner": lambda n: stream(f"max(0, min(m - 1, 2*m - {n}))"),
    "a period": lambda n: stream("max(0, m - 1)", clock="2*m + " + _HALVES.format(n)),
    "periods": lambda n: stream("max(0, m - 1)", clock=f"m % {n} + m % {n - 1} + 2*m"),
    "stages of ir": lambda n: Input(
        ".sir", f"plan a\nworkers 1\nstages {n}\nmicro_batches 1\npipe p on 0 micros 0..1\n"
    ),
    "workers of ir": lambda n: ir("schedule", n, 1, 1),
    "updates of ir": lambda n: ir("plan", 1, 1, 1000, more=f"updates {n} period 1\n"),
    "updates of a turn": lambda n: ir("program", 1, 1, 1000, more=f"updates {n} per turn\n"),
    "a micro-batch of a turn": lambda n: turn(f"F m-{n} s0 v"),
    "a version of a turn": lambda n: turn(f"F m s0 v-{n}"),
    "slots of a turn": lambda n: turn(f"recv m s0->s0 from w0 into 0 of {n}"),
    "a run of ir": lambda n: Input(
        ".sir", f"plan a\nworkers 1\nstages 1\nmicro_batches 9\npipe p on 0 micros 0..{n}\n"
    ),
    "a clock of ir": lambda n: ir("plan", 1, 1, 1, f"  F m0 s0 @ {n}000000000000000000 on w0"),
}
"""By name, with a number in it that may be of any size."""

TEXTS: Mapping[str, tuple[int, Callable[[int], Input]]] = {
    "workers left out": (
        25_000,
        lambda n: scheme(f"workers 60000 except {words(n, '2..60000', ', ')}", stages="0..2 on s"),
    ),
    "parameters": (20_000, lambda n: Input(".chim", f"scheme a({words(n, 'p{0} = {0}', ', ')})\n{_PIPE}")),
    "parameters on lines": (20_000, lambda n: Input(".chim", f"scheme a({words(n, 'p{0} = {0}', _COMMA)})\n{_PIPE}")),
    "values": (19_000, lambda n: scheme(words(n, "let v{0} = {0}"))),
    "values beside pipes": (8_000, lambda n: pipes(1000, words(n, "let v{0} = {0}"), "0..1000")),
    "functions": (8_000, lambda n: scheme(words(n, "fn f{0}(x) = x"))),
    "functions that double": (
        4_000,
        lambda n: scheme(
            "fn f0(x) = x + x\n" + "\n".join(f"fn f{i}(x) = f{i - 1}(x) + f{i - 1}(x)" for i in range(1, n))
        ),
    ),
    "values that double": (
        4_000,
        lambda n: scheme("let v0 = 1\n" + "\n".join(f"let v{i} = v{i - 1} + v{i - 1}" for i in range(1, n))),
    ),
    "unknown names": (12_000, lambda n: scheme(words(n, "let v{0} = w{0}"))),
    "unknown names in a formula": (40_000, lambda n: scheme("let x = max(" + words(n, "w{0}", ", ") + ")")),
    "circles": (12_000, lambda n: scheme(words(n, "let v{0} = v{0}"))),
    "a long circle": (12_000, lambda n: scheme("\n".join(f"let v{i} = v{(i + 1) % n}" for i in range(n)))),
    "requirements": (12_000, lambda n: scheme("let a = 0\n" + words(n, 'require a > {0}, "no"'))),
    "requirements behind values": (
        4_000,
        lambda n: scheme(
            "let v0 = 0\n"
            + "\n".join(f"let v{i} = v{i - 1}" for i in range(1, 2 * n))
            + "\n"
            + words(n, f'require v{2 * n - 1} > {{0}}, "no"')
        ),
    ),
    "syntax mistakes": (12_000, lambda n: scheme(words(n, "let v{0} = = 1"))),
    "syntax mistakes at the end": (
        15_000,
        lambda n: scheme(words(n, "let v{0} = {0}") + "\n" + words(30, "let v{0} = = 1")),
    ),
    "unknown words": (12_000, lambda n: scheme(words(n, "lett v{0} 1"))),
    "strays": (9_000, lambda n: scheme("$$$$$$$$$\n" * n)),
    "strays on a line": (40_000, lambda n: Input(".chim", _PIPE.replace("\n", " ") + "é" * 20 * n + " $" * n)),
    "a line": (900_000, lambda n: scheme("let x = 1 # " + "é" * n + "\nlet y = = 2")),
    "brackets": (40_000, lambda n: scheme("let x = " + "(" * n)),
    "a sum": (40_000, lambda n: scheme("let x = " + "1 + " * n + "1")),
    "a chain": (40_000, lambda n: scheme("require " + "1 < " * n + '1, "no"')),
    "minuses": (90_000, lambda n: scheme("let x = " + "-" * n + "1")),
    "a literal": (900_000, lambda n: scheme("let x = " + "9" * n)),
    "sync lines": (
        15_000,
        lambda n: scheme(stages="0..60000 on s", micros="0..1", more=words(n, "sync lazy when s < {0}")),
    ),
    "operation lines": (5_000, lambda n: scheme(stages="0..60000 on s", micros="0..1", more=words(n, "F(m, s) @ {0}"))),
    "pipes of text": (
        4_500,
        lambda n: Input(
            ".chim", "scheme a\n" + words(n, "pipe p{0} {{ stages s in 0..2 on s micros m in 0..1 F(m, s) @ {0} }}")
        ),
    ),
    "runs of ir": (
        4_000,
        lambda n: Input(
            ".sir",
            "plan a\nworkers 1\nstages 65536\nmicro_batches 1\n"
            f"pipe p on {'0 ' * 65536}micros 0..1 recompute {'0..65536 ' * n}\n",
        ),
    ),
    "a number of ir": (900_000, lambda n: ir("plan", 1, 1, 1, f"  F m{'9' * n} s0 @ 3 on w0")),
    "wrong lines of ir": (400_000, lambda n: ir("plan", 1, 1, 1, words(n, "  X m{0} s0"))),
    "numbers beyond ir": (400_000, lambda n: ir("plan", 1, 1, 1, words(n, "  F m{0} s0 @ 3 on w0"))),
    "lines of ir": (3_000_000, lambda n: ir("plan", 1, 1, 1, "  F m0 s0 @ 3 on w0\n" * n)),
    "headings of ir": (3_000_000, lambda n: ir("schedule", 1, 1, 1, "worker 0:\n" * n)),
    "micro-batches of an operation of ir": (
        1_000_000,
        lambda n: ir("plan", 1, 1, 1, "  F m0" + ",m0" * n + " s0 @ 3 on w0"),
    ),
    "a placement of ir": (
        2_000_000,
        lambda n: Input(".sir", f"plan a\nworkers 9\nstages 9\nmicro_batches 1\npipe p on {'0 ' * n}micros 0..1\n"),
    ),
    "a cycle of ir": (2_500, cycle),
}
"""By name, as long as the number says; with each the size at which it is about as long as a text may be."""
