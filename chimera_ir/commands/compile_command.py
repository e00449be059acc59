"""``chimera compile`` compiles a scheme to the scripts of its ranks. The options that compiling commands share."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from chimera_ir import errors, library, output, progress
from chimera_ir.answer import ENDINGS, Level, produce
from chimera_ir.commands import completion
from chimera_ir.commands.assignments import listed_values, setting
from chimera_ir.commands.common import (
    DOES_NOT_FIT,
    FILE,
    WRONG_TEXT,
    SectionedCommand,
    WrongCommand,
    all_of,
    as_json,
    colored,
    general,
    is_quiet,
    remark,
    report,
    run,
    write,
    write_json,
)
from chimera_ir.commands.cost_options import (
    PAGE,
    option,
    options_named,
    parse_shares,
    refuse_page,
    scheme_named,
    write_page,
)
from chimera_ir.compare import TableForm
from chimera_ir.compilation import Compilation
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.diagnostics.render import blocks
from chimera_ir.escapes import as_argument, command_line, visible
from chimera_ir.options import Options
from chimera_ir.plural import counted, listed
from chimera_ir.request import Request
from chimera_ir.source import Source

# The list of library schemes that ``chimera compile --list`` prints.


def listed_library(further: tuple[Path, ...]) -> str:
    """A line for each scheme: name, parameters and summary, which continues below itself where there is a width."""
    from rich.table import Column, Table
    from rich.text import Text

    from chimera_ir.console import has_width, printed

    names = library.names(further)
    summaries = [described(name, further) for name in names]
    if not has_width():
        width = max(map(len, names))
        return "".join(
            f"{visible(f'{name:<{width}}  {summary}')}\n" for name, summary in zip(names, summaries, strict=True)
        )
    table = Table.grid(Column(no_wrap=True), Column(), padding=(0, 2, 0, 0))
    for name, summary in zip(names, summaries, strict=True):
        table.add_row(Text(name), Text(summary))
    return printed(lambda console: console.print(table))


def described(name: str, further: tuple[Path, ...]) -> str:
    """The parameters and the summary of a scheme, or why there are none."""
    try:
        return f"({library.parameters(name, further)}) {library.summary(name, further)}".rstrip()
    except Rejected:
        return f"a text with mistakes: {library.source(name, further).name}"
    except errors.UnreadableText as error:
        return str(error)


PAGE_MARK = "<!DOCTYPE html>\n<!-- written by chimera compile -->\n"
"""The first lines of every page that this command writes; it overwrites no file that begins otherwise."""

SCHEME = "scheme"
"""The value of ``--emit`` that prints a scheme, whose clocks are formulas fitted to the orders of several sizes."""

COMPILING = (
    *("costs", "stage_costs", "slice_lengths", "recompute", "offload", "sync", "tied", "communicators"),
    *("max_operations", "library"),
)
"""The options that decide what is compiled."""

compiling = all_of(
    options_named(*COMPILING),
    click.option("--out", type=FILE, metavar="DIR", help="Output directory [default: ./<scheme>.out]."),
)
"""Decorator that adds to a command's function the options that all compiling commands share, except ``--set``."""


