"""``chimera-compile``: the command line, what it prints, and its exit statuses."""

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NoReturn

import click

from chimera_ir import __version__, cache, library, output, progress, texts
from chimera_ir.answer import Answer, produce, watched
from chimera_ir.command import WRONG_TEXT, Misuse, appearance, parse_settings, run, write
from chimera_ir.cost.model import KINDS, Costs
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.diagnostics.render import blocks, render_all
from chimera_ir.driver import MAX_OPERATIONS, Level, Request, TooLarge
from chimera_ir.elaborate.settings import SettingError
from chimera_ir.forecast import forecast_options, read_forecast, unfit_text
from chimera_ir.predict.prediction import Forecast
from chimera_ir.profile.choose import Unfit
from chimera_ir.syntax.ast import SyncMode
from chimera_ir.syntax.change import Change
from chimera_ir.visible import as_argument, command_line, visible


def _costs(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> Costs:
    costs = Costs()
    seen: set[str] = set()
    for text in given:
        kind, equals, value = text.partition("=")
        if not (equals and kind in KINDS):
            raise Misuse(f"--cost {text}: write KIND=COST with one of the kinds {', '.join(KINDS)}, as in --cost B=2.5")
        if kind in seen:
            raise Misuse(f"--cost {kind}: given twice")
        seen.add(kind)
        try:
            costs = costs.using(kind, value)
        except ValueError as error:
            raise Misuse(f"--cost {text}: {error}") from error
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
@forecast_options
@click.option("--no-cache", is_flag=True, help="Take nothing from earlier calls, and keep nothing.")
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="List the library schemes."
)
@click.version_option(__version__, prog_name="chimera-compile")
def compile_command(
    scheme: str,
    settings: dict[str, int],
    costs: Costs,
    recompute: bool,
    sync: str | None,
    out: Path | None,
    emit: str | None,
    max_operations: int,
    no_cache: bool,
    **given: Path | int | str | None,
) -> None:
    """Compile SCHEME to one PyTorch script per worker, proven free of deadlock.

    SCHEME is a .chim file, an IR text (.sir), a pipe with either, or the name of a library scheme (--list).

    Exit status: 0 compiled and verified, 1 something is wrong in the text, 2 on the command line, 70 in the compiler;
    130 interrupted.
    """
    source = texts.scheme_or_ir(scheme)
    if source.is_ir and settings:
        raise Misuse("--set: an IR text has no parameters to set; set them when you compile its scheme")
    change = Change(recompute, SyncMode(sync) if sync else None)
    if source.is_ir and change != Change():
        raise Misuse("--recompute, --sync: an IR text says both itself; ask for them when you compile its scheme")
    wanted = Level(emit) if emit else None
    color = sys.stderr.isatty()
    try:
        forecast = read_forecast(given)
        if forecast and costs.given:
            raise Misuse("--cost, --profile: both say how long operations take; leave one of them out")
        request = Request(source, settings, forecast or costs, max_operations, change)
        make = partial(_compiled, request, wanted, color, forecast)
        question = request, wanted, color, forecast
        answer = make() if no_cache else cache.recall(lambda: repr((*question, appearance())), make)
    except SettingError as error:
        raise Misuse(f"--set: {error}") from error
    except TooLarge as error:
        raise Misuse(f"{source.name}: {error}") from error
    except Unfit as unfit:
        click.echo(unfit_text(unfit, color), err=True)
        sys.exit(WRONG_TEXT)
    except Rejected as rejected:
        click.echo(render_all(rejected.diagnostics, source, color), err=True)
        sys.exit(WRONG_TEXT)
    _say(answer.warnings)
    _deliver(answer, out, forecast)


def _compiled(request: Request, wanted: Level | None, color: bool, forecast: Forecast | None) -> Answer:
    """The answer, made now; if there is none, its warnings are shown all the same."""
    warnings: list[Diagnostic] = []
    try:
        with progress.shown() as tell:
            shown, written = produce(
                request,
                wanted,
                warn=warnings.append,
                watch=lambda levels: watched(levels, tell),
                forecast=forecast,
            )
    except BaseException:
        _say(blocks(warnings, request.source, color))
        raise
    return Answer(tuple(blocks(warnings, request.source, color)), shown, written)


def _say(warnings: Iterable[str]) -> None:
    for warning in warnings:
        click.echo(warning, err=True)


def _deliver(answer: Answer, out: Path | None, forecast: Forecast | None) -> None:
    """Writes what there is to write, prints what there is to print, in this order."""
    if answer.output is None:
        write(answer.printed)
        return
    directory = out or Path(f"{answer.output.scheme}.out")
    try:
        output.write(directory, answer.output.files)
    except output.OutputRefused as error:
        raise Misuse(str(error)) from error
    write(answer.printed)
    write(f"wrote {visible(str(directory))}: run it with\n")
    workers, script = answer.output.workers, f"{directory}/train.py"
    words = ["torchrun", f"--nproc-per-node={workers}", as_argument(script), "--model", "MODEL.py"]
    write(f"  {forecast.torchrun(workers, script) if forecast else command_line(words)} --check\n")


def main() -> NoReturn:
    """The entry point."""
    run(compile_command, "chimera-compile")
