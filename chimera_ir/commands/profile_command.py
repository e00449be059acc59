"""``chimera profile``: the costs of a model's stages and a cluster's links, measured or counted."""

import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from chimera_ir import __version__
from chimera_ir.commands import completion
from chimera_ir.commands.assignments import listed_values
from chimera_ir.commands.common import (
    SETTINGS,
    FiniteRange,
    GivenPath,
    SectionedCommand,
    WrongCommand,
    all_of,
    as_json,
    as_misuse,
    general,
    is_quiet,
    remark,
    require_torch,
    run,
    write_json,
)
from chimera_ir.commands.compile_command import option_errors
from chimera_ir.commands.cost_options import parse_split, scheme_named
from chimera_ir.compilation import Compilation
from chimera_ir.escapes import visible
from chimera_ir.options import Options
from chimera_ir.output import OutputRefused, refuse_file, write_file
from chimera_ir.plural import counted
from chimera_ir.profile.document import WARNING
from chimera_ir.profile.write import write_cluster, write_profile
from chimera_ir.progress import logged

MARK = "# Written by `chimera profile`, which overwrites this file; delete this line to keep it.\n"

SIZES = tuple(4**power for power in range(3, 13))
"""Sizes of the messages and sums that are measured: 64 B to 16 MiB."""

KIB = 1024


def _numbers(_: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[int, ...]:
    words = [word for text in given for word in text.replace(",", " ").split()]
    wrong = [word for word in words if not (word.isascii() and word.isdecimal() and 0 < int(word) < 10**6)]
    if wrong:
        example = f"{parameter.opts[0]} 4, or several as in {parameter.opts[0]} 4,8"
        raise WrongCommand(f"{parameter.opts[0]} {wrong[0]}: not a whole number from 1 to 999,999; write {example}")
    return tuple(sorted({int(word) for word in words}))


_out = click.option(
    "--out", type=GivenPath(path_type=Path, dir_okay=False), required=True, metavar="FILE.toml", help="What to write."
)
_force = click.option("--force", is_flag=True, help="Write over a file that this command did not write.")
_rounds = click.option(
    "--rounds", type=click.IntRange(min=5), default=30, show_default=True, help="Measure each figure at most so often."
)


@click.group(context_settings=SETTINGS)
@click.version_option(__version__)
def profile_command() -> None:
    """Measure what a model's stages and a cluster's links cost, and write it as files that people can read.

    Exit status: 0, 1 the ranks lost each other, 2 something is wrong on the command line or in the model file,
    70 in the profiler; 130 interrupted.
    """


_MODEL_SECTIONS = {
    "Common options": "--stages --micro-batch-size --out --split --slices --count",
    "A model of several parts": "--scheme --set",
    "A model of transformers": "--hf --length",
    "Measurement": "--every --device --threads --rounds --seed",
    "Output": "--force --json --quiet",
}


_measuring = all_of(as_json("Print what is written as JSON, too."), general)
"""Adds to a command's function the options of every command that measures."""

_of_a_model = all_of(
    click.argument(
        "model", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="[MODEL.py]", required=False
    ),
    click.option("--hf", metavar="PATH_OR_NAME", help="In place of MODEL.py a model of transformers."),
    click.option("--length", type=click.IntRange(min=2), metavar="T", help="With --hf: tokens of an item."),
    click.option(
        "--micro-batch-size",
        "sizes",
        multiple=True,
        required=True,
        callback=_numbers,
        metavar="B",
        help="Items per micro-batch; several as in 1,2,4,8.",
    ),
    click.option(
        "--slices",
        type=click.IntRange(2),
        metavar="K",
        help="Also measure each micro-batch in K slices of its sequence.",
    ),
    _out,
    click.option(
        "--scheme",
        shell_complete=completion.schemes,
        metavar="NAME_OR_FILE",
        help="Groups of stages, edges between them, and what is frozen are those of this scheme.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="A parameter of the scheme; several depths as in D=2,4.",
    ),
    click.option("--count", is_flag=True, help="Count work on shapes instead of measuring time."),
    click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True),
    click.option(
        "--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads of the CPU, as a rank has."
    ),
    _rounds,
    click.option("--seed", type=int, default=0, show_default=True, help="Of weights and data, as train.py's."),
    _force,
    _measuring,
)
"""Adds to a command's function the options of every command that measures a model."""


