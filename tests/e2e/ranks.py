"""Compiling schemes and running what was generated, for the end-to-end tests."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from click.testing import CliRunner
from torch.distributed import TCPStore

from chimera_ir.commands.compile_command import compile_command
from tests import forkserver
from tests.forkserver import ROOT
from tests.patience import FACTOR, PATIENCE

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"
SCRIPT = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Program that runs a script with its arguments, after what a test writes before it."""


def compiled(
    folder: Path, scheme: str, tied: tuple[str, ...] = (), asked: tuple[str, ...] = (), **parameters: int
) -> Path:
    """The output directory of a scheme: of the library, or a file.

    ``tied`` are the stages that share parameters, ``asked`` further options of the command.
    """
    values = (f"{name}{value}" for name, value in parameters.items())
    out = folder / "-".join([Path(scheme).stem, *values, *tied, *(word.strip("-") for word in asked)])
    settings = [text for name, value in parameters.items() for text in ("--set", f"{name}={value}")]
    settings += [text for tie in tied for text in ("--tied", tie)]
    result = CliRunner().invoke(compile_command, [scheme, *settings, *asked, "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out


@dataclass(frozen=True)
class Job:
    """A generated program and the options to run it with.

    Without a ``model``, ``directory`` is a script of its own and the arguments are all that it gets. When a rank has
    failed, the others have ``grace`` seconds to say what they know before they get a SIGTERM; of torchrun, none.
    """

    name: str
    directory: Path
    arguments: tuple[str, ...] = ("--check-only",)
    model: str | None = "zoo.py"
    environment: Mapping[str, str] = field(default_factory=dict)
    grace: float = 0


@dataclass(frozen=True)
class Outcome:
    """What a job's ranks said, and how they ended."""

    said: tuple[str, ...]
    statuses: tuple[str, ...]

    def assert_passed(self) -> None:
        assert set(self.statuses) == {"0"}, "\n".join((*self.statuses, *self.said))


def environment() -> dict[str, str]:
    """The environment of the tests, with one thread per rank and nothing of ours on the ranks' path."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def run_all(folder: Path, ranks: int, jobs: Sequence[Job]) -> dict[str, Outcome]:
    """Runs the jobs in turn."""
    outcomes: dict[str, Outcome] = {}
    for job in jobs:
        if job.model is None:
            words, variables = (str(job.directory), *job.arguments), {"PYTHONPATH": str(ROOT)}
        else:
            model = ("--model", str(MODELS / job.model), "--timeout", f"{120 * FACTOR:g}")
            words, variables = (str(job.directory / "train.py"), *model, *job.arguments), {}
        logs = [folder / f"{job.name}.log.{rank}" for rank in range(ranks)]
        statuses = _ended(words, variables | dict(job.environment), folder, logs, logs, job.grace)
        outcomes[job.name] = Outcome(tuple(log.read_text() for log in logs), tuple(map(str, statuses)))
    return outcomes


def torchrun(directory: Path, ranks: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs one generated program as torchrun does; ends with everything that its ranks said, and 1 if one failed."""
    return torchrun_script(directory / "train.py", ranks, *arguments, folder=directory.parent, **variables)


def torchrun_script(
    script: Path, ranks: int, *arguments: str, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """As `torchrun`, for any script."""
    words = (str(script), *arguments)
    with TemporaryDirectory() as said:
        out, err = ([Path(said, f"{name}.{rank}") for rank in range(ranks)] for name in ("out", "err"))
        failed = any(_ended(words, variables, folder or Path.cwd(), out, err))
        texts = ("".join(log.read_text() for log in logs) for logs in (out, err))
        return subprocess.CompletedProcess(words, int(failed), *texts)


def _ended(
    words: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    out: Sequence[Path],
    err: Sequence[Path],
    grace: float = 0,
) -> list[int]:
    """The statuses of ranks, of which each has a log; when one fails, the others get a SIGTERM, and later a SIGKILL."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job |= {"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    job |= {"WORLD_SIZE": str(len(out)), "LOCAL_WORLD_SIZE": str(len(out)), "GROUP_RANK": "0"}
    with TemporaryDirectory() as errors:
        processes = []
        for rank, (stdout, stderr) in enumerate(zip(out, err, strict=True)):
            Path(errors, str(rank)).mkdir()
            stdout.touch()
            stderr.touch()
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            mine["TORCHELASTIC_ERROR_FILE"] = f"{errors}/{rank}/error.json"
            processes.append(forkserver.start(words, environment() | job | mine | variables, folder, stdout, stderr))
        patience = float(variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        steps = [(time.monotonic() + PATIENCE, BaseProcess.kill)]
        has_failed = False
        while running := [process for process in processes if process.exitcode is None]:
            if not has_failed and any(process.exitcode for process in processes):
                has_failed, now = True, time.monotonic()
                steps = [(now + grace, BaseProcess.terminate), (now + grace + patience, BaseProcess.kill)]
            if steps and time.monotonic() >= steps[0][0]:
                for process in running:
                    steps[0][1](process)
                steps = steps[1:]
            until = steps[0][0] - time.monotonic() if steps else None
            connection.wait([process.sentinel for process in running], until)
    return [process.exitcode or 0 for process in processes]


def launched(
    directory: Path, ranks: int, options: Sequence[str], arguments: Sequence[str], variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs one generated program under torchrun itself, with options of torchrun's."""
    words = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options, str(directory / "train.py"))
    return forkserver.run((*words, *arguments), environment() | dict(variables), directory.parent, PATIENCE)


def interrupted(
    directory: Path, ranks: int, *arguments: str, when: str, number: int = signal.SIGINT, to_all: bool = False
) -> tuple[int, str, float]:
    """Has torchrun run a generated program, with Ctrl-C or another signal when standard output holds ``when``.

    The signal goes to torchrun, or to all processes. Returns the exit status, everything that was said, and the seconds
    from the signal until no process is left.
    """
    words = (f"--nproc-per-node={ranks}", str(directory / "train.py"), *arguments)
    done, seconds = signalled(words, environment(), directory.parent, number, when, to_all)
    return done.returncode, done.stdout + done.stderr, seconds


def signalled(
    words: Sequence[str], variables: Mapping[str, str], folder: Path, number: int, when: str, to_all: bool = False
) -> tuple[subprocess.CompletedProcess[str], float]:
    """As `interrupted`, for any words of torchrun's."""
    with TemporaryDirectory() as logs:
        stdout, stderr = Path(logs, "stdout"), Path(logs, "stderr")
        stdout.touch()
        process = forkserver.start(("-m", "torch.distributed.run", *words), variables, folder, stdout, stderr)
        deadline = time.monotonic() + PATIENCE
        while when not in stdout.read_text() and process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.02)
        begin = time.monotonic()
        for pid in running_in(folder) if to_all else [process.pid or 0]:
            os.kill(pid, number)
        process.join(deadline - time.monotonic())
        left = left_in(folder)
        seconds = time.monotonic() - begin
        texts = stdout.read_text(), stderr.read_text()
    assert when in texts[0], f"{when!r} was never said: {texts}"
    assert not left, f"{len(left)} processes stay behind"
    return subprocess.CompletedProcess(words, process.exitcode, *texts), seconds


def running_in(folder: Path) -> list[int]:
    """The processes in a folder, without the tracker that multiprocessing starts."""
    processes: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (place / "cwd").readlink() == folder and b"resource_tracker" not in (place / "cmdline").read_bytes():
                processes.append(int(place.name))
    return processes


def left_in(folder: Path, seconds: float = 10) -> list[int]:
    """The processes in a folder after some time to end."""
    deadline = time.monotonic() + seconds
    while (left := running_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
