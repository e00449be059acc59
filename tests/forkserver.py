"""Processes that begin with torch imported, from a forkserver: a script, ``-c PROGRAM`` or ``-m MODULE``, and words."""

import atexit
import filecmp
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import reload
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = ROOT / "chimera_runtime"

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch._dynamo", "torch.distributed.run", "chimera_runtime.tools.launch"])


def start(words: Sequence[str], environment: Mapping[str, str], folder: Path, out: Path, err: Path) -> BaseProcess:
    """Starts a process in a session of its own, which appends what it says to two files, or to one."""
    process = _SERVER.Process(target=_become, args=(words, dict(environment), folder, out, err))
    process.start()
    return process


def run(words: Sequence[str], environment: Mapping[str, str], folder: Path, patience: float) -> CompletedProcess[str]:
    """Runs a process for so many seconds, then kills it; ends with all that it said."""
    with TemporaryDirectory() as logs:
        out, err = Path(logs, "out"), Path(logs, "err")
        (process := start(words, environment, folder, out, err)).join(patience)
        process.kill()
        assert process.exitcode is not None, f"after {patience} s: {out.read_text()}{err.read_text()}"
        return CompletedProcess(list(words), process.exitcode, out.read_text(), err.read_text())


def _become(words: Sequence[str], environment: Mapping[str, str], folder: Path, out: Path, err: Path) -> None:
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # that of an interpreter, not this one's own
    for file, number in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    sys.modules["torch"].set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    kind, what, *arguments = words if words[0] in ("-c", "-m") else ("", *words)
    path = [str(folder) if kind else os.path.dirname(what), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [*filter(None, path), *(entry for entry in sys.path if Path(entry).resolve() not in (ROOT, folder))]
    _choose_runtime()
    sys.argv = [kind or what, *arguments]
    with ExitStack() as ends:
        atexit.register = ends.callback  # multiprocessing ends a process without what is registered
        try:
            if kind == "-m":
                runpy.run_module(what, run_name="__main__", alter_sys=True)
            elif kind == "-c":
                sys.modules["__main__"] = main = type(sys)("__main__")
                exec(compile(what, "<string>", "exec"), vars(main))
            else:
                runpy.run_path(what, run_name="__main__")
        except Exception:
            sys.excepthook(*sys.exc_info())
            sys.exit(1)


def _choose_runtime() -> None:
    """Forgets the runtime that was imported with torch, unless that on the path has the same files."""
    files = [str(file.relative_to(RUNTIME)) for file in RUNTIME.rglob("*.py")]
    first = next((entry for entry in sys.path if Path(entry, RUNTIME.name).is_dir()), "")
    if len(filecmp.cmpfiles(RUNTIME, Path(first, RUNTIME.name), files)[0]) == len(files):
        for name in ("tools.open.stdio", "tools"):  # which look at their process, or change it
            reload(sys.modules[f"{RUNTIME.name}.{name}"])
    else:
        for name in [name for name in sys.modules if name.startswith(RUNTIME.name)]:
            del sys.modules[name]