@profile_command.command(cls=SectionedCommand, sections=_MODEL_SECTIONS, short_help="Measure every stage of a model.")
@click.option(
    "--stages",
    "depths",
    multiple=True,
    callback=_numbers,
    metavar="D",
    help="Cut the model into so many stages; several as in 4,8.",
)
@click.option(
    "--split",
    callback=parse_split,
    metavar="0,L,..",
    help="First layer of each stage, for a file with layers() [default: equal numbers of layers].",
)
@_of_a_model
def stages(depths: tuple[int, ...], split: tuple[int, ...] | None, **options: Any) -> None:
    """Measure every stage of MODEL.py in this process: times, bytes of weights, activations and messages."""
    if options["scheme"] is not None and (split or depths):
        raise WrongCommand("--scheme: it says how many stages there are; leave --stages and --split out")
    if split is None and not depths and options["scheme"] is None:
        raise WrongCommand("Missing option '--stages', or '--split' for a file with layers()")
    if split is not None and depths not in ((), (len(split),)):
        given = ",".join(map(str, split))
        raise WrongCommand(f"--split {given}: it begins {counted(len(split), 'stage')}; leave --stages out")
    graphs = _graphs(options.pop("scheme"), options.pop("settings"))
    depths = tuple(graph.header.stages for graph in graphs) or depths
    _measure(depths if split is None else (len(split),), split, graphs, **options)


@profile_command.command(cls=SectionedCommand, sections=_MODEL_SECTIONS, short_help="Measure the layers of a model.")
@click.option("--every", is_flag=True, help="Measure every layer, also those that are equal to another.")
@_of_a_model
def layers(every: bool, **options: Any) -> None:
    """Measure the layers of MODEL.py, a file with layers(): from these, stages follow for any split.

    Of equal layers one is measured, and all get its times: layers of the same class and hyper-parameters, with
    parameters and inputs of the same shapes. The file says which.
    """
    graphs = _graphs(options.pop("scheme"), options.pop("settings"))
    if len(graphs) > 1:
        raise WrongCommand("--set: the layers are those of one size of the scheme; give each parameter one value")
    _measure((), None, graphs, once=not every, **options)


def _graphs(scheme: str | None, settings: tuple[str, ...]) -> tuple[Compilation, ...]:
    """A scheme with each combination of the values of its parameters; nothing without a scheme."""
    values = listed_values(settings)
    if scheme is None:
        if values:
            raise WrongCommand(f"--set {next(iter(values))}: it goes with --scheme")
        return ()
    source, graphs = scheme_named(scheme, ()), list[Compilation]()
    for several in product(*values.values()):
        with option_errors(source):
            request = Options().request(source, dict(zip(values, several, strict=True)))
            graphs.append(Compilation(request))
            _ = graphs[-1].header  # with its mistakes
    return tuple(graphs)


def _measure(
    depths: tuple[int, ...],
    split: tuple[int, ...] | None,
    graphs: tuple[Compilation, ...],
    model: Path | None,
    hf: str | None,
    length: int | None,
    sizes: tuple[int, ...],
    slices: int | None,
    out: Path,
    count: bool,
    device: str,
    threads: int,
    rounds: int,
    seed: int,
    force: bool,
    as_json: bool,
    once: bool = False,
) -> None:
    """Measures a model, cut into each number of stages or by layers (equal ones ``once``), and writes the profile."""
    require_torch("measuring")
    if (model is None) == (hf is None):
        raise WrongCommand("give either MODEL.py or --hf PATH_OR_NAME")
    if hf is not None and graphs:
        raise WrongCommand("--scheme: models of transformers are chains of layers; leave it out")
    if model is None and count:
        raise WrongCommand("--count: models of transformers look at values of their masks; measure, without --count")
    if hf is None and length is not None:
        raise WrongCommand(f"--length {length} goes with --hf: the dataset of MODEL.py decides")
    from chimera_ir.measure import stages as measure
    from chimera_ir.measure.stages import StageRequest

    # The file is refused before the measurement, which may take long, and written after it.
    with as_misuse(OutputRefused, measure.BadFile):
        refuse_file(out, MARK, force)
        request = StageRequest(
            depths, sizes, rounds, seed, split, once, slices or 1, tuple(graph.header for graph in graphs)
        )
        noise: tuple[str, ...] = ()
        with _bar() as progress:
            if count and model is not None:
                text = write_profile(measure.counted(model, request, progress))
            else:
                load = measure.of_transformer(str(hf), length) if model is None else measure.of_file(model)
                measured = measure.timed(load, request, device, threads, progress)
                noise, text = measured.noise, write_profile(measured.profile)
        _warn(tuple(f"{warning}; {visible(str(out))} lists them" for warning in noise[:1]))
        write_file(out, text + _commented("", (*_warnings(noise[:1]), *noise[1:])), MARK, force)
    if as_json:
        write_json({**tomllib.loads(text), "warnings": noise})


