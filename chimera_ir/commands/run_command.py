"""``chimera run``: compiles a scheme and becomes the torchrun that trains with it, on this machine."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from chimera_ir.commands import completion
from chimera_ir.commands.assignments import setting, single_values
from chimera_ir.commands.common import (
    Function,
    GivenPath,
    SectionedCommand,
    WrongCommand,
    WrongText,
    all_of,
    as_misuse,
    general,
    report,
    require_torch,
)
from chimera_ir.commands.compile_command import COMPILING, compiled, compiling, delivered, requested
from chimera_ir.commands.cost_options import option, parse_keep, tied_by_transformer
from chimera_ir.escapes import as_argument, command_line, visible
from chimera_ir.request import OfProfile
from chimera_runtime.errors import Misuse as Refused
from chimera_runtime.model.model_text import require_plausible
from chimera_runtime.program.compiled_program import parsed
from chimera_runtime.tools.command.options import (
    BACKEND,
    BUILT_IN,
    COMMUNICATORS,
    KEEP,
    MODEL,
    OPTIONS,
    TEXT,
    Option,
    parse,
    path,
    require_fitting,
)

_MACHINES = (
    *("--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
    *("--master-addr", "--master-port"),
)
"""Options of torchrun for several machines, which are refused."""


def _refuse_machines(_: click.Context, option: click.Parameter, given: object) -> None:
    if given is not None:
        raise WrongCommand(
            f"{option.opts[0]}: run starts every rank on this machine; for several machines compile, copy the output "
            "directory to each, and start torchrun there"
        )


def _training(function: Function) -> Function:
    """Adds the options of train.py, whose values stay texts, and refuses torchrun's for several machines."""
    refused = (
        click.option(name, hidden=True, expose_value=False, callback=_refuse_machines, metavar="VALUE")
        for name in _MACHINES
    )
    options = [_as_click(option) for option in OPTIONS if option.name not in (COMMUNICATORS, KEEP)]
    return all_of(*options, *refused)(function)


def _as_click(option: Option) -> Callable[[Function], Function]:
    help = re.sub(r"\((default: .*)\)$", r"[\1]", f"{option.help[0].upper()}{option.help[1:]}") + "."
    if option.type is None:
        return click.option(option.name, is_flag=True, help=help)
    kind: click.Choice[str] | click.Path | None = click.Choice(option.choices) if option.choices else None
    if option.type is path:
        kind = click.Path(exists=True, dir_okay=False) if option.name in (MODEL, TEXT) else GivenPath()
    completions = _backends if option.name == BACKEND else None
    return click.option(option.name, type=kind, metavar=option.metavar, help=help, shell_complete=completions)


def _kept(context: click.Context, option: click.Parameter, words: tuple[str, ...]) -> tuple[Any, str | None]:
    """What stages keep of M_a, of words STAGE=SHARE, and the last other word: how many checkpoints train.py keeps."""
    shares = tuple(word for word in words if "=" in word or word == OfProfile.PROFILE.value)
    return parse_keep(context, option, shares), next((word for word in reversed(words) if word not in shares), None)


def _backends(_context: click.Context, _option: click.Parameter, begun: str) -> list[str]:
    return [name for name in BUILT_IN if name.startswith(begun)]


class _WithModelArguments(SectionedCommand):
    """A command whose function gets the words behind ``--``, unread, as ``model_arguments``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words before ``--``, and keeps those behind it unread."""
        end = args.index("--") if "--" in args else len(args)
        ctx.params["model_arguments"] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARGS...]"]


