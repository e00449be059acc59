"""The command lines that are compared: the library at many sizes, options, the examples, mistakes, plans, predictions.

Paths are those of a checkout. A case writes to `out`, if to anything.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

SIZES: dict[str, list[dict[str, int]]] = {
    "gpipe": [{"D": D, "N": N} for D, N in product((1, 2, 4, 8), (1, 3, 8, 20))],
    "dapple": [{"D": D, "N": N} for D, N in product((1, 2, 4, 8), (1, 3, 8, 20))],
    "gems": [{"D": D, "N": N} for D, N in product((2, 4, 8), (1, 4, 7))],
    "chimera": [
        *({"D": D, "N": N} for D, N in product((2, 4, 6, 8), (1, 2, 3, 4, 8, 13, 16))),
        *({"D": 8, "N": N, "f": f} for N, f in product((3, 8, 16), (2, 4))),
    ],
    "chimera_doubling": [{"D": D, "N": N} for D, N in product((2, 4, 8), (2, 4, 8, 12, 24))],
    "chimera_halving": [{"D": D, "N": N} for D, N in product((2, 4, 8), (2, 4, 8, 12, 24))],
    "interleaved": [{"P": P, "v": 2, "N": N, "hop": hop} for P, N, hop in product((2, 4), (1, 4, 9), (1, 2))],
    "breadth_first": [{"P": P, "v": 2, "N": N} for P, N in product((2, 4), (1, 4, 9))],
    "waves": [{"P": P, "w": 1, "N": N} for P, N in product((2, 3, 4), (1, 4, 9))],
    "bitpipe": [{"P": P, "N": N} for P, N in product((2, 4), (1, 4, 9))],
    "zb_h1": [{"D": D, "N": N} for D, N in product((1, 2, 4), (1, 3, 8))],
    "zb_h2": [{"D": D, "N": N} for D, N in product((1, 2, 4), (1, 3, 8))],
    "dapple_offload": [{"D": D, "N": N} for D, N in product((1, 2, 4), (1, 5))],
    "dapple_recompute": [{"D": D, "N": N} for D, N in product((1, 2, 4), (1, 5))],
    "interleaved_offload": [{"P": P, "N": N, "h": h} for P, N, h in product((2, 4), (1, 4), (1, 2))],
    "seq1f1b": [{"D": D, "N": N, "k": k} for D, N, k in product((1, 2, 4), (1, 5), (1, 3))],
    "seq1f1b_interleaved": [{"P": P, "v": 2, "N": N, "k": k} for P, N, k in product((2, 4), (1, 4), (2, 3))],
    "seq1f1b_zb": [{"D": D, "N": N, "k": 3} for D, N in product((1, 2, 4), (1, 5))],
    "terapipe": [{"D": D, "N": N, "k": 3} for D, N in product((1, 2, 4), (1, 5))],
    "two_encoders": [{"a": a, "b": 3 - a, "D": D, "N": N} for a, D, N in product((1, 2), (1, 3), (1, 5))],
    "encoder_decoder": [{"E": E, "D": D, "N": N} for E, D, N in product((1, 2), (1, 3), (1, 5))],
    "colocated": [{"P": P, "N": N * P} for P, N in product((1, 2, 4), (1, 3))],
    "colocated_nested": [{"P": P, "N": N * P} for P, N in product((1, 2, 4), (1, 3))],
    "pipedream": [{"D": D} for D in (1, 2, 3, 4, 8)],
    "pipedream_2bw": [{"D": D, "N": N} for D, N in ((1, 1), (2, 2), (2, 5), (4, 4), (4, 7), (8, 8))],
}
LEVELS = ("ast", "plan", "schedule", "program", "timeline", "report")
OPTIONS = (
    ("--cost", "B=3"),
    ("--cost", "F=1/3", "--cost", "B=0.5"),
    ("--recompute",),
    ("--sync", "eager"),
    ("--sync", "lazy"),
)
PROFILED = ("--profile", "docs/examples/plan.profile.toml", "--cluster", "docs/examples/small.cluster.toml")
PREDICTIONS = (("--copies", "1"), ("--copies", "4"), ("--copies", "4", "--layout", "replica"))
PLANS = (
    (),
    ("--recompute",),
    ("--no-recompute", "--greedy"),
    ("--sync", "lazy", "--sync", "eager"),
    ("--layout", "replica"),
    *(("--scheme", name) for name in SIZES),
)


class Case(NamedTuple):
    """A command of the project with its arguments, and a name that is a path."""

    name: str
    command: str
    arguments: tuple[str, ...]


def cases(root: Path) -> Iterator[Case]:
    """All cases; the texts are those below ``root``."""
    for scheme, sizes in SIZES.items():
        for size in sizes:
            words = [word for name, value in size.items() for word in ("--set", f"{name}={value}")]
            at = "-".join((scheme, *(f"{name}{value}" for name, value in size.items())))
            yield _compile(f"library/{at}/files", scheme, *words, "--out", "out")
            for level in LEVELS:
                yield _compile(f"library/{at}/{level}", scheme, *words, "--emit", level)
        middle = [word for name, value in sizes[len(sizes) // 2].items() for word in ("--set", f"{name}={value}")]
        for option in OPTIONS:
            yield _compile(
                f"options/{scheme}{'_'.join(option).replace('/', 'over')}", scheme, *middle, *option, "--out", "out"
            )
        four = "D=4" if "D" in sizes[0] else "P=2"  # stages of the profile
        for prediction in PREDICTIONS:
            name = "_".join(prediction)
            words = [*PROFILED, *prediction, "--micro-batch-size", "4", "--set", four, "--out", "out"]
            yield _compile(f"predictions/{scheme}{name}", scheme, *words)
    for path in _texts(root, "docs/examples", "examples/schemes", "tests/errors/front", "tests/errors/middle"):
        yield _compile(f"texts/{path}", path, "--out", "out")
    for path in _texts(root, "tests/errors/middle", "docs/examples"):
        yield _compile(f"texts/{path}-program", path, "--emit", "program")
    for options in PLANS:
        name = "_".join(options) or "plain"
        yield Case(f"plans/{name}", "chimera-plan", (*PROFILED, "--mini-batch", "256", "--json", *options))


def _compile(name: str, *arguments: str) -> Case:
    return Case(name, "chimera-compile", arguments)


def _texts(root: Path, *folders: str) -> Iterator[str]:
    for folder in folders:
        for path in sorted((root / folder).iterdir()):
            if path.suffix in (".chim", ".sir"):
                yield str(path.relative_to(root))
