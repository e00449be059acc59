"""The steps for a machine: every library scheme, what happens when a rank fails, a real model, a benchmark."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import chimera_ir
from chimera_ir import library
from chimera_ir.errors import CompileError
from tests.gpu.commands import ROOT, CommandLine
from tests.gpu.machine import Ground
from tests.gpu.steps import Trial, ends_with_one_message, succeeds
from tests.sizes import chains

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

MOVING = (
    ("saved tensors", "docs/examples/offloaded.chim", 2),
    ("operands of weight gradients", "docs/examples/zb_offloaded.chim", 4),
)
"""Names of what moves to the host, each with a scheme file that moves it and the workers it is compiled for."""

CHECKED = r"(?s)check: passed.*step 5/5"

_ZOO = "tests/e2e/models/zoo.py"
_CARRIED = "tests/e2e/models/carried.py"
_FAILING = "tests/e2e/models/failing.py"
_GPT = "examples/gpt.py"
_LONG_CONTEXT = "examples/long_context.py"
_UNREAD = "tests/gpu/unread.py"


@dataclass(frozen=True)
class Program:
    """Programs of ranks: their directory, the command that makes it, how many workers and slices they have."""

    directory: Path
    command: str
    workers: int
    slices: int


def steps(ground: Ground, folder: Path) -> Iterator[tuple[str, Callable[[str], Trial]]]:
    """The names of all steps in the order in which they run, and what makes each of its name.

    Its program is written into the folder then.
    """
    for workers in WORKERS:
        if workers <= ground.ranks:
            copies = ground.ranks // workers
            for scheme in chains():
                yield f"{scheme} on {workers} workers, W = {copies}", partial(_checked, ground, folder, scheme, workers)
    most = max(workers for workers in WORKERS if workers <= ground.ranks)
    gpt, long_context = partial(_needed, folder, "chimera", most), partial(_needed, folder, "seq1f1b", most)
    yield "a byte-level GPT", partial(_trained, ground, gpt, _GPT)
    yield "a model for long contexts, in slices", partial(_trained, ground, long_context, _LONG_CONTEXT)
    moves = [(moving, partial(_compiled, folder, file, D=size, N=8)) for moving, file, size in MOVING if size <= most]
    for moving, program in moves:
        yield f"a byte-level GPT whose {moving} move to the host", partial(_moved, ground, program)
    for scheme in ("dapple", "chimera", "pipedream_2bw", "seq1f1b"):
        yield (
            f"the host of {scheme} does not wait for the device",
            partial(_unread, ground, partial(_needed, folder, scheme, 2)),
        )
    for moving, program in moves:
        yield f"the host of moves of {moving} does not wait for the device", partial(_unread, ground, program)
    for name, failure, needed in FAILURES:
        yield name, partial(_failing, ground, folder, failure, needed)
    yield "step times beside torch.distributed.pipelining", partial(_measured, ground)


def _checked(ground: Ground, folder: Path, scheme: str, workers: int, name: str) -> Trial:
    """A scheme on so many workers, with as many copies as there is room for, compared with one process."""
    program = _fitting(folder, scheme, workers)
    if program is None:
        return Trial(name, CommandLine(()), succeeds(""), unfit=f"the scheme does not take {workers} workers")
    model = _ZOO if program.slices == 1 else _CARRIED
    options = ("--model", model, "--check-only", "--micro-batch-size", "2", *ground.options)
    ranks = ground.ranks // workers * workers
    return Trial(name, _launch(ground, program, options, ranks=ranks), succeeds("check: passed"), program.command)


def _trained(ground: Ground, made: Callable[[], Program], model: str, name: str) -> Trial:
    """A model in float32 that is checked and then trains."""
    program = made()
    options = ("--model", model, "--check", "--steps", "5", "--micro-batch-size", "4", *ground.options)
    return Trial(name, _launch(ground, program, options), succeeds(CHECKED), program.command, telling=True)


def _moved(ground: Ground, made: Callable[[], Program], name: str) -> Trial:
    """A model with moves: pinned memory and a stream of its own carry what autograd saved to the host and back."""
    program = made()
    options = ("--model", _GPT, "--check", "--steps", "5", "--micro-batch-size", "4", "--peak-memory", *ground.options)
    judge = succeeds(CHECKED + ".*used on host")
    return Trial(name, _launch(ground, program, options), judge, program.command, telling=True)


def _unread(ground: Ground, made: Callable[[], Program], name: str) -> Trial:
    """Updates in which torch raises an error where the host waits for the device."""
    program = made()
    options = ("--model", _UNREAD, "--steps", "6", *ground.options)
    judge = succeeds(r"(?s)watched 3 updates.*step 6/6")
    unfit = "the CPU stands in for the device" if ground.pretended else ""
    return Trial(name, _launch(ground, program, options), judge, program.command, unfit)


def _failing(ground: Ground, folder: Path, failure: str, needed: str, name: str) -> Trial:
    """One rank of two fails: the other ends, and says why."""
    program = _needed(folder, "chimera", 2)
    options = ("--model", _FAILING, "--steps", "500", "--timeout", str(TIMEOUT), *ground.options)
    command = _launch(ground, program, options, {"FAIL": failure})
    return Trial(name, command, ends_with_one_message(needed), program.command)


def _measured(ground: Ground, name: str) -> Trial:
    """Steps of a model beside torch.distributed.pipelining, where each rank has a device."""
    words = ("benchmarks/compute.py", "--backend", ground.backend, "--stages", str(min(ground.ranks, 8)))
    sizes = ("--rounds", "1") if ground.pretended else ("--rounds", "10", "--micro-batch-size", "8")
    command = CommandLine((sys.executable, *words, *sizes))
    return Trial(name, command, succeeds(r"\| torch Schedule1F1B"), unfit=_unfit_for_measuring(ground), telling=True)


def _unfit_for_measuring(ground: Ground) -> str:
    if ground.devices == 1:
        return "ranks that share a device wait for each other: their times say nothing"
    return "slow by design" if ground.backend == "strict" else ""


def _needed(folder: Path, scheme: str, workers: int) -> Program:
    program = _fitting(folder, scheme, workers)
    assert program is not None, f"{scheme} compiles for {workers} workers"
    return program


def _fitting(folder: Path, scheme: str, workers: int) -> Program | None:
    """A scheme of the library with the first number of micro-batches that it takes; None if not so many workers."""
    names = library.parameters(scheme)
    size = "P" if "P" in names else "D"
    for micro_batches in MICRO_BATCHES if "N" in names else (0,):
        settings = {size: workers} | ({"N": micro_batches} if micro_batches else {})
        try:
            return _compiled(folder, scheme, **settings)
        except CompileError:
            continue
    return None


def _compiled(folder: Path, scheme: str, **settings: int) -> Program:
    """Programs of a library scheme or of a file of this repository; raises CompileError."""
    directory = folder / "-".join([Path(scheme).stem, *(f"{name}{value}" for name, value in settings.items())])
    compilation = chimera_ir.compile(ROOT / scheme if scheme.endswith(".chim") else scheme, **settings)
    compilation.write(directory)
    chosen = " ".join(f"--set {name}={value}" for name, value in settings.items())
    header = compilation.schedule.header
    return Program(directory, f"chimera compile {scheme} {chosen} --out {directory}", header.workers, header.slices)


def _launch(
    ground: Ground, program: Program, options: tuple[str, ...], variables: dict[str, str] | None = None, ranks: int = 0
) -> CommandLine:
    """Starts a rank for each worker, or so many ranks."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    started = (*torchrun, f"--nproc-per-node={ranks or program.workers}", *ground.started_by)
    return CommandLine((*started, str(program.directory / "train.py"), *options), variables or {})
