"""``chimera plan``: a ranking of schemes, copies, stages and micro-batches by their predicted time."""

import sys
from functools import partial
from pathlib import Path

import click

from chimera_ir import library, output, progress, texts
from chimera_ir.commands import completion
from chimera_ir.commands.assignments import setting, single_values
from chimera_ir.commands.common import (
    FILE,
    WRONG_TEXT,
    FiniteRange,
    WrongCommand,
    require_torch,
    run,
    write,
    write_json,
)
from chimera_ir.commands.search_options import SECONDS, SEED
from chimera_ir.commands.sections import SectionedCommand, as_json, general, is_quiet, remark
from chimera_ir.commands.stage_options import TIED, tied_by_transformer
from chimera_ir.compilation import Compilation
from chimera_ir.console import printed
from chimera_ir.diagnostics.suggest import closest
from chimera_ir.elaborate.elaborate import parameter_names
from chimera_ir.errors import CompileError
from chimera_ir.escapes import visible
from chimera_ir.options import read_inputs
from chimera_ir.orders.budget import SearchBudget
from chimera_ir.orders.cp_sat import require_solver
from chimera_ir.orders.improve import ORDER_MARK
from chimera_ir.planner import listing
from chimera_ir.planner.command_lines import Files, order_file
from chimera_ir.planner.judge import Judge
from chimera_ir.planner.listing import View
from chimera_ir.planner.notes import notes
from chimera_ir.planner.rank import rank
from chimera_ir.planner.recommendation import recommendation
from chimera_ir.planner.searched import SEARCHED, searched
from chimera_ir.planner.space import MAX_OPERATIONS, Question, Recomputation
from chimera_ir.plural import counted
from chimera_ir.profile.choose import Inputs
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme, SyncMode

ERROR = 0.1
"""The default error of equation 1: within 10 % of the measured time (section 4.2.2)."""

MOST = 10**6
"""The most workers, and the most items of a mini-batch."""

_LIBRARY = "--library"