@click.command(
    cls=SectionedCommand,
    sections={
        "Common options": "--set --out --emit --against --list",
        "The schedule": "--cost --stage-cost --keep --slice-lengths --recompute --offload --sync --tied "
        "--communicators --search --memory --seed",
        "A prediction in seconds": "--profile --cluster --micro-batch-size --copies --split --layout --shard-optimizer "
        "--require-fit",
        "Output": "--html --details --json --table --numbers --quiet",
    },
)
@click.argument("scheme", required=False, metavar="SCHEME", shell_complete=completion.schemes)
@setting(
    listed_values,
    "Set a parameter, as NAME=VALUE alone does. NAME=V,V,.. or NAME=FIRST..LAST (both included) prints a table and, "
    "with --out, writes the programs for all these numbers of micro-batches into one directory.",
    texts=True,
)
@compiling
@option("keep")
@click.option(
    "--html",
    type=PAGE,
    metavar="FILE",
    help="Write the page of the schedule, or of the mistake in it, to FILE, and nothing else.",
)
@click.option("--details", is_flag=True, help="Print all figures, too: the tables and each launch of a sum.")
@click.option(
    "--emit",
    type=click.Choice([*(level.value for level in Level), SCHEME]),
    metavar="LEVEL",
    help=f"Print one level and write nothing: {listed([*(level.value for level in Level), SCHEME], 'or')}.",
)
@options_named("profile", "cluster", "copies", "micro_batch_size", "layout", "shard_optimizer", "split", "require_fit")
@option("against")
@click.option(
    "--table",
    type=click.Choice([form.value for form in TableForm]),
    help="Form of the table that --set with several values prints [default: text].",
)
@click.option(
    "--numbers",
    callback=parse_shares,
    metavar="N:SHARE,..",
    help="Print means over updates of which these shares have so many micro-batches, each in the table: 8:0.5,12:0.5.",
)
@options_named("search", "memory", "seed")
@click.option("--list", "listing", is_flag=True, help="List the library schemes.")
@as_json("Print the report, the table or the list as JSON.")
@general
def compile_command(
    scheme: str | None,
    settings: dict[str, tuple[int, ...]],
    others: tuple[str, ...],
    out: Path | None,
    html: Path | None,
    details: bool,
    emit: str | None,
    table: str | None,
    numbers: dict[int, str],
    listing: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile SCHEME to one PyTorch script per worker, proven free of deadlock.

    SCHEME is a .chim file, an IR text (.sir), a schedule of torch.distributed.pipelining (.csv), or the name of
    a library scheme (--list); - reads such a text from standard input.

    Exit status: 0 compiled and verified; 1 something is wrong in the text, 2 on the command line; 3 a worker needs
    more memory than the cluster has (written all the same, unless --require-fit is given); 70 something is wrong in
    the compiler; 130 interrupted.
    """
    if listing:
        further = library.further(options["library"], as_written("library"))
        entries = [{"name": name, "description": described(name, further)} for name in library.names(further)]
        write_json(entries) if as_json else write(listed_library(further))
        return
    # Options that exclude each other, and tables over several values of a parameter, which write nothing.
    if scheme is None:
        raise WrongCommand("Missing argument 'SCHEME'")
    if as_json and (emit not in (None, Level.REPORT.value) or table not in (None, TableForm.JSON.value)):
        raise WrongCommand(f"--json: leave {f'--emit {emit}' if emit else f'--table {table}'} out")
    if html is not None and (conflicting := _first_given({"--emit": emit, "--out": out, "--json": as_json or None})):
        raise WrongCommand(f"{conflicting}: --html writes the page and nothing else; leave one of them out")
    if emit == SCHEME:
        write(_in_colours(_fitted((scheme, *others), settings, options), Level.AST))
        return
    if others:
        raise WrongCommand(f"unexpected word '{others[0]}': several texts are for --emit {SCHEME}")
    if table is not None or any(len(values) > 1 for values in settings.values()):
        if conflicting := _first_given({"--out": table and out, "--emit": emit, "--html": html}):
            raise WrongCommand(f"{conflicting}: a table is printed alone, and nothing is written")
        if out is not None:
            _write_several(scheme, settings, options, out, numbers, as_json)
            return
        form = TableForm.JSON if as_json else TableForm(table or TableForm.TEXT)
        if numbers and form is TableForm.CSV:
            raise WrongCommand("--numbers: a table as CSV has rows of programs alone; print it as text or as JSON")
        compiles = _sweep(scheme, settings, options, form, numbers)
        click.get_current_context().exit(0 if compiles else WRONG_TEXT)
    if numbers:
        raise WrongCommand("--numbers: it is for a table of several numbers of micro-batches, as N=8,12 gives it")
    # One compilation.
    wanted = Level(emit) if emit else None
    values = {name: value for name, (value,) in settings.items()}
    if html is not None:
        _show_page(html, requested(scheme, values, options))
        return
    request = requested(scheme, values, options)
    text, compilation = compiled(request, wanted, details)
    if wanted is not None:
        write(_in_colours(text, wanted))
        return
    # The output directory, and the command that runs it.
    directory = delivered("" if as_json else text, compilation, out)
    line = _run_line(compilation, directory)
    if as_json:
        figures = json.loads(compilation.report_json)
        write_json({"directory": str(directory), "run": line, "report": figures})
    else:
        report(f"{_wrote(directory)}: run it with\n  {line} --check\n")
    if not compilation.summary.fits:
        click.echo("the program does not fit the memory of the cluster's workers", err=True)
        click.get_current_context().exit(DOES_NOT_FIT)


def _run_line(compilation: Compilation, directory: Path) -> str:
    """The command line that runs the program in a directory."""
    header, script, forecast = compilation.header, f"{directory}/train.py", compilation.forecast
    if forecast:
        return forecast.torchrun(header.workers, script, forecast.split_of(header))
    return command_line(["torchrun", f"--nproc-per-node={header.workers}", as_argument(script), "--model", "MODEL.py"])


def _wrote(directory: Path, more: str = "") -> str:
    page = f"chimera view {command_line([as_argument(str(directory))])}"
    return f"wrote {visible(str(directory))}{more} (page: {page}; all figures: report.json, --details)"


def _write_several(
    scheme: str,
    values: Mapping[str, tuple[int, ...]],
    options: Mapping[str, Any],
    out: Path,
    numbers: Mapping[int, str],
    as_json: bool,
) -> None:
    """Writes the programs of all combinations of values into one directory, and prints a row for each."""
    from chimera_ir.compare.sweep import SizeRow, Sweep, as_entries, row_of, shown, sizes
    from chimera_ir.several import joined

    source, warnings, rows, unfit = _text(scheme, options), list[Diagnostic](), list[SizeRow](), list[str]()

    def number(request: Request) -> int:
        with _telling_size(request), option_errors(source):
            return Compilation(request).header.whole_micro_batches

    def finished(request: Request) -> Compilation:
        tell(f"compiling {len(rows) + 1} of {len(requests)}")
        compilation = Compilation(request, warn=warnings.append)
        with _telling_size(request), option_errors(source):
            rows.append(row_of(compilation))
            _ = compilation.files
            if not compilation.summary.fits:
                unfit.append(compilation.header.title)
        return compilation

    def like_largest(request: Request) -> Request:
        forecast = largest.forecast
        return replace(request, forecast=forecast and replace(forecast, split=forecast.split_of(largest.header)))

    try:
        with progress.shown(is_quiet()) as tell:
            with option_errors(source):
                first = {name: listing[0] for name, listing in values.items()}
                requests = sizes(Options(**options).request(source, first, as_written), values)
            *others, most = sorted(requests, key=number)
            largest = finished(most)
            # One after the other: a compilation is dropped when its files are there.
            files = joined(largest, map(finished, map(like_largest, others)))
    finally:
        _say(dict.fromkeys(blocks(warnings, source, colored(sys.stderr))))
    sweep, line = Sweep((*values,), (*rows[1:], rows[0])), _run_line(largest, out)
    with option_errors(source):
        expected = sweep.expected(numbers) if numbers else None
    output.write(out, files)
    if as_json:
        means = {"expected": expected.as_json()} if expected else {}
        write_json({"directory": str(out), "run": line, "reports": as_entries(sweep), **means})
    else:
        report(shown(sweep, TableForm.TEXT, expected))
        programs = f", with programs for {counted(len(rows), 'number')} of micro-batches"
        report(f"{_wrote(out, programs)}: run it with\n  {line} --check\n")
    if unfit:
        click.echo(f"{listed(unfit)}: the memory of the cluster's workers is too small", err=True)
        click.get_current_context().exit(DOES_NOT_FIT)


@contextmanager
def _telling_size(request: Request) -> Iterator[None]:
    """Context that adds to an error the size that it is about."""
    try:
        yield
    except (errors.CompileError, click.ClickException) as error:
        settings = " ".join(f"{name}={value}" for name, value in request.settings.items())
        error.add_note(f"this is the program with {settings}; nothing is written")
        raise


def _fitted(texts: Sequence[str], values: Mapping[str, tuple[int, ...]], options: Mapping[str, Any]) -> str:
    """The text of a scheme whose clocks give the orders of SCHEME at several sizes, or of each of several ``texts``."""
    from chimera_ir.fitting.scheme_fit import fitted, fitted_texts

    sources = [_text(text, options) for text in texts]
    if len(texts) > 1 and values:
        raise WrongCommand(f"{next(iter(values))}: each of several texts has a size; leave the parameter out")
    compilations = []
    with progress.shown(is_quiet()) as tell:
        for source in sources:
            with option_errors(source):
                compilations.append(Compilation(Options(**options).request(source, {}, as_written), tell=tell))
                fit = fitted(compilations[0], values) if len(sources) == 1 else None
                _ = source.is_scheme or compilations[-1].schedule
        fit = fit or fitted_texts(compilations)
    return fit.remark + fit.text


def _show_page(file: Path, request: Request) -> None:
    """Writes the page of a request or, before it raises the error, of the mistake in its text."""
    refuse_page(file, PAGE_MARK)
    try:
        page, _ = compiled(request, Level.HTML)
    except errors.TextError as error:
        if any(source is not request.source for source, _ in error.texts):
            raise
        write_page(file, Compilation(request).page_of_mistake(error), PAGE_MARK)
        raise
    write_page(file, page, PAGE_MARK)


def _first_given(options: Mapping[str, object]) -> str:
    return next((name for name, value in options.items() if value is not None), "")


def _in_colours(text: str, level: Level | None) -> str:
    if not colored(sys.stdout):
        return text
    from chimera_ir import highlight

    return highlight.colored(text, ENDINGS.get(level, ""))


def requested(scheme: str, settings: Mapping[str, int], options: Mapping[str, Any]) -> Request:
    """The request for SCHEME: ``settings`` are values of parameters, ``options`` fields of `Options`."""
    source = _text(scheme, options)
    with option_errors(source):
        return Options(**options).request(source, settings, as_written)


def compiled(request: Request, wanted: Level | None, details: bool = False) -> tuple[str, Compilation]:
    """Compiles the request, prints its warnings, also before an error, and returns the text that `produce` makes."""
    color, warnings = colored(sys.stderr), list[Diagnostic]()
    try:
        with option_errors(request.source), progress.shown(is_quiet()) as tell:
            compilation = Compilation(request, warn=warnings.append, tell=tell)
            text = produce(compilation, wanted, details)
    finally:
        _say(blocks(warnings, request.source, color))
    if wanted in (Level.TORCH_CSV, Level.TORCH_CSV_COMMS):
        from chimera_ir.torch_text.csv_writer import remarks

        sentences = remarks(compilation.schedule.header, comms=wanted is Level.TORCH_CSV_COMMS)
        _say(f"remark: {sentence}" for sentence in sentences)
    return text, compilation


def _text(scheme: str, options: Mapping[str, Any]) -> Source:
    return scheme_named("/dev/stdin" if scheme == "-" else scheme, options["library"])


def _sweep(
    scheme: str,
    values: Mapping[str, tuple[int, ...]],
    options: Mapping[str, Any],
    form: TableForm,
    numbers: Mapping[int, str],
) -> bool:
    """Prints a sweep's warnings, each once, and its table; whether SCHEME compiles with any of the values."""
    from chimera_ir.compare.sweep import shown, swept

    source = _text(scheme, options)
    warnings: list[Diagnostic] = []
    with option_errors(source), progress.shown(is_quiet()) as tell:
        first = {name: listing[0] for name, listing in values.items()}
        sweep = swept(Options(**options).request(source, first, as_written), values, warnings.append, tell)
    _say(dict.fromkeys(blocks(warnings, source, colored(sys.stderr))))
    with option_errors(source):
        expected = sweep.expected(numbers) if numbers else None
    write(shown(sweep, form, expected))
    return bool(sweep.compiled)


@contextmanager
def option_errors(source: Source) -> Iterator[None]:
    """Context that turns errors about options into `WrongCommand`, with options as the user writes them."""
    try:
        yield
    except errors.ParameterError as error:
        raise WrongCommand(str(error)) from error
    except errors.WrongOption as error:
        raise WrongCommand(f"{as_written(error.option)}{error.problem}") from error
    except errors.NoSuchTie as error:
        raise WrongCommand(f"--tied {error.tie}: {error.problem}") from error
    except errors.NoSuchLevel as error:
        raise WrongCommand(f"--emit {error.level}: {error.text} enters below that level") from error
    except errors.AboveMaxOperations as error:
        raises = f"--max-operations {error.operations} raises it"
        raise WrongCommand(f"{source.name}: {error.excess}; {raises}") from error
    except errors.TooLarge as error:
        raise WrongCommand(f"{source.name}: {error}") from error


def delivered(text: str, compilation: Compilation, out: Path | None) -> Path:
    """Writes the files to ``out``, by default to SCHEME.out, then prints ``text``; returns the directory."""
    directory = out or Path(f"{compilation.header.scheme}.out")
    output.write(directory, compilation.files)
    report(text)
    return directory


def as_written(name: str) -> str:
    """The spelling of an option on the command line: ``--micro-batch-size`` for ``micro_batch_size``."""
    return next(option.opts[0] for option in compile_command.params if option.name == name)


def _say(warnings: Iterable[str]) -> None:
    for warning in warnings:
        remark(warning)


main = partial(run, compile_command, "chimera-compile")
"""Entry point of the command ``chimera-compile``, an alias of ``chimera compile``."""
