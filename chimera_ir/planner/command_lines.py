"""Command lines that compile and start a configuration."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from chimera_ir import library
from chimera_ir.escapes import as_argument, command_line
from chimera_ir.planner.space import MAX_OPERATIONS, Configuration
from chimera_ir.request import Tie
from chimera_ir.source import Source


@dataclass(frozen=True, slots=True)
class Files:
    """The files and options of a call of the planner, as the user named them."""

    profile: str
    cluster: str
    replica_layout: bool
    max_operations: int
    ties: tuple[Tie, ...] = ()
    sharded_optimizer: bool = False


def scheme_argument(source: Source) -> str:
    """The argument that names a scheme: its name in the library, or its file, written so that it is no option."""
    stem = PurePath(source.name).stem
    if stem in library.names() and library.source(stem) == source:
        return stem
    return f"./{source.name}" if source.name.startswith("-") else source.name


def compile_line(choice: Configuration, files: Files, order: str = "") -> str:
    """The ``chimera compile`` line that compiles this configuration and predicts its time.

    If a search found the configuration's order, ``order`` is the file of that schedule. It stands in the line in place
    of the scheme, its parameters and its clauses. The report compares the schedule with the baseline, which may have
    more operations; so the line may raise the limit on operations.
    """
    words = [as_argument(order)] if order else _scheme_words(choice, files.ties)
    words += ["--profile", as_argument(files.profile), "--cluster", as_argument(files.cluster)]
    words += ["--offload", "auto"] if choice.offload else []
    words += ["--copies", str(choice.copies), "--micro-batch-size", str(choice.micro_batch_size)]
    words += [] if choice.split is None else ["--split", ",".join(map(str, choice.split))]
    words += ["--layout", "replica"] if files.replica_layout else []
    words += ["--shard-optimizer"] if files.sharded_optimizer else []
    limit = max(files.max_operations, 2 * choice.workers * choice.micro_batches)
    words += ["--max-operations", str(limit)] if limit > MAX_OPERATIONS else []
    return f"chimera compile {command_line(words)}"


def _scheme_words(choice: Configuration, ties: Iterable[Tie]) -> list[str]:
    """The words that name a scheme with its parameters, and the clauses that are added to it."""
    words = [as_argument(scheme_argument(choice.source))]
    words += [f"{name}={value}" for name, value in choice.settings]
    words += ["--slice-lengths", ",".join(map(str, choice.known_lengths))] if choice.known_lengths else []
    words += ["--recompute"] if choice.change.recompute else []
    words += ["--sync", choice.change.sync.value] if choice.change.sync else []
    return [*words, *(word for tie in ties for word in ("--tied", ",".join(map(str, tie))))]


def order_file(choice: Configuration, scheme: str) -> str:
    """The name of the file for the order that a search found: that of the scheme and its parameters."""
    return "-".join((scheme, *(f"{name}{value}" for name, value in choice.settings))) + ".sir"
