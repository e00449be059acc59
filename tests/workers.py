"""Workers: processes that are forked from one which has collected all tests, and run whole files of them.

    pytest --workers 4

Importing and collecting ten thousand tests takes as long as many of them. Here that happens once, and what the modules
have imported, compiled and cached is in memory once. The fixtures of a session are made in each worker that needs them.
"""

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from tests import forking

_BYTES = 2
"""Bytes of the number of a file in the queue, which a worker reads at once."""


def run_in_workers(session: pytest.Session, count: int) -> None:
    """Runs the tests of a session in so many workers, and reports as a session without workers does.

    A worker takes the next file when it begins the last test of one. If a worker dies, that test has failed, with those
    that the worker had yet to run, and another one takes its place.

    Raises
    ------
    pytest.Session.Failed, pytest.Session.Interrupted
        If the run is to stop, as by --exitfirst.
    """
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one that all of them share
    queue, filling = os.pipe()
    os.write(filling, b"".join(number.to_bytes(_BYTES) for number in range(len(files))))
    os.close(filling)

    workers: dict[Connection, _Worker] = {}

    def start() -> None:
        ours, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if not process:
            ours.close()
            _work(session, files, queue, theirs)
        theirs.close()
        workers[ours] = _Worker(process)

    def receive(connection: Connection) -> None:
        worker = workers[connection]
        try:
            event, facts = connection.recv()
        except EOFError:
            del workers[connection]
            _, status = os.waitpid(worker.process, 0)
            end = f"the worker ended, with status {os.waitstatus_to_exitcode(status)}: {worker.error}"
            for item in worker.pending:
                item.ihook.pytest_runtest_logreport(
                    report=pytest.TestReport(item.nodeid, item.location, {}, "failed", end, "call")
                )
            if worker.pending:
                start()
            elif status:
                raise RuntimeError(end) from None
            return
        match event:
            case "takes":
                worker.pending += files[facts]
            case "ends":
                worker.pending.pop(0)
            case "fails":
                worker.error = facts
            case _:
                _repeat(session.config, event, facts)

    try:
        for _ in range(min(count, len(files))):
            start()
        while workers:
            for connection in wait([*workers]):
                receive(connection)  # type: ignore[arg-type]
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for worker in workers.values():
            os.kill(worker.process, signal.SIGKILL)
            os.waitpid(worker.process, 0)
        os.close(queue)


@dataclass
class _Worker:
    """A worker: its process, the tests that it has taken and not ended, and the error that ends it."""

    process: int
    pending: list[pytest.Item] = field(default_factory=list)
    error: str = ""


class _Sender:
    """The plugin of a worker that hands on what happens to its tests."""

    def __init__(self, config: pytest.Config, results: Connection) -> None:
        self._config, self._results = config, results

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self._results.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report_facts = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._results.send(("pytest_runtest_logreport", report_facts))

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        self._results.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))


def _repeat(config: pytest.Config, event: str, facts: Mapping[str, Any]) -> None:
    """Calls a hook here, with the facts that a worker has sent."""
    if event == "pytest_runtest_logreport":
        facts = {"report": config.hook.pytest_report_from_serializable(config=config, data=facts)}
    getattr(config.hook, event)(**facts)


def _work(session: pytest.Session, files: Sequence[list[pytest.Item]], queue: int, results: Connection) -> None:
    """Makes this process a worker, from its beginning to its end."""
    status = 1
    try:
        config = session.config
        forking.keep_server()
        # What tests print is captured in files of this worker's own; the terminal is that of the process that reports.
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        capture.start_global_capturing()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_Sender(config, results))

        def taken() -> Iterator[pytest.Item]:
            while number := os.read(queue, _BYTES):
                results.send(("takes", int.from_bytes(number)))
                yield from files[int.from_bytes(number)]

        items = taken()
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            results.send(("ends", None))
            item = following
        status = 0
    except BaseException:
        results.send(("fails", traceback.format_exc()))
    finally:
        os._exit(status)
