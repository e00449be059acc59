"""Cost of the rule on scripts: running the text of every rank's script and comparing it with the program.

    .venv/bin/python benchmarks/scripts.py [--runs 5] [--markdown PAGE]

Each round compiles a scheme with 65,536 operations in this process, from its text to all files, and then applies the
rule once more to the scripts, so that both sides meet the same machine. Times are CPU times, and the first round is
thrown away; the share is that of the whole compilation, the rule included.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from paired import ratio
from tables import circumstances, put, table

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.garbage import uncollected
from chimera_ir.request import Request
from chimera_ir.verify.verify import verify_scripts

SIZES: Sequence[tuple[str, int, int]] = (
    ("dapple", 8, 4096),
    ("dapple", 64, 512),
    ("gpipe", 32, 1024),
    ("chimera", 8, 4096),
    ("chimera", 32, 1024),
    ("chimera", 64, 512),
)
"""Schemes, D and N: chimera has the longest scripts."""

HEADS = ("", "D", "N", "lines of scripts", "compilation, s", "rule, s", "rule / compilation")


def one(scheme: str, depth: int, micro_batches: int) -> tuple[float, float, int]:
    """The CPU seconds of a compilation and of the rule, and the lines of the scripts."""
    request = Request(library.source(scheme), {"D": depth, "N": micro_batches}, max_operations=10_000_000)
    compilation = Compilation(request)
    begin = time.process_time()
    files = compilation.files
    whole = time.process_time() - begin
    verified, evaluation = compilation.verified, compilation.verified_evaluation
    with uncollected():
        begin = time.process_time()
        verify_scripts(verified, evaluation, files)
        rule = time.process_time() - begin
    return whole, rule, sum(text.count("\n") for name, text in files.items() if name.startswith("rank_"))


def row(size: tuple[str, int, int], runs: int) -> list[str]:
    """The row of a size."""
    rounds = [one(*size) for _ in range(runs + 1)][1:]
    wholes, rules, lines = zip(*rounds, strict=True)
    scheme, depth, micro_batches = size
    times = [f"{statistics.median(values):.2f}" for values in (wholes, rules)]
    return [scheme, f"{depth}", f"{micro_batches}", f"{lines[0]:,}", *times, str(ratio(rules, wholes))]


def main() -> None:
    """Measures all sizes and prints the table, or writes it into a page."""
    parser = argparse.ArgumentParser(description="What the rule on scripts costs.")
    parser.add_argument("--runs", type=int, default=5, help="runs whose median counts [default: 5]")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="write the table between the page's marks")
    options = parser.parse_args()
    text = "\n\n".join([circumstances(), table(HEADS, [row(size, options.runs) for size in SIZES])])
    print(text)
    if options.markdown is not None:
        put(options.markdown, "scripts", text)


if __name__ == "__main__":
    main()
