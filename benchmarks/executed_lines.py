"""How the lines that a compilation executes grow with workers and with micro-batches: a count that no machine changes.

    .venv/bin/python benchmarks/executed_lines.py [--schemes dapple,chimera] [--above 1.2]

Each count is a process of its own that runs ``chimera compile SCHEME --out DIR`` and counts the lines of chimera_ir
that are executed, function by function (`sys.settrace`). Sizes double, and an exponent of 1 says that so do the lines.
Functions are listed whose lines grow by a larger power than ``--above`` and are at least a thousandth of all lines at
the larger size. What one line does inside, such as sorting a list, counts once.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tables import table

PACKAGE = str(Path(__file__).resolve().parent.parent / "chimera_ir")
SCHEMES = {"dapple": "D", "chimera": "D", "zb_v": "P", "interleaved": "P"}
"""The schemes that are counted unless others are asked for, each with the name of its number of workers."""

WORKERS = ((16, 64), (32, 64))
MICRO_BATCHES = ((8, 128), (8, 256))
LEAST = 1000
"""A function is listed if its lines are one of so many or more."""


def counted(scheme: str, workers: int, micro_batches: int) -> Counter[str]:
    """Compiles in this process; the executed lines by function, as ``file:function``."""
    from chimera_ir.commands.group import main

    counts: Counter[CodeType] = Counter()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            counts[frame.f_code] += 1
        return line

    def call(frame: FrameType, _: str, __: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    with tempfile.TemporaryDirectory() as folder:
        sizes = (f"{SCHEMES[scheme]}={workers}", f"N={micro_batches}")
        sys.argv = ["chimera", "compile", scheme, *sizes, "--out", f"{folder}/out"]
        sys.settrace(call)
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.settrace(None)
    named: Counter[str] = Counter()
    for code, count in counts.items():
        named[f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"] += count
    return named


def run(scheme: str, size: tuple[int, int]) -> Counter[str]:
    """`counted`, in a process of its own."""
    command = [sys.executable, __file__, "--one", scheme, *map(str, size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Counter(json.loads(done.stdout.splitlines()[-1]))


def exponent(smaller: int, larger: int) -> float:
    """The power of a size by which a count grows where the size doubles."""
    return math.log2(larger / smaller) if smaller and larger else 0.0


def main() -> None:
    """Counts, and prints the exponents of all lines and of the functions that grow fastest."""
    parser = argparse.ArgumentParser(description="How the executed lines of a compilation grow.")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="schemes to compile [default: %(default)s]")
    parser.add_argument("--above", type=float, default=1.2, help="list functions that grow faster [default: 1.2]")
    parser.add_argument("--one", nargs=3, metavar=("SCHEME", "WORKERS", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        scheme, workers, micro_batches = options.one
        print("\n" + json.dumps(counted(scheme, int(workers), int(micro_batches))))
        return
    heads = ("", "in", "lines", "exponent")
    for scheme in options.schemes.split(","):
        listed: list[tuple[str, ...]] = []
        for what, sizes in (("workers", WORKERS), ("N", MICRO_BATCHES)):
            smaller, larger = (run(scheme, size) for size in sizes)
            total = larger.total()
            listed.append((scheme, what, f"{total:,}", f"{exponent(smaller.total(), total):.2f}"))
            growing = ((exponent(smaller[name], count), count, name) for name, count in larger.items())
            listed += [
                (name, what, f"{count:,}", f"{power:.2f}")
                for power, count, name in sorted(growing, reverse=True)
                if power > options.above and count * LEAST >= total
            ]
        print(table(heads, listed), flush=True)


if __name__ == "__main__":
    main()
