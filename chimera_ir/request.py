"""A request to the compiler: a text, its parameters and options."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from chimera_ir.cost.durations import Costs, stage_shares
from chimera_ir.errors import AboveMaxOperations, NoSuchTie, TooLarge, WrongOption
from chimera_ir.ir.graph import NamedStages, stages_called
from chimera_ir.ir.levels import MAX_PIPES, MAX_SHARE, MAX_WORKERS, Header, Quantity, normalized
from chimera_ir.ir.ops import Communicators, Stage, WeightGroup
from chimera_ir.ir.streams import Level, ProgramStream, ScheduleStream
from chimera_ir.plural import counted
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme
from chimera_ir.syntax.formatter import Change

if TYPE_CHECKING:
    from chimera_ir.orders.search import SearchBudget
    from chimera_ir.predict.prediction import Forecast

MAX_OPERATIONS = 1_000_000
"""The most compute operations of a scheme, unless the user raises the limit."""

MAX_HEADERS = MAX_WORKERS + MAX_PIPES + 1_000
"""The most headings and lines of a header that an IR text may have."""


class EqualTimes(Enum):
    """The choice of lengths of slices that take about the same time, by the profile."""

    EQUAL_TIMES = "equal-times"


Tie = tuple[int | str, ...]
"""Stages that share parameters, as the user writes them: by number, ``"first"``, ``"last"`` or ``"image[1]"``."""


class OfProfile(Enum):
    """The choice of what stages keep of M_a by the profile: M_a is then what the largest stage keeps."""

    PROFILE = "profile"


class Keeping(NamedTuple):
    """The ``share`` of M_a that stages keep of a micro-batch, as the user writes it.

    ``stages`` are one or several, called as in `stages_called`.
    """

    stages: str
    share: Fraction


@dataclass(frozen=True, slots=True)
class Request:
    """A text, the parameters and clauses that the user set, durations, and a limit on its size; see `Options`.

    Durations come from the ``forecast`` or, without it, from ``costs``. The report compares with the text ``against``;
    without that, with the library's baseline or, after a search, with the order before it. The ``limits`` of a search
    take the place of those that the text declares. Micro-batches have the weights of the header ``like``, the same
    stages are frozen, and stages keep as much of M_a, unless the text itself, or ``keep``, says otherwise.
    """

    source: Source
    settings: Mapping[str, int] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)
    max_operations: int = MAX_OPERATIONS
    change: Change = field(default_factory=Change)
    forecast: "Forecast | None" = None
    ties: tuple[Tie, ...] = ()
    against: Source | None = None
    communicators: Communicators = Communicators.DIRECTED
    require_fit: bool = False
    search: "SearchBudget | None" = None
    limits: tuple[tuple[Quantity, int], ...] = ()
    like: Header | None = None
    offload: bool = False
    slice_lengths: "tuple[int, ...] | EqualTimes" = ()
    keep: tuple[Keeping, ...] | OfProfile = ()

    @property
    def cost_model(self) -> "Forecast | Costs":
        """The source of durations: the forecast, or fixed costs."""
        return self.forecast or self.costs

    @property
    def opposes(self) -> bool:
        """Whether the report compares with another schedule than the library's baseline."""
        return self.against is not None or self.search is not None


def groups(ties: Iterable[Tie], stages: int, named: Sequence[NamedStages] = ()) -> tuple[WeightGroup, ...]:
    """The weight groups that the ties make in a scheme of ``stages`` stages, sorted, each once.

    Stages in groups may be called by the names of ``named``.

    A tie of the first and the last stage is left out if the scheme has a single stage. Raises `NoSuchTie` if a stage of
    a tie is missing, or a tie has fewer than two.
    """
    across = (tie for tie in ties if not (stages == 1 and {"first", "last"} <= {*tie} <= {"first", "last", 0}))
    return tuple(sorted({_group(tie, stages, named) for tie in across}))


def _group(tie: Tie, stages: int, named: Sequence[NamedStages]) -> WeightGroup:
    called = [stages_called(f"{stage}", stages, named) for stage in tie]
    numbers = {number for of_word in called for number in of_word}
    text = ",".join(map(str, tie))
    if not all(len(of_word) == 1 for of_word in called):
        raise NoSuchTie(text, f"the scheme has {_known(stages, named)}")
    if len(numbers) < 2:
        raise NoSuchTie(text, "a tie is of two stages or more")
    return tuple(map(Stage, sorted(numbers)))


