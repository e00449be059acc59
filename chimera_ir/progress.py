"""Progress on standard error: on a terminal a line that changes, in a log a line every few seconds."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread, Timer
from time import monotonic

AFTER, EVERY = 1.0, 8.0
"""Seconds before anything is shown, and from a line of a log to the next."""


@contextmanager
def shown(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function that sets the text of a progress line, which shows after a second; nothing with ``quiet``."""
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


@contextmanager
def logged() -> Iterator[Callable[[str], None]]:
    """Yields a function that sets a text; every few seconds, it goes to standard error with the time."""
    start, over, last = monotonic(), Event(), ["starting"]

    def write() -> None:
        while not over.wait(EVERY):
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{last[0]} ({monotonic() - start:.0f} s)\n")
                sys.stderr.flush()

    thread = Thread(target=write, daemon=True)
    thread.start()
    try:
        yield lambda doing: last.__setitem__(0, doing)
    finally:
        over.set()
        thread.join()
