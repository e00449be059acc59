"""torchrun, or a Python program, in a process forked from one that has imported torch; its ranks are forked from it.

A launch takes a tenth of the CPU time of one from the command line. A rank is what it is there: its script is its
``__main__``, the directory of the script comes first on its path, and of the project nothing is imported but what
the directory has a copy of (`tests.e2e.preloaded`).
"""

import atexit
import ctypes
import gc
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partialmethod
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = "TESTS_IMPORTED_BEFORE_RANKS"
"""Variable of the environment with names of modules that torchrun imports before its ranks are forked from it."""

FINALIZED = "TESTS_RANKS_ARE_FINALIZED"
"""Variable of the environment with which ranks end as an interpreter does: it destroys all objects."""

SERVER = "TESTS_SERVER_OF_FORKS"
"""Variable of the environment with the address of a server from which a torchrun on a command line is forked."""

SCRIPT = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Program for `python` that runs a script, with its arguments, as its own interpreter would."""

_ALL_FORKED: list[int] = []
"""The ends of the pipe by which ranks of this process learn that all of them are forked."""

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.e2e.preloaded", "tests.e2e.huge_pages"])


def torchrun(
    words: Sequence[str], environment: Mapping[str, str], folder: Path, patience: float
) -> subprocess.CompletedProcess[str]:
    """Runs torchrun with these words behind its name, for so many seconds at most; ends with everything it said.

    Raises
    ------
    AssertionError
        If a process stays behind.
    """
    return _ended(_launch, words, environment, folder, patience)


def torchrun_of_interpreters(
    words: Sequence[str], environment: Mapping[str, str], folder: Path, patience: float
) -> subprocess.CompletedProcess[str]:
    """As `torchrun`, whose ranks are started as from the command line."""
    return _ended(_launch_interpreters, words, environment, folder, patience)


def signalled(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    patience: float,
    number: int,
    when: str,
    to_all: bool = False,
) -> tuple[subprocess.CompletedProcess[str], float]:
    """As `torchrun`, which gets a signal as soon as its standard output holds a text, or all of its processes do.

    Also returns the seconds from the signal until no process is left.
    """
    sent: list[float] = []

    def send(process: BaseProcess, stdout: Path) -> None:
        deadline = time.monotonic() + patience
        while when not in stdout.read_text() and process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.02)
        sent.append(time.monotonic())
        assert process.pid is not None
        _end(_of_session(process.pid) if to_all else [process.pid], number)

    done = _ended(_launch, words, environment, folder, patience, send)
    seconds = time.monotonic() - sent[0]
    assert when in done.stdout, f"{when!r} was never said: {done.stdout}{done.stderr}"
    return done, seconds


def python(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, patience: float
) -> subprocess.CompletedProcess[str]:
    """As ``python -c program arguments``, in a folder; raises as `torchrun` does."""
    return _ended(_run, [program, *arguments], environment, folder, patience)


def _ended(
    act: Callable[[Sequence[str]], None],
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    patience: float,
    meanwhile: Callable[[BaseProcess, Path], None] = lambda process, stdout: None,
) -> subprocess.CompletedProcess[str]:
    """What the other functions have in common; ``meanwhile`` gets the process and the file of its standard output."""
    with tempfile.TemporaryDirectory() as logs:
        said = [str(Path(logs) / name) for name in ("stdout", "stderr")]
        process = _SERVER.Process(target=_become, args=(act, list(words), dict(environment), folder, *said))
        for name in said:
            Path(name).touch()
        process.start()
        meanwhile(process, Path(said[0]))
        process.join(patience)
        if process.exitcode is None:
            _end(_of_session(process.pid))
            raise subprocess.TimeoutExpired(list(words), patience)
        left = _left_of_session(process.pid)
        _end(left)
        assert not left, f"{len(left)} processes stay behind"
        return subprocess.CompletedProcess(list(words), process.exitcode, *(Path(name).read_text() for name in said))


def _left_of_session(session: int | None, seconds: float = 10) -> list[int]:
    """Its processes that still run after some time to end."""
    deadline = time.monotonic() + seconds
    while (left := _of_session(session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _of_session(session: int | None) -> list[int]:
    running: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, of, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(of) == session and state != "Z":
                running.append(int(entry.name))
    return running


def _end(processes: Iterable[int], number: int = signal.SIGKILL) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _become(
    act: Callable[[Sequence[str]], None],
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    stdout: str,
    stderr: str,
) -> None:
    """Makes this process one that acts on these words, in a session of its own."""
    import torch

    os.setsid()
    for name, number in ((stdout, 1), (stderr, 2)):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)  # as of python -u
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    further = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = ["", *further, *(entry for entry in sys.path if Path(entry).resolve() not in (ROOT, folder))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("chimera_ir", "chimera_runtime")]:
        del sys.modules[name]  # what the program that launches has imported
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    act(words)


def served() -> dict[str, str]:
    """Variables with which a torchrun on a command line is forked from the server of this process."""
    forkserver.ensure_running()
    return {SERVER: str(forkserver._forkserver._forkserver_address)}  # type: ignore[attr-defined]


def replace_torchrun(words: Sequence[str]) -> NoReturn:
    """Makes a process that has started as torchrun one that forks its ranks; its path begins with the project."""
    if address := os.environ.pop(SERVER, None):
        _become_served(address, words)
    import_module("tests.e2e.preloaded")
    sys.path[0] = ""
    _until_end(_launch, words)


def use_server(address: str) -> None:
    """Makes a server of another process the one that forks for this process."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = lambda: None


