"""``chimera run``: compiles a scheme and becomes the torchrun that trains with it, on this machine."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

import click

from chimera_ir.commands import completion
from chimera_ir.commands.assignments import setting, single_values
from chimera_ir.commands.common import FiniteRange, WrongCommand, WrongText, as_misuse, require_torch
from chimera_ir.commands.compile_command import answered, compiling, delivered
from chimera_ir.commands.sections import Function, SectionedCommand, general, report
from chimera_ir.escapes import as_argument, command_line, visible
from chimera_ir.options import MOST
from chimera_runtime.errors import Misuse as Refused
from chimera_runtime.model.model_text import require_plausible
from chimera_runtime.program.compiled_program import parsed
from chimera_runtime.tools.command.options import parse
from chimera_runtime.tools.command.requirements import require_fitting


def _flag(name: str, help: str) -> Callable[[Function], Function]:
    return click.option(name, is_flag=True, help=help)


def _path(name: str, metavar: str, help: str) -> Callable[[Function], Function]:
    return click.option(name, type=click.Path(), metavar=metavar, help=help)


def _count(name: str, metavar: str, help: str, least: int = 1) -> Callable[[Function], Function]:
    return click.option(name, type=click.IntRange(least, MOST), metavar=metavar, help=help)


def _positive(name: str, metavar: str, help: str) -> Callable[[Function], Function]:
    return click.option(name, type=FiniteRange(0, min_open=True), metavar=metavar, help=help)


_TRAINING = (
    click.option(
        "--model",
        type=click.Path(exists=True, dir_okay=False),
        required=True,
        metavar="MODEL.py",
        help="Python file with build_stage or layers, loss, dataset, optimizer.",
    ),
    click.option("--split", metavar="0,L,..", help="First layer of each stage [default: equal numbers of layers]."),
    click.option("--steps", type=click.IntRange(1), metavar="STEPS", help="Weight updates [default: 10]."),
    _count("--micro-batch-size", "B", "Items of a micro-batch [default: 1]."),
    click.option("--seed", type=int, metavar="SEED", help="Of weights, data order and dropout [default: 0]."),
    _count("--data-workers", "K", "Processes of each rank that load items [default: 0].", least=0),
    _flag("--check", "First compare with one-process training."),
    _flag("--check-only", "Compare, then stop."),
    click.option("--rehearse", metavar="F=S,B=S", help="Sleep instead of computing; S in seconds."),
    _positive("--clip-norm", "NORM", "Scale gradients down to this norm of the whole model."),
    _flag("--shard-optimizer", "Each replica of a stage keeps a share of the optimizer's state."),
    _path("--save", "DIR", "Save checkpoints there: the last, and at Ctrl-C or SIGTERM."),
    _count("--save-every", "K", "Save after every K updates, too."),
    _count("--keep", "K", "Checkpoints that stay [default: 3]."),
    _path("--resume", "DIR", "Go on from a checkpoint, or from the newest in a directory, if any."),
    _path("--load", "FILE", "Begin with the weights of one file."),
    _path("--export", "FILE", "Write the weights into one file: .pt or .safetensors."),
    _flag("--stop-on-nan", "End when the loss of an update is no finite number."),
    _path("--log-file", "FILE", "Append a line of JSON for every update."),
    _path("--tensorboard", "DIR", "The same as curves, by tensorboard."),
    _count("--eval-every", "K", "Evaluate the model file's validation() every K updates."),
    click.option("--autocast", type=click.Choice(["bf16"]), help="Run stages and loss under torch.autocast."),
    click.option("--device-peak", metavar="TFLOPS", help="Tell the share of it that updates use; auto: by the device."),
    _flag("--peak-memory", "Tell at the end what each rank has used and needs."),
    _path("--bundle", "FILE", "If the run fails: a zip file for a bug report."),
    _path("--metrics", "FILE", "Write losses and times of all updates as JSON."),
    _path("--trace", "DIR", "Record every operation of the training, by rank."),
    _path("--torch-profile", "DIR", "What torch.profiler sees of three updates."),
    _flag("--ranges", "A range for NVTX and torch.profiler for each line of the program."),
    click.option("--memory-limit", metavar="SIZE", help="Stop if a rank needs more: 16GiB, or device."),
    _positive("--timeout", "SECONDS", "How long any wait may take [default: 60]."),
    click.option(
        "--backend",
        metavar="NAME",
        shell_complete=lambda _context, _option, begun: [name for name in ("gloo", "nccl") if name.startswith(begun)],
        help="Of messages: gloo, nccl (GPUs), or another one.",
    ),
    click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), help="Where stages are [default: as the backend has it]."
    ),
    _path("--backend-module", "FILE", "A file that registers the backend."),
    click.option("--layout", type=click.Choice(["pipeline", "replica"]), help="Which ranks are neighbours."),
)
"""The options of train.py, by their names there; for an option that is not given, train.py has the default."""

_MACHINES = (
    *("--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
    *("--master-addr", "--master-port"),
)
"""Options of torchrun for several machines, which are refused."""

_OF_COMPILER = ("costs", "recompute", "sync", "tied", "communicators", "max_operations", "library")
"""The options that decide what is compiled; ``communicators`` is an option of train.py, too."""


def _refuse_machines(_: click.Context, option: click.Parameter, given: object) -> None:
    if given is not None:
        raise WrongCommand(
            f"{option.opts[0]}: run starts every rank on this machine; for several machines compile, copy the output "
            "directory to each, and start torchrun there"
        )


def _training(function: Function) -> Function:
    """Adds the options of train.py to a command's function, and refuses torchrun's options for several machines."""
    refused = (
        click.option(name, hidden=True, expose_value=False, callback=_refuse_machines, metavar="VALUE")
        for name in _MACHINES
    )
    return reduce(lambda decorated, decorate: decorate(decorated), (*refused, *reversed(_TRAINING)), function)


class _WithModelArguments(SectionedCommand):
    """A command whose function is given the words behind ``--``, unread, as ``model_arguments``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the words before ``--``."""
        end = args.index("--") if "--" in args else len(args)
        ctx.params["model_arguments"] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARGS...]"]


@click.command(
    cls=_WithModelArguments,
    sections={
        "Common options": "--model --set --micro-batch-size --steps --copies --check --out",
        "Training": "--split --seed --data-workers --clip-norm --autocast --shard-optimizer --eval-every --stop-on-nan",
        "Checkpoints and weights": "--save --save-every --keep --resume --load --export",
        "What is recorded": (
            "--log-file --tensorboard --metrics --trace --torch-profile --ranges --device-peak --peak-memory --bundle"
        ),
        "Ranks and devices": "--backend --device --layout --timeout --memory-limit --backend-module",
        "Without training": "--check-only --rehearse",
        "The schedule": "--cost --recompute --sync --tied --communicators",
    },
)
@click.argument("scheme", shell_complete=completion.schemes)
@setting(single_values, "Set a parameter, as NAME=VALUE alone does.")
@compiling
@click.option(
    "--copies", type=click.IntRange(1, MOST), default=1, metavar="W", help="Copies of the pipelines [default: 1]."
)
@_training
@general
def run_command(
    scheme: str,
    settings: dict[str, int],
    out: Path | None,
    no_cache: bool,
    copies: int,
    model_arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Compile SCHEME and train MODEL.py with it on this machine, under torchrun.

    SCHEME is a .chim file, an IR text (.sir) or the name of a library scheme (see chimera compile --list). It is
    compiled as by the command compile; then torchrun starts train.py in the output directory, with a rank for each
    worker of each of the W copies. What follows -- is handed to MODEL.py, whose functions may take it as args.

    Exit status: 1 something is wrong in the scheme or the text of MODEL.py, 2 on the command line, 70 in the compiler,
    130 interrupted; once torchrun has started, its own.
    """
    # Mistakes in the options of train.py, which every rank would refuse, and in the model file show before anything is
    # compiled.
    require_torch("training")
    of_compiler = {name: options[name] for name in _OF_COMPILER}
    training = {name: value for name, value in options.items() if name not in _OF_COMPILER}
    of_train = [*_words(training | {"communicators": options["communicators"]})]
    with as_misuse(Refused):
        given = parse(of_train)
    try:
        require_plausible(Path(training["model"]))
    except Refused as error:
        raise WrongText(str(error)) from error
    # Compile; then the options have to fit the program, as with the micro-batches of a replica.
    _, answer = answered(scheme, settings, of_compiler, None, no_cache)
    assert answer.output is not None, "a whole compilation has an output directory"
    job, _ = parsed(answer.output.files["program.json"])
    with as_misuse(Refused):
        require_fitting(given, job)
    directory = delivered(answer.printed, answer.output, out)
    # This process becomes torchrun, so that signals and the exit status are those of the training.
    ranks = copies * answer.output.workers
    started = ["--standalone", f"--nproc-per-node={ranks}", as_argument(f"{directory}/train.py"), *of_train]
    started += ["--", *model_arguments] if model_arguments else []
    report(f"wrote {visible(str(directory))}, running\n  {command_line(('torchrun', *started))}\n")
    # torchrun would set the threads, too, and print a banner about it
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if ranks > 1 else {}
    variables = {"CHIMERA_PROGRAM": job.program, **threads}
    _become([sys.executable, "-P", "-m", "torch.distributed.run", *started], variables)


def _words(training: Mapping[str, Any]) -> Iterator[str]:
    """The options of train.py that were given, each as one word."""
    for name, value in training.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield from [option] if value else []
        elif value is not None:
            yield f"{option}={value}"


def _become(command: list[str], variables: dict[str, str]) -> NoReturn:
    """Replaces this process by another program, which gets all signals and whose exit status becomes the command's.

    ``variables`` join its environment.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], command, os.environ | variables)
    except OSError as error:
        raise WrongCommand(f"{command[0]}: {error.strerror}") from error