@click.command(
    cls=SectionedCommand,
    sections={
        "Common options": "--profile --cluster --mini-batch --workers --scheme --top --all --why --choose",
        "What is considered": "--set --asynchronous --greedy --recompute --sync --tied --hf --layout --shard-optimizer",
        "A search for better orders": "--search --seed",
        "Output": "--error --json --quiet",
    },
)
@click.option("--profile", type=FILE, required=True, metavar="FILE", help="What the model's stages cost.")
@click.option("--cluster", type=FILE, required=True, metavar="FILE", help="What the model runs on.")
@click.option("--mini-batch", type=click.IntRange(1, MOST), required=True, metavar="ITEMS", help="Items of an update.")
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
    type=click.Choice([mode.value for mode in SyncMode]),
    default=[SyncMode.EAGER_OPT.value],
    help="Consider this strategy [default: eager_opt].",
)
@TIED
@click.option("--hf", metavar="PATH_OR_NAME", help="Stages are tied as in this model of transformers.")
@click.option(
    "--layout", type=click.Choice(["pipeline", "replica"]), default="pipeline", help="Which ranks share a node."
)
@click.option(
    "--shard-optimizer",
    "sharded_optimizer",
    is_flag=True,
    help="The replicas of a stage share the optimizer's state, where there is a flush.",
)
@click.option(
    "--search",
    type=SECONDS,
    metavar="SECONDS",
    help=f"Search for a better order of each of the first {SEARCHED} rows, each for so long; rank them again.",
)
@SEED
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
@click.option(
    "--max-operations",
    type=click.IntRange(min=1),
    default=MAX_OPERATIONS,
    show_default=True,
    help="Leave out schedules of more compute operations.",
)
@click.option(
    _LIBRARY,
    "directories",
    type=FILE,
    multiple=True,
    metavar="DIR",
    help="A directory of further schemes, beside those of CHIMERA_LIBRARY.",
)
@as_json("Everything, as JSON.")
@general
def plan_command(
    profile: Path,
    cluster: Path,
    mini_batch: int,
    workers: int | None,
    schemes: tuple[str, ...],
    settings: dict[str, int],
    asynchronous: bool | None,
    greedy: bool,
    recompute: bool | None,
    syncs: tuple[str, ...],
    tied: list[list[int | str]],
    hf: str | None,
    layout: str,
    sharded_optimizer: bool,
    search: float | None,
    seed: int,
    top: int,
    everything: bool,
    why: bool,
    choose: int,
    error: float,
    max_operations: int,
    directories: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Rank every way to train a model on a cluster that fits its memory.

    For each scheme every number of stages D that the profile has, W copies so that all workers have something to do,
    every micro-batch size B of the profile with as many micro-batches N as the mini-batch takes (B N W items), and
    every value of further parameters that divides D or is listed beside the scheme. The first ones are replayed. With
    --search the order of the chosen row, if one was found, is written to the file that the printed commands name.

    Exit status: 0, 1 something is wrong in a file or no configuration is left, 2 on the command line, 70 in the
    compiler; 130 interrupted.
    """
    if hf is not None and not tied:
        require_torch("reading a model of transformers")
        tied = tied_by_transformer(Path(hf))
    sources = tuple(_scheme(name, directories) for name in schemes) if schemes else _library(directories)
    modes = {None: Recomputation.WHERE_NEEDED, True: Recomputation.ALWAYS, False: Recomputation.NEVER}
    recomputation = modes[recompute]
    if search is not None:
        require_solver("a search")
    elif seed:
        raise WrongCommand("--seed: it is for a search; add --search")
    # Files and schemes first: their mistakes end the command before any work.
    inputs = read_inputs(profile, cluster, "--{}".format)
    model = inputs.model()
    number = _workers(inputs, workers)
    parsed = _parsed(sources, settings)
    strategies = tuple(dict.fromkeys(map(SyncMode, syncs)))
    streams = bool(schemes) if asynchronous is None else asynchronous
    # The question says which configurations there are, the judge what is known of model and cluster.
    needs = {"sliced": bool(schemes), "hosted": inputs.cluster.host is not None}
    question = Question(number, mini_batch, settings, recomputation, strategies, streams, max_operations, **needs)
    trusted = frozenset(map(library.source, library.names()))
    ties = tuple(map(tuple, tied))
    replicas = layout == "replica"
    judge = Judge(
        *(parsed, model, inputs.cluster, replicas, recomputation, max_operations, trusted, ties, sharded_optimizer)
    )
    files = Files(str(profile), str(cluster), replicas, max_operations, ties, sharded_optimizer)
    with progress.shown(is_quiet()) as doing:
        ranking = rank(sources, question, judge, greedy, max(top, choose), doing)
        if search is not None:
            ranking = searched(ranking, SearchBudget(search, seed), doing)
        doing("explaining the first choice")
        answer = recommendation(ranking)
    # The recommendation, the ranking, and the commands of the chosen configuration.
    rows = ranking.rows(everything or as_json)
    if rows and choose > len(rows):
        raise WrongCommand(f"--choose {choose}: there are only {counted(len(rows), 'row')}, and more with --all")
    remarks = notes(ranking, error, inputs.warnings)
    chosen = rows[choose - 1] if rows else None
    if chosen and chosen.order:
        _write_order(chosen.order.text, Path(order_file(chosen.choice, chosen.scheme)))
    if as_json:
        write_json(listing.as_json(ranking, answer, remarks, inputs.warnings, chosen, files))
    else:
        view = View(top, everything, why)
        write(printed(lambda console: console.print(listing.table(ranking, answer, remarks, view))))
        if chosen:
            write(listing.lines(chosen, ranking, files))
    if not rows:
        sys.exit(WRONG_TEXT)


def _library(directories: tuple[Path, ...]) -> tuple[Source, ...]:
    """Every scheme of the library; a file of a further directory that is not a scheme is skipped with a warning."""
    further = library.further(directories, _LIBRARY)
    shipped, sources = library.names(), []
    for name in library.names(further):
        try:
            source = library.source(name, further)
            if name not in shipped:
                _ = Compilation(Request(source)).scheme
        except CompileError as error:
            reason = visible(str(error).splitlines()[0])
            remark(f"warning: {name} is left out of the plan: {reason}")
        else:
            sources.append(source)
    return tuple(sources)


def _write_order(text: str, file: Path) -> None:
    """Writes a found order to a file that is new, or has an older one."""
    remedy = "move it, so that the order that was found can be written there"
    output.write_file(file, text.removeprefix(ORDER_MARK), ORDER_MARK, force=False, option="--search", remedy=remedy)


def _scheme(name: str, directories: tuple[Path, ...]) -> Source:
    source = texts.scheme_or_ir(name, directories, _LIBRARY, lambda text: remark(f"remark: {text}"))
    if not source.is_scheme:
        raise WrongCommand(f"--scheme {name}: it has no parameters to choose; name its scheme")
    return source


def _parsed(sources: tuple[Source, ...], settings: dict[str, int]) -> dict[Source, Scheme]:
    """Parses ``sources`` and the library's baseline; raises `WrongCommand` for a setting that no source has."""
    parsed = {source: Compilation(Request(source)).scheme for source in sources}
    known = dict.fromkeys(name for scheme in parsed.values() for name in parameter_names(scheme))
    for name in settings:
        if name not in known:
            guess = closest(name, known)
            advice = f"did you mean {guess}?" if guess else f"there are {', '.join(known)}"
            raise WrongCommand(f"--set {name}: no scheme has such a parameter; {advice}")
    baseline, _ = library.baseline(1, 1)
    return parsed if baseline in parsed else {**parsed, baseline: Compilation(Request(baseline)).scheme}


def _workers(inputs: Inputs, asked: int | None) -> int:
    """P: ``asked``, which must fit into one node or fill whole nodes; if it is None, all workers of the cluster."""
    cluster = inputs.cluster
    number = cluster.workers if asked is None else asked
    if number > cluster.workers:
        raise WrongCommand(f"--workers {number}: the cluster {cluster.name} has {cluster.workers}")
    if number > cluster.per_node and number % cluster.per_node:
        raise WrongCommand(
            f"--workers {number}: a node has {cluster.per_node}, and torchrun starts equally many on each"
        )
    return number


main = partial(run, plan_command, "chimera-plan")
"""Entry point of the command ``chimera-plan``, an alias of ``chimera plan``."""
