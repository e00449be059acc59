"""How long chimera compile takes, and how much memory, to refuse what is too large or wrong in very many places.

    .venv/bin/python benchmarks/refusals.py [--timeout 60] [NAME ..]

Each input is compiled by a process of its own. A row says what processor time and memory that took, how the process
ended, and how the answer begins. The time that is spent on nothing but starting is in the first row.
"""

import argparse
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from commands import COMPILE
from large_inputs import NUMBERS, TEXTS, Input, scheme

MEMORY = 8 * 2**30
"""Bytes of address space that a compilation may use."""


def inputs() -> Iterator[tuple[str, Input]]:
    """All of them by name, the first one small."""
    yield "(a small scheme)", scheme()
    for number in (10**6, 10**17):
        yield from ((f"{name}: 10^{len(str(number)) - 1}", make(number)) for name, make in NUMBERS.items())
    yield from ((f"{name}: {size:,}", make(size)) for name, (size, make) in TEXTS.items())


def answer(given: Input, folder: Path, timeout: float) -> str:
    """The row of an input, but its name."""
    path = folder / f"input{given.suffix}"
    path.write_text(given.text, encoding="utf-8")
    command = [*COMPILE, str(path), "--emit", "plan" if given.suffix == ".chim" else "report"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )
    signal.signal(signal.SIGALRM, lambda *_: process.kill())
    signal.setitimer(signal.ITIMER_REAL, timeout)
    said = process.stderr.read().decode(errors="replace").splitlines() if process.stderr else []
    _, status, used = os.wait4(process.pid, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    code = os.waitstatus_to_exitcode(status)
    shown = f"{said[-1 if code == 70 else 0]:.60}" if said else ""
    return f"{used.ru_utime + used.ru_stime:>8.1f} {used.ru_maxrss / 1024:>7,.0f} {code:>5} {len(said):>6}  {shown}"


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description="How long it takes to refuse what is too large or wrong.")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which an input is given up")
    parser.add_argument("names", nargs="*", help="only inputs whose names begin so")
    arguments = parser.parse_args()
    print(f"{'':<45}{'CPU, s':>8} {'MiB':>7} {'ended':>5} {'lines':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for name, given in inputs():
            if name.startswith(tuple(arguments.names) or ""):
                print(f"{name:<45}{answer(given, Path(folder), arguments.timeout)}", flush=True)


if __name__ == "__main__":
    main()