def _known(stages: int, named: Sequence[NamedStages]) -> str:
    groups = ", ".join(f"{name}[0] to {name}[{stop - start - 1}]" for name, start, stop in named)
    return f"the stages 0 to {stages - 1}" + (f", which are {groups}" if groups else "")


def with_lengths(request: Request, header: Header) -> Header:
    """The header with the lengths of slices that are asked for; raises `WrongOption` if they do not fit."""
    lengths = request.slice_lengths
    if not lengths:
        return header
    if header.slices == 1:
        raise WrongOption("slice_lengths", f": a micro-batch of {header.title} is not cut into slices")
    if isinstance(lengths, EqualTimes):
        assert request.forecast is not None, "`Options.request` asks for a profile"
        return replace(header, lengths=request.forecast.equal_times(header))
    if len(lengths) != header.slices:
        count, cut = counted(len(lengths), "length"), counted(header.slices, "slice")
        text = ",".join(map(str, lengths))
        raise WrongOption("slice_lengths", f" {text}: these are {count}, and a micro-batch of {header.title} has {cut}")
    return replace(header, lengths=normalized(lengths))


def with_shares(request: Request, header: Header) -> Header:
    """The header with the shares of M_a that stages keep: its own, or those asked for, or those of the model of `like`.

    Raises `WrongOption` for a share of a stage that the header does not have, or that has a share already.
    """
    like, stages = request.like, header.stages
    if isinstance(request.keep, OfProfile):
        assert request.forecast is not None, "`Options.request` asks for a profile"
        return replace(header, shares=request.forecast.shares(header))
    if request.keep:
        shares = dict[int, Fraction]()
        for text, share in request.keep:
            called, given = stages_called(text, stages, header.named), f" {text}={share}"
            if not called:
                raise WrongOption("keep", f"{given}: {header.title} has {_known(stages, header.named)}")
            if twice := [stage for stage in called if stage in shares]:
                raise WrongOption("keep", f"{given}: the share of stage {header.stage_name(twice[0])} is given twice")
            shares |= dict.fromkeys(called, share)
        of_stages = [shares.get(stage, Fraction(1)) for stage in range(stages)]
        if (common := lcm(*(share.denominator for share in of_stages))) > MAX_SHARE:
            raise WrongOption("keep", f": the shares have the common denominator {common:,}, more than {MAX_SHARE:,}")
        return replace(header, shares=tuple(of_stages) if {*of_stages} != {1} else ())
    if like is None or not like.shares or header.shares:
        return header
    cut, size = stage_shares(like.stages, stages), Fraction(stages, like.stages)
    return replace(header, shares=tuple(sum(like.shares[old] * part for old, part in parts) * size for parts in cut))


def parsed(request: Request) -> Scheme | Level:
    """The scheme with its changes, or the level of another text; raises `TooLarge` or `Rejected`."""
    source, most = request.source, request.max_operations
    if source.is_csv:
        from chimera_ir.torch_text.csv_reader import count_cells
        from chimera_ir.torch_text.csv_reader import parse as parse_csv

        if (cells := count_cells(source.text)) > most:
            raise AboveMaxOperations("the text", cells, most)
        return parse_csv(source, lambda stages: groups(request.ties, stages))
    if source.is_scheme:
        from chimera_ir.syntax.parser import parse as parse_scheme

        scheme = parse_scheme(source)
        if request.change.unmet_by(scheme):
            raise WrongOption(
                "recompute",
                f": {source.name} moves activations to the host; leave the option out, or take a scheme without moves",
            )
        return request.change.of(scheme)
    # Lines are counted before the text is parsed, as parsing takes time in proportion to them.
    from chimera_ir.ir.text.reader import count_lines, parse

    operations, headers = count_lines(source.text)
    if operations > most:
        raise AboveMaxOperations("the text", operations, most)
    if headers > MAX_HEADERS:
        raise TooLarge(f"the text has {headers:,} headings and lines of a header, and the limit is {MAX_HEADERS:,}")
    level = parse(source)
    if isinstance(level, ScheduleStream | ProgramStream) and level.operations > most:
        shown = "what shows the turns of the text, warm-up and drain included,"
        raise AboveMaxOperations(shown, level.operations, most)
    return level
