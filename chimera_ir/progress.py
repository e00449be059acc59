"""What the compiler is at, told on a terminal once it takes a while."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from chimera_ir.driver import Level, Result

AFTER = 1.0
"""Seconds before anything is shown."""

_NEXT = {
    Level.AST: "placing and ordering the operations, verifying the schedule",
    Level.PLAN: "verifying the schedule",
    Level.SCHEDULE: "adding messages and gradient sums, verifying the program",
    Level.PROGRAM: "simulating",
    Level.TIMELINE: "comparing with the baseline",
    Level.REPORT: "writing the scripts",
}
"""What is done once a level is there."""


@contextmanager
def shown() -> Iterator[Callable[[str], None]]:
    """Shows on standard error, from one second on and until the end of the block, what the function was told last.

    If standard error is no terminal, nothing is ever shown. Afterwards the terminal is as it was.
    """
    console = Console(stderr=True)
    if not (sys.stderr.isatty() and console.is_interactive):
        yield lambda _: None
        return
    line = Progress(
        *(SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = line.add_task("reading the text")
    timer = Timer(AFTER, line.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda doing: line.update(task, description=doing)
    finally:
        timer.cancel()
        timer.join()
        line.stop()


def watched(levels: Iterator[Result], tell: Callable[[str], None]) -> Iterator[Result]:
    """The levels; with each, what comes next is told."""
    for level, value in levels:
        tell(_NEXT[level])
        yield level, value
