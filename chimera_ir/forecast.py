"""The options of ``chimera-compile`` that ask for a prediction, and the files behind them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import click

from chimera_ir import texts
from chimera_ir.command import Misuse
from chimera_ir.diagnostics.render import render_all
from chimera_ir.predict.prediction import Forecast
from chimera_ir.profile.choose import Inputs, Unfit, read_both

_Command = TypeVar("_Command", bound=Callable[..., object])

MOST = 10**6
"""Copies, and items of a micro-batch."""

_FILE = click.Path(path_type=Path)

_OPTIONS = (
    click.option(
        "--profile",
        type=_FILE,
        metavar="FILE",
        help="What the model's stages cost; the report is then in seconds, with a prediction.",
    ),
    click.option("--cluster", type=_FILE, metavar="FILE", help="What the model runs on."),
    click.option("--copies", type=click.IntRange(1, MOST), metavar="W", help="Copies of the pipelines [default: 1]."),
    click.option("--micro-batch-size", type=click.IntRange(1, MOST), metavar="B", help="Items of a micro-batch."),
    click.option(
        "--layout", type=click.Choice(["pipeline", "replica"]), help="Which ranks share a node [default: pipeline]."
    ),
)


def forecast_options(command: _Command) -> _Command:
    """Adds the options to a command, which passes their values on to `read_forecast` by name."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_forecast(given: Mapping[str, Path | int | str | None]) -> Forecast | None:
    """What the options ask for; None if they ask for nothing.

    Raises
    ------
    Misuse
        If only some of them are there that belong together, or a file cannot be read.
    Unfit
        With everything that is wrong in the files.
    """
    match given:
        case {"profile": Path() as profile, "cluster": Path() as cluster, "micro_batch_size": int(size)}:
            copies, layout = given["copies"], given["layout"]
            return Forecast(
                read_inputs(profile, cluster), copies if isinstance(copies, int) else 1, size, layout == "replica"
            )
        case _ if any(value is not None for value in given.values()):
            named = ", ".join(f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None)
            raise Misuse(f"{named}: a prediction needs --profile, --cluster and --micro-batch-size together")
        case _:
            return None


def read_inputs(profile: Path, cluster: Path) -> Inputs:
    """The profile and the cluster that the options of these names give; errors as in `read_forecast`."""
    return read_both(texts.read(profile, "--profile"), texts.read(cluster, "--cluster"))


def unfit_text(unfit: Unfit, color: bool) -> str:
    """What is wrong in the files, for a terminal."""
    return "\n\n".join(render_all(diagnostics, file, color) for file, diagnostics in unfit.found)
