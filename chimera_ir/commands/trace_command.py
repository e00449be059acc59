"""``chimera trace``: what ``train.py --trace`` recorded, compared with the prediction."""

from functools import partial
from pathlib import Path

import click

from chimera_ir import output as output_directory
from chimera_ir.commands.common import (
    FILE,
    GivenPath,
    SectionedCommand,
    WrongCommand,
    WrongText,
    as_json,
    general,
    remark,
    report,
    run,
    write_json,
)
from chimera_ir.commands.cost_options import option
from chimera_ir.console import printed
from chimera_ir.cost.durations import rounded
from chimera_ir.escapes import visible
from chimera_ir.options import read_inputs
from chimera_ir.profile.choose import Inputs
from chimera_ir.profile.document import WARNING, shown
from chimera_ir.recorded_page import recorded_page, stopped_page
from chimera_ir.trace import presentation
from chimera_ir.trace.bundles import read_bundle
from chimera_ir.trace.compare import compare, has_whole_updates
from chimera_ir.trace.drawing import draw
from chimera_ir.trace.event_files import recorded_trace
from chimera_ir.trace.forecast import profile_source
from chimera_ir.trace.match import lanes
from chimera_ir.trace.trace_files import BadTrace, read

NAME = "chimera-trace"


@click.command(
    cls=SectionedCommand,
    sections={"Common options": "--out --json --quiet", "Another prediction": "--profile --cluster"},
)
@click.argument("recording", metavar="DIR", type=GivenPath(exists=True, path_type=Path))
@click.option(
    "--out",
    metavar="DIR",
    type=FILE,
    help="Where to write; by default the folder view in DIR, or NAME.view beside NAME.zip.",
)
@option("profile", help="What the model's stages cost; with it goes --cluster.")
@option("cluster", help="What the model runs on: compares with that prediction.")
@as_json("Print the residuals as JSON.")
@general
def trace_command(recording: Path, out: Path | None, profile: Path | None, cluster: Path | None, as_json: bool) -> None:
    """Compare what the ranks recorded in DIR with what their schedule promises.

    DIR is what train.py --trace DIR wrote, with the files of all ranks. Prints the residuals by kind and worker, and
    writes trace.html (the page), compare.svg (a picture) and trace.json (for Perfetto or chrome://tracing). The page of
    a run that ended early, as after a time-out, shows where every rank stopped.

    DIR may also be the zip file that train.py --bundle FILE.zip wrote: it has the places alone, and so has trace.html.

    The promise is made from what operations took in the run itself, with messages that take no time; with --profile
    and --cluster it is the prediction that these made before: a replay of the program.

    Exit status: 0, 1 something is wrong in the trace or a file, 2 on the command line, 70 our own fault;
    130 interrupted.
    """
    try:
        inputs = _inputs(profile, cluster)
        for warning in shown(inputs.warnings if inputs else ()):
            remark(f"{WARNING}{warning}")
        if not recording.is_dir():
            _write_stopped(recording, out, inputs, as_json)
            return
        trace = read(recording)
        recorded = lanes(trace)
        # A run that ended before every rank had recorded an update has nothing to compare.
        comparison = None
        if not trace.ended_early or has_whole_updates(trace, recorded):
            comparison = compare(trace, recorded, profile_source(trace, inputs) if inputs else None)
    except BadTrace as error:
        raise WrongText(str(error)) from error
    files = {"trace.html": recorded_page(trace, recorded, comparison)}
    if comparison is not None:
        files |= {"compare.svg": draw(comparison), "trace.json": recorded_trace(trace, comparison)}
    target = recording / "view" if out is None else out
    output_directory.write(target, files, f".{NAME}")
    if as_json:
        write_json(rounded(presentation.as_json(comparison)) if comparison else presentation.ended_as_json(trace))
        return
    ended = presentation.ended(trace)
    report(printed(lambda console: console.print(presentation.text(comparison) if comparison else ended)))
    report(f"wrote {visible(str(target))}: {', '.join(files)}\n")


def _write_stopped(bundle: Path, out: Path | None, inputs: Inputs | None, as_json: bool) -> None:
    if inputs is not None:
        raise WrongCommand(f"{bundle}: has no times to compare with --profile and --cluster; name a trace")
    page, stops = stopped_page(read_bundle(bundle))
    target = bundle.with_name(f"{bundle.stem}.view") if out is None else out
    output_directory.write(target, {"trace.html": page}, f".{NAME}")
    if as_json:
        write_json(presentation.stops_as_json(stops))
        return
    report(printed(lambda console: console.print(presentation.stops_text(stops))))
    report(f"wrote {visible(str(target))}: trace.html\n")


def _inputs(profile: Path | None, cluster: Path | None) -> Inputs | None:
    if profile is None and cluster is None:
        return None
    if profile is None or cluster is None:
        alone = "--profile" if cluster is None else "--cluster"
        raise WrongCommand(f"{alone}: a prediction needs --profile and --cluster together")
    return read_inputs(profile, cluster, "--{}".format)


main = partial(run, trace_command, NAME)
"""Entry point of the command ``chimera-trace``, an alias of ``chimera trace``."""
