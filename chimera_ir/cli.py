"""``chimera-compile``: the command line, what it prints, and its exit statuses."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click

from chimera_ir import __version__, library, output
from chimera_ir.command import WRONG_TEXT, Misuse, parse_settings, printed, run, write
from chimera_ir.cost import table
from chimera_ir.cost.model import KINDS, Costs
from chimera_ir.cost.report import Report
from chimera_ir.cost.simulate import Timeline
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.diagnostics.render import render, render_all
from chimera_ir.diagnostics.suggest import closest
from chimera_ir.driver import MAX_OPERATIONS, Level, Request, Result, TooLarge, compile_ir, compile_scheme, files
from chimera_ir.elaborate.settings import SettingError
from chimera_ir.ir.levels import Plan, Program, Schedule
from chimera_ir.ir.text.printer import show
from chimera_ir.picture import terminal
from chimera_ir.source import Source
from chimera_ir.syntax import printer as scheme_printer
from chimera_ir.syntax.ast import Scheme
from chimera_ir.verify.verify import Verified


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
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Output directory [default: ./<scheme>.out]."
)
@click.option("--emit", type=click.Choice([level.value for level in Level]), help="Print one level and write nothing.")
@click.option(
    "--max-operations", type=click.IntRange(min=1), default=MAX_OPERATIONS, show_default=True, help="Limit on the size."
)
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="List the library schemes."
)
@click.version_option(__version__, prog_name="chimera-compile")
def compile_command(
    scheme: str, settings: dict[str, int], costs: Costs, out: Path | None, emit: str | None, max_operations: int
) -> None:
    """Compile SCHEME to one PyTorch script per worker, proven free of deadlock.

    SCHEME is a .chim file, an IR text (.sir) or the name of a library scheme (--list).

    Exit status: 0 compiled and verified, 1 something is wrong in the text, 2 on the command line, 70 in the compiler;
    130 interrupted.
    """
    source = _source(scheme)
    is_ir = source.name.endswith(".sir")
    if is_ir and settings:
        raise Misuse("--set: an IR text has no parameters to set; set them when you compile its scheme")
    request = Request(source, settings, costs, max_operations)
    color = sys.stderr.isatty()
    try:
        levels = (compile_ir if is_ir else compile_scheme)(request, lambda each: _say(each, source, color))
        if emit is not None:
            write(_text(_find(levels, Level(emit), source)))
        else:
            _compile(dict(levels), out)
    except SettingError as error:
        raise Misuse(f"--set: {error}") from error
    except TooLarge as error:
        raise Misuse(f"{source.name}: {error}") from error
    except Rejected as rejected:
        click.echo(render_all(rejected.diagnostics, source, color), err=True)
        sys.exit(WRONG_TEXT)


def _source(scheme: str) -> Source:
    """The text that SCHEME names: a file if it looks like one, else a scheme of the library."""
    path = Path(scheme)
    if path.suffix in (".chim", ".sir") or len(path.parts) > 1:
        return _read(path)
    if scheme in library.names():
        return library.source(scheme)
    guess = closest(scheme, library.names())
    advice = f"did you mean {guess}?" if guess else f"there are {', '.join(library.names())}"
    raise Misuse(f"no library scheme is called '{scheme}' ({advice}); a file ends in .chim or .sir")


def _read(path: Path) -> Source:
    if path.suffix not in (".chim", ".sir"):
        raise Misuse(f"{path}: a scheme ends in .chim, an IR text in .sir")
    try:
        data = path.read_bytes()
    except OSError as error:
        hint = f"; for the library scheme write {path.stem}" if path.stem in library.names() else ""
        raise Misuse(f"{path}: {error.strerror}{hint}") from error
    return Source(str(path), data.decode("utf-8", errors="replace").removeprefix("\ufeff"))


def _say(diagnostic: Diagnostic, source: Source, color: bool) -> None:
    click.echo(render(diagnostic, source, color), err=True)


def _find(levels: Iterator[Result], wanted: Level, source: Source) -> object:
    for level, value in levels:
        if level is wanted:
            return value
    raise Misuse(f"--emit {wanted.value}: {source.name} enters below that level")


def _text(value: object) -> str:
    match value:
        case Scheme():
            return scheme_printer.show(value)
        case Plan() | Schedule() | Program():
            return show(value)
        case Verified():
            return show(value.program)
        case Timeline():
            return printed(lambda console: console.print(terminal.draw(value, console.width)))
        case Report():
            return _json(value)
        case _:
            raise TypeError(f"no level is a {type(value).__name__}")


def _json(report: Report) -> str:
    return json.dumps(report.as_json(), indent=2) + "\n"


def _compile(levels: dict[Level, object], out: Path | None) -> None:
    verified, timeline, report = levels[Level.PROGRAM], levels[Level.TIMELINE], levels[Level.REPORT]
    assert isinstance(verified, Verified)
    assert isinstance(timeline, Timeline)
    assert isinstance(report, Report)
    header = verified.program.header
    directory = out or Path(f"{header.scheme}.out")
    try:
        output.write(directory, files(verified, timeline, _json(report)))
    except output.OutputRefused as error:
        raise Misuse(str(error)) from error
    write(printed(lambda console: console.print(table.show(report), terminal.draw(timeline, console.width))))
    write(f"wrote {directory}: run it with\n")
    write(f"  torchrun --nproc-per-node={header.workers} {directory}/train.py --model MODEL.py --check\n")


def main() -> NoReturn:
    """The entry point."""
    run(compile_command, "chimera-compile")