def _become_served(address: str, words: Sequence[str]) -> NoReturn:
    """Has a server of another process fork torchrun, passes signals on to it, and ends as it ends."""
    use_server(address)
    streams = [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = _SERVER.Process(target=_become, args=(_launch, [*words], environment, Path.cwd(), *streams))
    process.start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: os.kill(process.pid or 0, received))
    process.join()
    assert process.exitcode is not None
    os._exit(process.exitcode if process.exitcode >= 0 else 128 - process.exitcode)


def _run(words: Sequence[str]) -> None:
    """Makes this process a Python that has been given a program on its command line, from its beginning to its end."""
    program, *arguments = words
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = ModuleType("__main__")
    _until_end(exec, compile(program, "<string>", "exec"), vars(main))


def _until_end(act: Callable[..., object], *arguments: object) -> NoReturn:
    """Calls a function and ends this process, as Python does when a program is over."""
    status: object = None
    try:
        act(*arguments)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def _launch(words: Sequence[str]) -> None:
    """Makes this process torchrun; variables of the environment name further modules to import, and the seconds that
    ranks have to end."""
    from torch.distributed import run
    from torch.multiprocessing import ProcessContext

    for name in os.environ.pop(IMPORTS, "").split():
        import_module(name)
    gc.freeze()  # a collection in a rank would touch all that was imported, and copy its pages
    if seconds := os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        ProcessContext.join = partialmethod(ProcessContext.join, grace_period=float(seconds))
    _ALL_FORKED[:] = os.pipe()
    run.run_script_path = _as_script
    run.main(["--run-path", "--start-method=fork", *words])


def _launch_interpreters(words: Sequence[str]) -> None:
    """Makes this process a torchrun that starts its ranks itself."""
    from torch.distributed import run

    run.main([*words])


def _as_script(training_script: str, *training_script_args: str) -> None:
    """Takes the place of torchrun's ``--run-path``, which leaves a rank torchrun's path of imports and its signals.

    A rank waits until all are forked: torchrun's store has a thread, which looks up the name of a rank that connects.
    A rank that is forked at that moment has the resolver of the C library locked, for ever. The last one writes a byte
    for each of the others into a pipe.
    """
    others = int(os.environ["LOCAL_WORLD_SIZE"]) - 1
    if int(os.environ["LOCAL_RANK"]) == others:
        os.write(_ALL_FORKED[1], bytes(others))
    else:
        os.read(_ALL_FORKED[0], 1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[0] = os.path.dirname(os.path.abspath(training_script))
    sys.argv = [training_script, *training_script_args]
    atexit._clear()  # what was registered by the processes that this one was forked from
    if FINALIZED in os.environ:
        _finalized(training_script)
    try:
        runpy.run_path(training_script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise  # else torchrun would wait for what its function returns
    finally:
        atexit._run_exitfuncs()


def _finalized(training_script: str) -> NoReturn:
    """Runs a script, and ends this process as the interpreter of a command line ends."""
    status = 0
    try:
        runpy.run_path(training_script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError("Py_Exit returned")
