"""What the compiler is at, told on a terminal once it takes a while."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

AFTER = 1.0
"""Seconds before anything is shown."""


@contextmanager
def shown(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows on standard error, from one second on and until the end of the block, what the function was told last.

    With ``quiet``, or if standard error is no terminal, nothing is ever shown. Afterwards the terminal is as it was.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_interactive:
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