@click.command(
    cls=_WithModelArguments,
    sections={
        "Common options": "--model --set --micro-batch-size --steps --copies --check --out",
        "A model of transformers": "--hf --text --tokenizer --length --learning-rate --checkpoint-layers",
        "Training": "--split --seed --data-workers --clip-norm --autocast --shard-optimizer --eval-every --stop-on-nan",
        "Checkpoints and weights": "--save --save-every --keep --resume --load --export",
        "What is recorded": (
            "--log-file --tensorboard --metrics --trace --torch-profile --ranges --device-peak --peak-memory --bundle"
        ),
        "Ranks and devices": "--backend --device --layout --timeout --memory-limit --backend-module",
        "Without training": "--check-only --rehearse",
        "The schedule": "--cost --stage-cost --slice-lengths --recompute --offload --sync --tied --communicators",
    },
)
@click.argument("scheme", shell_complete=completion.schemes)
@setting(single_values, "Set a parameter, as NAME=VALUE alone does.")
@compiling
@option(
    "keep",
    callback=_kept,
    metavar="K or STAGE=SHARE",
    help="Checkpoints that stay [default: 3]; share of M_a that stages keep, image=1/4 [default: 1].",
)
@option("copies", default=1)
@_training
@general
def run_command(
    scheme: str,
    settings: dict[str, int],
    out: Path | None,
    copies: int,
    keep: tuple[Any, str | None],
    model_arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Compile SCHEME and train MODEL.py with it on this machine, under torchrun.

    SCHEME is a .chim file, an IR text (.sir), a schedule of torch.distributed.pipelining (.csv) or the name of a
    library scheme (see chimera compile --list). It is compiled as by the command compile; then torchrun starts
    train.py in the output directory, with a rank for each worker of each of the W copies. What follows -- is
    handed to MODEL.py, whose functions may take it as args. With --hf a model of transformers is trained on a text,
    without a MODEL.py.

    Exit status: 1 something is wrong in the scheme or the text of MODEL.py, 2 on the command line, 70 in the compiler,
    130 interrupted; once torchrun has started, its own.
    """
    # Mistakes in the options of train.py, which every rank would refuse, and in the model file show before anything is
    # compiled.
    require_torch("training")
    shares, checkpoints = keep
    for name, value in (("--slice-lengths", options["slice_lengths"]), ("--keep", shares)):
        if isinstance(value, str):
            shows = "chimera compile with --emit schedule shows what to give here"
            raise WrongCommand(f"{name} {value}: run reads no profile; {shows}")
    if options["hf"] is not None:
        options = _with_transformer(options)
    of_compiler = {name: options[name] for name in COMPILING} | {"keep": shares}
    training = {name: value for name, value in options.items() if name not in COMPILING} | {"keep": checkpoints}
    of_train = [*_words(training | {"communicators": options["communicators"]})]
    with as_misuse(Refused):
        given = parse(of_train)
    if given.model is not None:
        try:
            require_plausible(given.model)
        except Refused as error:
            raise WrongText(str(error)) from error
    # Compile; then the options have to fit the program, as with the micro-batches of a replica.
    text, compilation = compiled(requested(scheme, settings, of_compiler), None)
    job, _ = parsed(compilation.files["program.json"])
    with as_misuse(Refused):
        require_fitting(given, job)
    directory = delivered(text, compilation, out)
    # This process becomes torchrun, so that signals and the exit status are those of the training.
    ranks = copies * compilation.schedule.header.workers
    started = ["--standalone", f"--nproc-per-node={ranks}", as_argument(f"{directory}/train.py"), *of_train]
    started += ["--", *model_arguments] if model_arguments else []
    report(f"wrote {visible(str(directory))}, running\n  {command_line(('torchrun', *started))}\n")
    # torchrun would set the threads, too, and print a banner about it
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if ranks > 1 else {}
    variables = {"CHIMERA_PROGRAM": job.program, **threads}
    _become([sys.executable, "-P", "-m", "torch.distributed.run", *started], variables)


def _with_transformer(options: dict[str, Any]) -> dict[str, Any]:
    """Replaces the name of a model of transformers by its directory, and adds the ties of its stages."""
    from chimera_runtime.huggingface.layers import local

    with as_misuse(Refused):
        source = local(options["hf"])
    ties = tied_by_transformer(source)
    return options | {"hf": str(source), "tied": options["tied"] or ties}


def _words(training: Mapping[str, Any]) -> Iterator[str]:
    for name, value in training.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield from [option] if value else []
        elif value is not None:
            yield f"{option}={value}"


def _become(command: list[str], variables: dict[str, str]) -> NoReturn:
    """Replaces this process by ``command``, with more environment ``variables``."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], command, os.environ | variables)
    except OSError as error:
        raise WrongCommand(f"{command[0]}: {error.strerror}") from error
