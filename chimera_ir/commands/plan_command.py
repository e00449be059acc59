"""``chimera plan``: a ranking of schemes, copies, stages and micro-batches by their predicted time."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from chimera_ir import output
from chimera_ir.commands import completion
from chimera_ir.commands.assignments import setting, single_values
from chimera_ir.commands.common import (
    WRONG_TEXT,
    FiniteRange,
    SectionedCommand,
    WrongCommand,
    as_json,
    general,
    is_quiet,
    remark,
    require_torch,
    run,
    write,
    write_json,
)
from chimera_ir.commands.cost_options import option, parse_items, scheme_named, tied_by_transformer
from chimera_ir.console import printed
from chimera_ir.options import MOST
from chimera_ir.orders.search import ORDER_MARK
from chimera_ir.planner import listing
from chimera_ir.planner.listing import View, notes, order_file, recommendation
from chimera_ir.planner.planning import SEARCHED, SYNCS, rank_schemes
from chimera_ir.planner.rank import ERROR
from chimera_ir.planner.space import MAX_OPERATIONS
from chimera_ir.plural import counted
from chimera_ir.progress import shown


@click.command(
    cls=SectionedCommand,
    sections={
        "Common options": "--profile --cluster --mini-batch --workers --scheme --top --all --why --choose",
        "What is considered": "--set --asynchronous --greedy --recompute --sync --tied --hf --layout --shard-optimizer",
        "A search for better orders": "--search --seed",
        "Output": "--error --json --quiet",
    },
)
@option("profile", required=True, help="What the model's stages cost.")
@option("cluster", required=True)
@click.option(
    "--mini-batch",
    callback=parse_items,
    required=True,
    metavar="ITEMS",
    help="Items of an update, or of updates that differ, each with its share of them: 64:0.5,96:0.5.",
)
@click.option("--workers", type=click.IntRange(1, MOST), metavar="P", help="How many to use [default: the cluster's].")
@click.option(
    "--scheme",
    "schemes",
    multiple=True,
    shell_complete=completion.schemes,
    metavar="NAME_OR_FILE",
    help="Consider this one [default: the library].",
)
@setting(single_values, "Fix a parameter, as NAME=VALUE alone does.")
@click.option(
    "--asynchronous/--synchronous-only",
    default=None,
    help="Consider schemes without a flush, or none [default: those that --scheme names].",
)
@click.option("--greedy", is_flag=True, help="For each W and D only the largest B that fits, as the paper does.")
@click.option(
    "--recompute/--no-recompute",
    default=None,
    help="Recompute activations always or never [default: where they do not fit otherwise].",
)
@click.option(
    "--sync",
    "syncs",
    multiple=True,
    type=click.Choice(SYNCS),
    default=["eager_opt"],
    help="Consider this strategy [default: eager_opt].",
)
@option("tied")
@click.option("--hf", metavar="PATH_OR_NAME", help="Stages are tied as in this model of transformers.")
@option("layout", default="pipeline", help="Which ranks share a node.")
@option("shard_optimizer", help="The replicas of a stage share the optimizer's state, where there is a flush.")
@option(
    "search",
    help=f"Search for a better order of each of the first {SEARCHED} rows, each for so long; rank them again.",
)
@option("seed")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, metavar="K", help="How many to show.")
@click.option("--all", "everything", is_flag=True, help="Show every configuration, not only the best of each scheme.")
@click.option("--why", is_flag=True, help="Show what was left out, and why.")
@click.option(
    "--choose",
    type=click.IntRange(min=1),
    default=1,
    metavar="K",
    help="Which row's commands to write, with --json which choice's [default: 1].",
)
@click.option(
    "--error",
    type=FiniteRange(0, 1),
    default=ERROR,
    show_default=True,
    help="Error of a prediction, as a share: closer choices count as equal.",
)
@option("max_operations", default=MAX_OPERATIONS, metavar=None, help="Leave out schedules of more compute operations.")
@option("library")
@as_json("Everything, as JSON.")
@general
def plan_command(
    schemes: tuple[str, ...],
    hf: str | None,
    top: int,
    everything: bool,
    why: bool,
    choose: int,
    error: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Rank every way to train a model on a cluster that fits its memory.

    For each scheme every number of stages D that the profile has, W copies so that all workers have something to do,
    every micro-batch size B of the profile with as many micro-batches N as the mini-batch takes (B N W items), and
    every value of further parameters that divides D or is listed beside the scheme. The first ones are replayed. With
    --search the order of the chosen row, if one was found, is written to the file that the printed commands name.

    Exit status: 0, 1 something is wrong in a file or no configuration is left, 2 on the command line, 70 in the
    compiler; 130 interrupted.
    """
    if hf is not None and not options["tied"]:
        require_torch("reading a model of transformers")
        options["tied"] = tied_by_transformer(Path(hf))
    with shown(is_quiet()) as doing:
        ranked = rank_schemes(
            *(scheme_named(name, options["library"]) for name in schemes),
            **options,
            spell=lambda argument: "--set" if argument == "settings" else f"--{argument.replace('_', '-')}",
            warn=lambda words: remark(f"warning: {words}"),
            tell=doing,
        )
        ranking = ranked.ranking
        doing("explaining the first choice")
        answer = recommendation(ranking)
    # The recommendation, the ranking, and the commands of the chosen configuration.
    rows = ranking.rows(everything or as_json)
    if rows and choose > len(rows):
        raise WrongCommand(f"--choose {choose}: there are only {counted(len(rows), 'row')}, and more with --all")
    remarks = notes(ranking, error, ranked.warnings)
    chosen = rows[choose - 1] if rows else None
    if chosen and chosen.order:
        text, file = chosen.order.text.removeprefix(ORDER_MARK), Path(order_file(chosen))
        remedy = "move it, so that the order that was found can be written there"
        output.write_file(file, text, ORDER_MARK, force=False, option="--search", remedy=remedy)
    if as_json:
        write_json(listing.as_json(ranking, answer, remarks, ranked.warnings, chosen))
    else:
        view = View(top, everything, why)
        write(printed(lambda console: console.print(listing.table(ranking, answer, remarks, view))))
        if chosen:
            write(listing.lines(chosen, ranking))
    if not rows:
        sys.exit(WRONG_TEXT)


main = partial(run, plan_command, "chimera-plan")
"""Entry point of the command ``chimera-plan``, an alias of ``chimera plan``."""
