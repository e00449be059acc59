"""``chimera compare``: schemes side by side at one size, as a table, as JSON, or as a page with their pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from chimera_ir import library, progress
from chimera_ir.commands import completion
from chimera_ir.commands.assignments import single_values
from chimera_ir.commands.common import (
    WRONG_TEXT,
    SectionedCommand,
    as_json,
    general,
    is_quiet,
    write,
    write_json,
)
from chimera_ir.commands.compile_command import as_written, compile_command, option_errors
from chimera_ir.commands.cost_options import PAGE, refuse_page, scheme_named, write_page
from chimera_ir.options import Options
from chimera_ir.request import Request
from chimera_ir.source import ENDINGS, Source

MARK = "<!DOCTYPE html>\n<!-- written by chimera compare -->\n"
"""The first lines of every page that this command writes; it overwrites no file that begins otherwise."""

AS_IN_COMPILE = (
    *("costs", "stage_costs", "keep", "recompute", "max_operations", "library"),
    *("profile", "cluster", "copies", "micro_batch_size", "layout", "shard_optimizer"),
)
"""Names of the options that this command takes over from chimera compile, with the same meaning."""


@click.command(
    cls=SectionedCommand,
    sections={
        "Common options": "--set --cost --stage-cost --keep --recompute",
        "A prediction in seconds": "--profile --cluster --micro-batch-size --copies --layout --shard-optimizer",
        "Output": "--html --json --quiet",
    },
)
@click.argument("words", nargs=-1, metavar="[SCHEME]... [NAME=VALUE]...", shell_complete=completion.schemes)
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a parameter, as NAME=VALUE alone does."
)
@click.option("--html", type=PAGE, metavar="FILE", help="Write a page with the picture of each scheme.")
@as_json("Print the settings and the report of each scheme as JSON.")
@general
def compare_command(
    words: tuple[str, ...], settings: tuple[str, ...], html: Path | None, as_json: bool, **options: Any
) -> None:
    """Show schemes side by side at one size: time, bubbles, memory, messages, and when to use which.

    SCHEME is as in chimera compile; without any, all library schemes are compared. The first scheme that
    compiles with all parameters that are set decides how many workers and micro-batches all have; the parameters of the
    others are chosen accordingly. No scripts are written.

    Exit status: 0 if any scheme compiles at this size; 1 if none does, or something is wrong in a text, 2 on the
    command line.
    """
    from chimera_ir.compare import gallery

    if html is not None:
        refuse_page(html, MARK)
    schemes = [word for word in words if "=" not in word or Path(word).suffix in ENDINGS]
    chosen = single_values((*settings, *(word for word in words if word not in schemes)))
    sources = _sources(schemes, options["library"])

    def ask(source: Source, values: Mapping[str, int]) -> Request:
        return Options(**options).request(source, values, as_written)

    with option_errors(sources[0]), progress.shown(is_quiet()) as tell:
        further = library.further(options["library"], as_written("library"))
        exhibition = gallery.gallery(sources, chosen, ask, further, tell)
    exhibition = exhibition if schemes else exhibition.by_time()
    write_json(gallery.as_json(exhibition)) if as_json else write(gallery.text(exhibition))
    if html is not None:
        write_page(html, gallery.page(exhibition), MARK)
    click.get_current_context().exit(0 if exhibition.timelines else WRONG_TEXT)


def _sources(schemes: Sequence[str], directories: tuple[Path, ...]) -> list[Source]:
    """The texts that ``schemes`` name; without any, all library schemes, the baseline first."""
    if schemes:
        return [scheme_named(scheme, directories) for scheme in schemes]
    further = library.further(directories, as_written("library"))
    baseline, _ = library.baseline(1, 1)
    others = (library.source(name, further) for name in library.names(further))
    return [baseline, *(source for source in others if source != baseline)]


compare_command.params += [option for option in compile_command.params if option.name in AS_IN_COMPILE]
