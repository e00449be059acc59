"""The steps for a machine: every library scheme, what happens when a rank fails, a real model, a benchmark."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import chimera_ir
from chimera_ir import library
from chimera_ir.errors import CompileError
from tests.gpu.commands import ROOT, CommandLine
from tests.gpu.machine import Ground
from tests.gpu.steps import Trial, ends_with_one_message, succeeds

WORKERS = (2, 4, 8)
MICRO_BATCHES = (8, 12, 16, 4, 2)
"""Of these the first that a scheme takes."""

TIMEOUT = 20
"""Seconds that a rank waits for another one, where one of them fails."""

FAILURES = (
    ("a rank is killed", "kill-in-forward:1:30", r"rank 1\b"),
    ("a rank hangs", "stop-in-forward:1:2", r"rank 1\b.*timeout"),
)
"""Steps in which a rank fails: their names, what the model does, what the message has to say."""

_ZOO = "tests/e2e/models/zoo.py"
_FAILING = "tests/e2e/models/failing.py"
_GPT = "examples/gpt.py"
_OFFLOADED = "docs/examples/offloaded.chim"
_UNREAD = "tests/gpu/unread.py"


def steps(ground: Ground, folder: Path) -> Iterator[tuple[str, Callable[[str], Trial]]]:
    """The names of all steps in the order in which they run, and what makes each of its name.

    Its program is written into the folder then.
    """
    for workers in WORKERS:
        if workers <= ground.ranks:
            copies = ground.ranks // workers
            for scheme in library.names():
                yield f"{scheme} on {workers} workers, W = {copies}", partial(_checked, ground, folder, scheme, workers)
    yield "a byte-level GPT", partial(_trained, ground, folder)
    yield "a byte-level GPT whose saved tensors move to the host", partial(_moved, ground, folder)
    for scheme in ("dapple", "chimera", "pipedream_2bw"):
        yield f"the host of {scheme} does not wait for the device", partial(_unread, ground, folder, scheme)
    yield "the host of moves of memory does not wait for the device", partial(_unread, ground, folder, "")
    for name, failure, needed in FAILURES:
        yield name, partial(_failing, ground, folder, failure, needed)
    yield "step times beside torch.distributed.pipelining", partial(_measured, ground)


def _checked(ground: Ground, folder: Path, scheme: str, workers: int, name: str) -> Trial:
    """A scheme on so many workers, with as many copies as there is room for, compared with one process."""
    fitting = _compiled(folder, scheme, workers)
    if fitting is None:
        return Trial(name, CommandLine(()), succeeds(""), unfit=f"the scheme does not take {workers} workers")
    directory, prepared = fitting
    options = ("--model", _ZOO, "--check-only", "--micro-batch-size", "2", *ground.options)
    ranks = ground.ranks // workers * workers
    return Trial(name, _launch(ground, directory, ranks, options), succeeds("check: passed"), prepared)


def _trained(ground: Ground, folder: Path, name: str) -> Trial:
    """A model in float32 that is checked and then trains."""
    workers = max(workers for workers in WORKERS if workers <= ground.ranks)
    directory, prepared = _needed(folder, "chimera", workers)
    options = ("--model", _GPT, "--check", "--steps", "5", "--micro-batch-size", "4", *ground.options)
    command = _launch(ground, directory, workers, options)
    return Trial(name, command, succeeds(r"(?s)check: passed.*step 5/5"), prepared, telling=True)


def _moved(ground: Ground, folder: Path, name: str) -> Trial:
    """A model with moves: pinned memory and a stream of its own carry what autograd saved to the host and back."""
    directory, prepared = _moving(folder)
    options = ("--model", _GPT, "--check", "--steps", "5", "--micro-batch-size", "4", "--peak-memory", *ground.options)
    needed = r"(?s)check: passed.*step 5/5.*used on host"
    return Trial(name, _launch(ground, directory, 2, options), succeeds(needed), prepared, telling=True)


def _unread(ground: Ground, folder: Path, scheme: str, name: str) -> Trial:
    """Updates in which torch raises an error where the host waits for the device; without a scheme, one with moves."""
    directory, prepared = _needed(folder, scheme, 2) if scheme else _moving(folder)
    options = ("--model", _UNREAD, "--steps", "6", *ground.options)
    needed = r"(?s)watched 3 updates.*step 6/6"
    unfit = "the CPU stands in for the device" if ground.pretended else ""
    return Trial(name, _launch(ground, directory, 2, options), succeeds(needed), prepared, unfit)


def _failing(ground: Ground, folder: Path, failure: str, needed: str, name: str) -> Trial:
    """One rank of two fails: the other ends, and says why."""
    directory, prepared = _needed(folder, "chimera", 2)
    options = ("--model", _FAILING, "--steps", "500", "--timeout", str(TIMEOUT), *ground.options)
    command = _launch(ground, directory, 2, options, {"FAIL": failure})
    return Trial(name, command, ends_with_one_message(needed), prepared)


def _measured(ground: Ground, name: str) -> Trial:
    """Steps of a model beside torch.distributed.pipelining, where each rank has a device."""
    words = ("benchmarks/compute.py", "--backend", ground.backend, "--stages", str(min(ground.ranks, 8)))
    sizes = ("--rounds", "1") if ground.pretended else ("--rounds", "10", "--micro-batch-size", "8")
    command = CommandLine((sys.executable, *words, *sizes))
    return Trial(
        name,
        command,
        succeeds(r"\| torch Schedule1F1B"),
        unfit=_unfit_for_measuring(ground),
        telling=True,
    )


def _unfit_for_measuring(ground: Ground) -> str:
    if ground.devices == 1:
        return "ranks that share a device wait for each other: their times say nothing"
    return "slow by design" if ground.backend == "strict" else ""


def _moving(folder: Path) -> tuple[Path, str]:
    """The directory of a scheme with moves of memory on two workers, and the command that makes it."""
    directory = folder / "offloaded"
    chimera_ir.compile(ROOT / _OFFLOADED, D=2, N=8).write(directory)
    return directory, f"chimera compile {_OFFLOADED} --set D=2 --set N=8 --out {directory}"


def _needed(folder: Path, scheme: str, workers: int) -> tuple[Path, str]:
    fitting = _compiled(folder, scheme, workers)
    assert fitting is not None, f"{scheme} compiles for {workers} workers"
    return fitting


def _compiled(folder: Path, scheme: str, workers: int) -> tuple[Path, str] | None:
    """The directory of a scheme and the command that makes it; None if the scheme does not take so many workers."""
    names = library.parameters(scheme)
    size = "P" if "P" in names else "D"
    for micro_batches in MICRO_BATCHES if "N" in names else (0,):
        settings = {size: workers} | ({"N": micro_batches} if micro_batches else {})
        directory = folder / "-".join([scheme, *(f"{name}{value}" for name, value in settings.items())])
        try:
            chimera_ir.compile(scheme, **settings).write(directory)
        except CompileError:
            continue
        chosen = " ".join(f"--set {name}={value}" for name, value in settings.items())
        return directory, f"chimera compile {scheme} {chosen} --out {directory}"
    return None


def _launch(
    ground: Ground, directory: Path, ranks: int, options: tuple[str, ...], variables: dict[str, str] | None = None
) -> CommandLine:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return CommandLine((*torchrun, *ground.started_by, str(directory / "train.py"), *options), variables or {})
