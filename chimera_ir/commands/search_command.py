"""``chimera search``: the best order of a scheme's operations under costs and bounds on memory."""

from typing import Any

import click

from chimera_ir.commands.common import SectionedCommand
from chimera_ir.commands.compile_command import compile_command
from chimera_ir.commands.cost_options import SECONDS

DEFAULT = 15.0


@click.command(
    cls=SectionedCommand,
    sections={
        "Common options": "--seconds --memory --cost --stage-cost --set --emit --out --against",
        "The schedule": "--keep --recompute --sync --tied --communicators --seed",
        "A prediction in seconds": "--profile --cluster --micro-batch-size --copies --split --layout --shard-optimizer",
        "Output": "--html --details --json --table --numbers --quiet",
    },
)
@click.option(
    "--seconds",
    type=SECONDS,
    default=DEFAULT,
    metavar="SECONDS",
    show_default=True,
    help="How long to search at most.",
)
def search_command(scheme: str | None, seconds: float, **options: Any) -> None:
    """Search for the best order of SCHEME's operations; placement and pipes stay as they are.

    SCHEME is as in chimera compile, and so is the output, of the best order that was found. The report compares it with
    SCHEME's own order. Costs are as given, or those of a profile and cluster, whose messages count. Interrupted from
    the keyboard, the search ends with the best order so far. It needs OR-Tools: pip install 'chimera_ir[search]'.

    Exit status: as of chimera compile.
    """
    assert compile_command.callback is not None
    click.get_current_context().invoke(compile_command, scheme=scheme, search=seconds, listing=False, **options)


search_command.params += [option for option in compile_command.params if option.name not in ("search", "listing")]
