"""Compiling schemes and running what was generated, for the end-to-end tests."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from click.testing import CliRunner

from chimera_ir.commands.compile_command import compile_command
from tests import forking
from tests.e2e.copies import date_as_originals
from tests.patience import FACTOR, PATIENCE

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"
OF_COMPILE = (
    "torch._dynamo.backends.common",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    *(f"torch._functorch._aot_autograd.{name}" for name in ("autograd_cache", "graph_compile")),
)
"""Modules that ranks with compiled stages import."""


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
    date_as_originals(out)
    return out


@dataclass(frozen=True)
class Job:
    """A generated program and the options to run it with.

    Without a ``model``, ``directory`` is a script of its own and the arguments are all that it gets. ``imports`` are
    modules that take long to import, and are imported once for all jobs. When a rank has failed, the others have
    ``grace`` seconds to say what they know before they get a SIGTERM; torchrun leaves them none.
    """

    name: str
    directory: Path
    arguments: tuple[str, ...] = ("--check-only",)
    model: str | None = "zoo.py"
    environment: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
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


def forking_environment() -> dict[str, str]:
    """The environment of the tests, in which every torchrun on a command line forks its ranks."""
    return environment() | {"PYTHONPATH": str(HERE / "forked")}


def served_environment() -> dict[str, str]:
    """The environment of the tests, in which every torchrun on a command line is forked from what has imported torch.

    Its output has to be pipes, and nothing finds its ranks by their command line or environment.
    """
    return forking_environment() | forking.served()


def run_all(folder: Path, ranks: int, jobs: Sequence[Job]) -> dict[str, Outcome]:
    """Runs the jobs in turn under one torchrun."""
    listed = [
        {
            "train": str(job.directory if job.model is None else job.directory / "train.py"),
            "arguments": [*_common(job), *job.arguments],
            "log": str(folder / f"{job.name}.log"),
            "path": [] if job.model else [str(HERE.parent.parent)],
            "environment": dict(job.environment),
            "grace": job.grace,
        }
        for job in jobs
    ]
    (folder / "jobs.json").write_text(json.dumps(listed))
    words = (f"--nproc-per-node={ranks}", str(HERE / "run_jobs.py"), str(folder / "jobs.json"))
    imports = " ".join(sorted({name for job in jobs for name in job.imports}))
    done = forking.torchrun(words, environment() | {forking.IMPORTS: imports}, folder, PATIENCE)
    assert done.returncode == 0, done.stderr
    return {job.name: _outcome(folder, job, ranks) for job in jobs}


def _common(job: Job) -> list[str]:
    return [] if job.model is None else ["--model", str(MODELS / job.model), "--timeout", f"{120 * FACTOR:g}"]


def _outcome(folder: Path, job: Job, ranks: int) -> Outcome:
    logs = [folder / f"{job.name}.log.{rank}" for rank in range(ranks)]
    return Outcome(
        tuple(log.read_text() if log.exists() else "" for log in logs),
        tuple(Path(f"{log}.status").read_text() for log in logs),
    )


def torchrun(directory: Path, ranks: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs one generated program; ends with everything it said, when no process of it is left."""
    return launched(directory, ranks, (), arguments, variables)


def launched(
    directory: Path, ranks: int, options: Sequence[str], arguments: Sequence[str], variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """As `torchrun`, with further options of torchrun's."""
    words = (f"--nproc-per-node={ranks}", *options, str(directory / "train.py"), *arguments)
    return forking.torchrun(words, environment() | dict(variables), directory.parent, PATIENCE)


def torchrun_script(script: Path, ranks: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """As `torchrun`, for any script."""
    words = (f"--nproc-per-node={ranks}", str(script), *arguments)
    return forking.torchrun(words, environment() | variables, Path.cwd(), PATIENCE)


def interrupted(
    directory: Path, ranks: int, *arguments: str, when: str, number: int = signal.SIGINT, to_all: bool = False
) -> tuple[int, str, float]:
    """As `torchrun`, with Ctrl-C or another signal to it, or to all processes, when standard output holds ``when``.

    Returns the exit status, everything that was said, and the seconds from the signal until no process is left.
    """
    words = (f"--nproc-per-node={ranks}", str(directory / "train.py"), *arguments)
    done, seconds = forking.signalled(words, environment(), directory.parent, PATIENCE, number, when, to_all)
    return done.returncode, done.stdout + done.stderr, seconds


def ranks_left(directory: Path, seconds: float = 10) -> list[str]:
    """The processes that still run a directory's train.py after some time to end."""
    marker = str(directory / "train.py").encode()
    deadline = time.monotonic() + seconds
    while True:
        left = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes()
            except OSError:
                continue
            if marker in words:
                left.append(entry.parent.name)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