@profile_command.command(
    cls=SectionedCommand,
    short_help="Measure messages between ranks, and sums over them.",
    sections={
        "Common options": "--out --name --backend --device",
        "Measurement": "--largest --sum-ranks --rounds --timeout",
        "Output": "--force --json --quiet",
    },
)
@_out
@click.option("--name", help="The cluster's name; else that of the file.")
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), default="gloo", show_default=True)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Where messages lie [default: as the backend has it]."
)
@click.option(
    "--timeout",
    type=FiniteRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that any wait may take.",
)
@click.option(
    "--largest",
    type=click.IntRange(1, SIZES[-1] // KIB),
    default=SIZES[-1] // KIB,
    show_default=True,
    metavar="KIB",
    help="Measure no message larger than so many KiB.",
)
@click.option(
    "--sum-ranks",
    type=click.IntRange(2),
    metavar="R",
    help="Measure sums over R neighbours each [default: over all ranks, and over pairs].",
)
@_rounds
@_force
@_measuring
def links(
    out: Path,
    name: str | None,
    backend: str,
    device: str | None,
    timeout: float,
    largest: int,
    sum_ranks: int | None,
    rounds: int,
    force: bool,
    as_json: bool,
) -> None:
    """Measure messages between the ranks that torchrun started, and sums over them: latency and bandwidth.

    Start it with torchrun --no-python; started without, it says how.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        called = click.get_current_context().command_path
        launch = f"torchrun --nproc-per-node=4 --no-python {called} --out cluster.toml"
        raise WrongCommand(f"links are measured between ranks: start it with torchrun, as in\n  {launch}")
    require_torch("measuring")
    from chimera_ir.measure.links import LinkRequest, described
    from chimera_ir.measure.links import run as run_rank

    # Every rank measures; rank 0 has the results, and writes the file.
    with _bar() if os.environ["RANK"] == "0" else nullcontext(_no_bar) as progress:
        sizes = tuple(size for size in SIZES if size <= largest * KIB)
        request = LinkRequest(sizes, rounds, backend, timeout, sum_ranks, device)
        measured = run_rank(request, lambda: refuse_file(out, MARK, force), progress)
    if measured is None:
        return
    made = described(name or out.stem, measured)
    _warn(made.remarks)
    comments = _commented("\n", made.table) + _commented("\n", _warnings(made.remarks))
    text = write_cluster(made.cluster)
    with as_misuse(OutputRefused):
        write_file(out, text + comments, MARK, force)
    if as_json:
        write_json({**tomllib.loads(text), "warnings": made.remarks})


def _commented(before: str, lines: tuple[str, ...]) -> str:
    """Lines that tell later users how certain the figures are, as comments below ``before``."""
    return before + "".join(f"# {line}\n" for line in lines) if lines else ""


def _warn(remarks: tuple[str, ...]) -> None:
    for warning in _warnings(remarks):
        remark(warning)


def _warnings(remarks: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{WARNING}{remark}" for remark in remarks)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that shows what is measured, how many steps are done, and how many there are in all."""
    console = Console(stderr=True)
    if is_quiet():
        yield _no_bar
        return
    if not (sys.stderr.isatty() and console.is_interactive):
        with logged() as log:
            yield lambda doing, done, steps: log(f"measured {done} of {steps}: {doing}")
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as progress:
        task = progress.add_task("", total=None)
        yield lambda doing, done, steps: progress.update(task, description=doing, completed=done, total=steps)


def _no_bar(_doing: str, _done: int, _steps: int) -> None:
    pass


main = partial(run, profile_command, "chimera-profile")
"""Entry point of the command ``chimera-profile``, an alias of ``chimera profile``."""
