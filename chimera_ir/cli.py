"""``chimera-compile``: the command line, what it prints, and its exit statuses."""

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from chimera_ir import __version__, cache, library, output, progress, texts
from chimera_ir.answer import Answer, produce
from chimera_ir.command import Misuse, parse_settings, run, write
from chimera_ir.compilation import Compilation, Level
from chimera_ir.cost.model import COST_LETTERS, Costs
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.diagnostics.render import blocks
from chimera_ir.errors import AboveMaxOperations, NoSuchLevel, ParameterError, TooLarge
from chimera_ir.options import MOST, Options
from chimera_ir.request import MAX_OPERATIONS, Request
from chimera_ir.syntax.ast import SyncMode
from chimera_ir.visible import as_argument, command_line, visible

_FILE = click.Path(path_type=Path)


def _costs(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    costs: dict[str, str] = {}
    for text in given:
        kind, equals, value = text.partition("=")
        if not (equals and kind in COST_LETTERS):
            raise Misuse(
                f"--cost {text}: write KIND=COST with one of the kinds {', '.join(COST_LETTERS)}, as in --cost B=2.5"
            )
        if kind in costs:
            raise Misuse(f"--cost {kind}: given twice")
        try:
            Costs.parse(kind, value)
        except ValueError as error:
            raise Misuse(f"--cost {text}: {error}") from error
        costs[kind] = value
    return costs


def _list(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    names = library.names()
    width = max(map(len, names))
    write("".join(f"{name:<{width}}  ({library.parameters(name)}) {library.summary(name)}\n" for name in names))
    context.exit()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("scheme")
@click.option(
    "--set", "settings", multiple=True, callback=parse_settings, metavar="NAME=VALUE", help="Set a parameter."
)
@click.option(
    "--cost",
    "costs",
    multiple=True,
    callback=_costs,
    metavar="KIND=VALUE",
    help="Cost of F, B, I or W per micro-batch.",
)
@click.option("--recompute", is_flag=True, help="Every stage keeps only its input, and runs its forward again.")
@click.option(
    "--sync", type=click.Choice([mode.value for mode in SyncMode]), help="When every stage's gradients are summed."
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Output directory [default: ./<scheme>.out]."
)
@click.option("--emit", type=click.Choice([level.value for level in Level]), help="Print one level and write nothing.")
@click.option(
    "--max-operations", type=click.IntRange(min=1), default=MAX_OPERATIONS, show_default=True, help="Limit on the size."
)
@click.option(
    "--profile",
    type=_FILE,
    metavar="FILE",
    help="What the model's stages cost; the report is then in seconds, with a prediction.",
)
@click.option("--cluster", type=_FILE, metavar="FILE", help="What the model runs on.")
@click.option("--copies", type=click.IntRange(1, MOST), metavar="W", help="Copies of the pipelines [default: 1].")
@click.option("--micro-batch-size", type=click.IntRange(1, MOST), metavar="B", help="Items of a micro-batch.")
@click.option(
    "--layout", type=click.Choice(["pipeline", "replica"]), help="Which ranks share a node [default: pipeline]."
)
@click.option("--no-cache", is_flag=True, help="Take nothing from earlier calls, and keep nothing.")
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="List the library schemes."
)
@click.version_option(__version__, prog_name="chimera-compile")
def compile_command(
    scheme: str, settings: dict[str, int], out: Path | None, emit: str | None, no_cache: bool, **options: Any
) -> None:
    """Compile SCHEME to one PyTorch script per worker, proven free of deadlock.

    SCHEME is a .chim file, an IR text (.sir), a pipe with either, or the name of a library scheme (--list).

    Exit status: 0 compiled and verified, 1 something is wrong in the text, 2 on the command line, 70 in the compiler;
    130 interrupted.
    """
    source = texts.scheme_or_ir(scheme)
    wanted = Level(emit) if emit else None
    color = sys.stderr.isatty()
    try:
        request = Options(**options).request(source, settings, _as_written)
        make = partial(_compiled, request, wanted, color)
        answer = make() if no_cache else cache.recall(partial(_question, request, wanted, color), make)
    except ParameterError as error:
        raise Misuse(f"--set: {error}") from error
    except NoSuchLevel as error:
        raise Misuse(f"--emit {error.level}: {error.text} enters below that level") from error
    except AboveMaxOperations as error:
        raises = f"--max-operations {error.operations} raises it"
        raise Misuse(f"{source.name}: {error.excess}; {raises}") from error
    except TooLarge as error:
        raise Misuse(f"{source.name}: {error}") from error
    _say(answer.warnings)
    _deliver(answer, out, request)


def _as_written(name: str) -> str:
    """How an option is written on the command line, by its name."""
    return next(option.opts[0] for option in compile_command.params if option.name == name)


def _question(request: Request, wanted: Level | None, color: bool) -> str:
    """Everything that an answer depends on beside the compiler."""
    if wanted not in (None, Level.TIMELINE):
        return repr((request, wanted, color))
    from chimera_ir.console import appearance

    return repr((request, wanted, color, appearance()))


def _compiled(request: Request, wanted: Level | None, color: bool) -> Answer:
    """The answer, made now; if there is none, its warnings are shown all the same."""
    warnings: list[Diagnostic] = []
    try:
        with progress.shown() as tell:
            shown, written = produce(Compilation(request, warn=warnings.append, tell=tell), wanted)
    except BaseException:
        _say(blocks(warnings, request.source, color))
        raise
    return Answer(tuple(blocks(warnings, request.source, color)), shown, written)


def _say(warnings: Iterable[str]) -> None:
    for warning in warnings:
        click.echo(warning, err=True)


def _deliver(answer: Answer, out: Path | None, request: Request) -> None:
    """Writes what there is to write, prints what there is to print, in this order."""
    if answer.output is None:
        write(answer.printed)
        return
    directory = out or Path(f"{answer.output.scheme}.out")
    output.write(directory, answer.output.files)
    write(answer.printed)
    write(f"wrote {visible(str(directory))}: run it with\n")
    workers, script = answer.output.workers, f"{directory}/train.py"
    words = ["torchrun", f"--nproc-per-node={workers}", as_argument(script), "--model", "MODEL.py"]
    line = request.forecast.torchrun(workers, script) if request.forecast else command_line(words)
    write(f"  {line} --check\n")


def main() -> NoReturn:
    """The entry point."""
    run(compile_command, "chimera-compile")
