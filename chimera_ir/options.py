"""Options of the compiler: for Python by `compile`, on the command line by options of the same names."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from operator import index
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import COST_LETTERS, Costs, positive
from chimera_ir.errors import OptionError, ParameterError, UnreadableText
from chimera_ir.escapes import as_argument
from chimera_ir.ir.levels import MAX_LENGTH, MAX_SHARE, Quantity, Strategy
from chimera_ir.ir.ops import Communicators
from chimera_ir.plural import listed
from chimera_ir.request import MAX_OPERATIONS, EqualTimes, Keeping, OfProfile, Request, Tie
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme
from chimera_ir.syntax.formatter import Change

if TYPE_CHECKING:
    from chimera_ir.orders.search import SearchBudget
    from chimera_ir.predict.prediction import Forecast
    from chimera_ir.profile.choose import Inputs

MOST = 10**6
"""The most copies, and the most items of a micro-batch."""

Cost = int | float | str | Fraction
"""A duration as the user writes it; a text may have one for each slice of a micro-batch: ``"2,3,4,5"``."""

STAGE = re.compile(r"[A-Za-z_]\w*(\[[0-9]{1,9}\])?|[0-9]{1,18}", re.ASCII)
_STAGES = re.compile(rf"{STAGE.pattern}|[0-9]{{1,9}}\.\.[0-9]{{1,9}}", re.ASCII)

Spell = Callable[[str], str]
"""Returns the name by which the user knows an option, such as ``--recompute``, given its name in `Options`."""

SEARCHED = (Quantity.ACTIVATIONS.value, Quantity.HOST.value)
"""The quantities of memory that a search can limit."""

_PREDICTING = ("profile", "cluster", "copies", "micro_batch_size", "layout", "split", "shard_optimizer", "require_fit")


class Form(NamedTuple):
    """Values that an option takes: ``says`` describes them to a user who gave another one.

    The command line offers ``choices``, or checks that a number lies within ``bounds``.
    """

    says: str
    has: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    bounds: tuple[int, int | None] | None = None

    def require(self, name: str, value: object) -> None:
        """Raises `OptionError` if an option, which messages call ``name``, does not take this value."""
        _require(self.has(value), name, value, self.says)


class Declared(NamedTuple):
    """An option of the command line that has the field's name, or is called ``word``.

    ``form`` is None for values by name, which methods of `Options` check.
    """

    help: str
    form: Form | None = None
    metavar: str | None = None
    word: str = ""
    repeated: bool = False


def _option(default: Any, help: str, form: Form | None = None, metavar: str | None = None, **more: Any) -> Any:
    """A field of `Options` with what the command line needs to know of it."""
    declared = {"declared": Declared(help, form, metavar, **more)}
    return (
        field(default_factory=dict, metadata=declared) if default is dict else field(default=default, metadata=declared)
    )


def _choice(*names: str, says: str = "", others: Iterable[object] = ()) -> Form:
    known = (*names, *others)
    return Form(says or f"it is one of {', '.join(names)}", lambda value: value in known, choices=names)


def _whole(least: int, most: int | None = None) -> Form:
    says = f"it is a whole number from {least} {'on' if most is None else f'to {most:,}'}"
    return Form(says, lambda value: _is_in(value, most, least), bounds=(least, most))


def _list_of(has: Callable[[Any], bool], says: str) -> Form:
    def has_all(values: Any) -> bool:
        return isinstance(values, Sequence) and not isinstance(values, str | bytes) and all(map(has, values))

    return Form(says, has_all)


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST


def _is_path(value: object) -> bool:
    return isinstance(value, str | PathLike)


def _is_tie(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    named = (isinstance(stage, str) and STAGE.fullmatch(stage) for stage in value)
    return len(value) > 1 and all(name or _is_in(stage, least=0) for name, stage in zip(named, value, strict=True))


WHOLE = _whole(1, MOST)
FLAG = Form("it is True or False", lambda value: isinstance(value, bool))
_FILE = Form("it is the path of a file", _is_path)
_SECONDS = Form(f"it is a number of seconds, up to {MOST:,}", _is_seconds)
_LAYERS = _list_of(lambda layer: type(layer) is int, "it is a list of layers, as in [0, 9, 17, 25]")
_DIRECTORIES = _list_of(_is_path, "it is a list of directories")
_TIES = _list_of(_is_tie, 'write groups of stages, by number or name, as in [("first", "last"), ("image[0]", 3)]')
_LENGTHS = Form(
    "it is a list of whole numbers from 1 on, as in [640, 512, 448, 448], or 'equal-times'",
    lambda value: (
        value == EqualTimes.EQUAL_TIMES.value
        or (isinstance(value, list | tuple) and all(_is_in(length, MAX_LENGTH) for length in value))
    ),
)


def keeping(stages: str, share: str) -> Keeping:
    """The share of M_a that stages keep, as a user wrote both; raises `ValueError`, in words for the user."""
    if not _STAGES.fullmatch(stages):
        raise ValueError(
            f"stages are a number, first, last, a range A..B up to B - 1, GROUP or GROUP[2], not '{stages[:40]}'"
        )
    value = positive(f"the share of stage {stages}", share, "a stage without a backward is `frozen`, and keeps nothing")
    if value > MAX_SHARE:
        raise ValueError(f"the share of stage {stages} is at most {MAX_SHARE:,}")
    return Keeping(stages, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a compilation: changes of the scheme, durations of operations, a limit on the size.

    A prediction needs ``profile``, ``cluster`` and ``micro_batch_size`` together; ``report`` is then in seconds.

    Attributes
    ----------
    costs, stage_costs
        Costs of the kinds F, B, I and W, per micro-batch as in ``{"B": 2.5}`` or ``{"B": "5/3"}``, for each of its
        slices as in ``{"F": [2, 3, 4, 5]}``, on a group of stages as in ``{"image.F": "1/4"}``; on each stage, where
        stages cost unequally, as ``stage_costs``.
    keep
        Shares of M_a that stages keep of a micro-batch, as in ``{0: "1/4"}`` or ``{"first": 0.25, "2..4": 2}``, where
        a range is half open; 1 by default. ``"profile"`` takes them from the profile: M_a is what the largest stage
        keeps.
    slice_lengths
        The relative lengths of the slices of a micro-batch, as in ``[640, 512, 448, 448]``; by default all are equal.
        With ``"equal-times"`` the profile says with which lengths all take about as long.
    recompute
        Whether every stage keeps only its input, and runs its forward again.
    offload
        ``"auto"`` adds moves of activations to the host and back. Workers then keep as few activations as they can
        without waiting for a transfer; if a bound on activations is declared, they keep no more than that.
    sync
        When every stage's gradients are summed: ``"lazy"``, ``"eager"`` or ``"eager_opt"``.
    tied
        Groups of stages that share parameters, by number, ``"first"`` or ``"last"``, as in ``[("first", "last")]``;
        they are those that the model file's ``tied`` has.
    communicators
        Communicators with which the program must finish where messages are matched by their order, as NCCL does:
        ``"directed"``, the default, is one per directed pair of workers, ``"pair"`` one for both directions.
    profile, cluster
        Paths of the files that say what the model's stages cost and what the model runs on.
    copies, micro_batch_size
        W, how often the pipelines are replicated, 1 by default, and B, the items of a micro-batch.
    layout
        Which ranks share a node: those of a ``"pipeline"``, which is the default, or of a ``"replica"``.
    shard_optimizer
        Whether the replicas of a stage share the optimizer's state, as with ``--shard-optimizer`` of train.py.
    split
        The first layer of each stage, for a profile of layers; by default the slowest stage is as fast as possible.
    require_fit
        Whether a program that lacks memory on a worker, and every level made of it, is refused with `DoesNotFit`.
    against
        What the report compares with, in place of the library's baseline or, after a search, of the order before it: a
        scheme's name, the path of a .chim, .sir or .csv file, or a `Source`; for as many workers and micro-batches.
    max_operations
        The most compute operations of a scheme, a text or a baseline; a larger one is refused.
    search, seed
        Seconds in which a search looks for the best order of the operations, and the seed of all chance in it;
        placement and pipes are kept. It needs OR-Tools.
    memory
        Limits of every worker in the search, in place of those that the text declares: ``{"activations": 4}`` in
        micro-batches, or ``"host"`` for values in host memory.
    library
        Directories of further schemes, in addition to those in the environment variable CHIMERA_LIBRARY.

    Raises `OptionError` if an option has a value that it cannot have.
    """

    costs: Mapping[str, Cost | Sequence[Cost]] = _option(
        dict,
        f"Cost of {listed(COST_LETTERS, 'or')} per micro-batch, of each slice: F=2,3, or on a group: image.F=1/4.",
        metavar="KIND=VALUE",
        word="cost",
        repeated=True,
    )
    stage_costs: Mapping[str, Sequence[Cost]] = _option(
        dict,
        "Cost of a kind per micro-batch on each stage, where stages cost unequally: F=4,4,5,6.",
        metavar="KIND=V,V,..",
        word="stage-cost",
        repeated=True,
    )
    keep: Mapping[int | str, Cost] | Literal["profile"] = _option(
        dict,
        "Share of M_a that stages (a number, A..B, a name) keep: image=1/4; or profile: by their bytes [default: 1].",
        metavar="STAGE=SHARE",
        repeated=True,
    )
    slice_lengths: Sequence[int] | Literal["equal-times"] = _option(
        (), "Relative lengths of the slices, or equal-times by the profile [default: equal].", _LENGTHS, "L,L,.."
    )
    recompute: bool = _option(False, "Every stage keeps only its input, and runs its forward again.", FLAG)
    offload: Literal["auto"] | None = _option(
        None,
        "Move activations to the host and back so that workers keep the least and wait for no transfer.",
        _choice("auto", says="it is auto"),
        "auto",
    )
    sync: Literal["lazy", "eager", "eager_opt"] | Strategy | None = _option(
        None, "When every stage's gradients are summed.", _choice(*(mode.value for mode in Strategy), others=Strategy)
    )
    tied: Sequence[Sequence[int | str]] = _option(
        (),
        "Stages that share parameters, as the model's tied() says: by number, first or last.",
        _TIES,
        "STAGE,STAGE",
        repeated=True,
    )
    communicators: Literal["directed", "pair"] | None = _option(
        None,
        "Of messages on NCCL: one for each direction between two workers, or for both [default: directed].",
        _choice(*(choice.value for choice in Communicators)),
    )
    profile: str | PathLike[str] | None = _option(
        None, "What the model's stages cost; the report is then in seconds, with a prediction.", _FILE, "FILE"
    )
    cluster: str | PathLike[str] | None = _option(None, "What the model runs on.", _FILE, "FILE")
    copies: int | None = _option(None, "Copies of the pipelines [default: 1].", WHOLE, "W")
    micro_batch_size: int | None = _option(None, "Items of a micro-batch.", WHOLE, "B")
    layout: Literal["pipeline", "replica"] | None = _option(
        None, "Which ranks share a node [default: pipeline].", _choice("pipeline", "replica")
    )
    shard_optimizer: bool = _option(
        False, "The replicas of a stage share the optimizer's state, as train.py's do.", FLAG
    )
    split: Sequence[int] | None = _option(
        None,
        "First layer of each stage, for a profile of layers [default: the slowest stage is the fastest].",
        _LAYERS,
        "0,L,..",
    )
    require_fit: bool = _option(False, "Print and write nothing if a worker lacks memory: exit status 3.", FLAG)
    against: str | PathLike[str] | Source | None = _option(
        None, "What the report compares with, at the same size [default: 1F1B with a flush].", metavar="SCHEME"
    )
    max_operations: int = _option(MAX_OPERATIONS, "Limit on the size.", _whole(1), "COUNT")
    search: float | None = _option(
        None, "Search for the best order of the operations, as chimera search does.", _SECONDS, "SECONDS"
    )
    seed: int = _option(0, "Seed of all chance in a search.", _whole(0, 2**31 - 1), "S")
    memory: Mapping[str, int] = _option(
        dict,
        "Limit of each worker in a search, in micro-batches: activations=4.",
        metavar="QUANTITY=LIMIT",
        repeated=True,
    )
    library: Sequence[str | PathLike[str]] = _option(
        (), "A directory of further schemes, beside those of CHIMERA_LIBRARY.", _DIRECTORIES, "DIR", repeated=True
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            form, value = option.metadata["declared"].form, getattr(self, option.name)
            if form is not None and not (value is None and option.default is None):
                form.require(option.name, value)
        self.cost_model()
        self.keepings()
        self.limits()

    def words(self, *names: str) -> Iterator[str]:
        """Yields the words of a command line that give these options, without those that have their default."""
        by_name = {option.name: option for option in fields(self)}
        for name in names:
            option, value = by_name[name], getattr(self, name)
            declared: Declared = option.metadata["declared"]
            if value == option.default:
                continue
            for given in value if declared.repeated else [value]:
                yield f"--{declared.word or name.replace('_', '-')}"
                yield from [] if given is True else [_as_word(given)]

    def cost_model(self) -> Costs:
        """The costs, exactly as they were written."""
        costs = Costs()
        forms = ("costs", '{"F": 1, "B": 2.5}', "slice"), ("stage_costs", '{"F": [4, 4, 5, 6]}', "stage")
        for name, example, part in forms:
            for kind, text in _cost_texts(name, getattr(self, name), example, part):
                try:
                    group, _, letter = kind.rpartition(".")
                    if group:
                        costs = costs.using_group(group, letter, text)
                    else:
                        costs = costs.using(kind, text) if part == "slice" else costs.using_stages(kind, text)
                except ValueError as error:
                    raise OptionError(f"{name}: {error}") from error
        return costs

    def keepings(self) -> tuple[Keeping, ...] | OfProfile:
        """The shares of M_a that stages keep, exactly as they were written."""
        if self.keep == OfProfile.PROFILE.value:
            return OfProfile.PROFILE
        says = "write them as in {0: '1/4'}, or 'profile'"
        _require(isinstance(self.keep, Mapping), "keep", self.keep, says)
        given = list[Keeping]()
        for stages, share in self.keep.items():
            _require(isinstance(share, Cost) and not isinstance(share, bool), f"keep[{stages!r}]", share, says)
            try:
                given.append(keeping(str(stages), str(share)))
            except ValueError as error:
                raise OptionError(f"keep: {error}") from error
        return tuple(given)

    def limits(self) -> tuple[tuple[Quantity, int], ...]:
        """The limits that the search must keep, each as (quantity of memory, limit of every worker)."""
        says = 'write them as in {"activations": 4}'
        _require(isinstance(self.memory, Mapping), "memory", self.memory, says)
        for name, limit in self.memory.items():
            _require(name in SEARCHED, "memory", name, f"a search keeps limits of {' and '.join(SEARCHED)}")
            _require(_is_in(limit), f"memory[{name!r}]", limit, "it is a whole number from 1 on")
        return tuple((Quantity(name), limit) for name, limit in self.memory.items())

    def budget(self, spell: Spell = str) -> "SearchBudget | None":
        """How long and with which seed to search; None without a search, for which options of one must not be given."""
        if self.search is not None:
            from chimera_ir.orders.search import SearchBudget

            return SearchBudget(self.search, self.seed)
        if conflicting := self.memory or self.seed:
            name = "memory" if conflicting is self.memory else "seed"
            raise OptionError(f"{spell(name)}: it is for a search; add {spell('search')}")
        return None

    def ties(self) -> tuple[Tie, ...]:
        """The groups of stages that share parameters."""
        return tuple(tuple(tie) for tie in self.tied)

    def request(self, source: Source, settings: Mapping[str, int], spell: Spell = str) -> Request:
        """The request to compile ``source`` with these ``settings`` of parameters; reads the files of a prediction.

        Raises `ParameterError` if a text other than a scheme is given parameters, `OptionError` if options do not go
        together or with the text, and `UnreadableText` or `TextError` for the files that they name.
        """
        if not source.is_scheme and settings:
            raise ParameterError(f"{source.name} has no parameters to set; set them when you compile its scheme")
        change = Change(self.recompute, Strategy(self.sync) if self.sync else None)
        if not source.is_scheme and change != Change():
            names = f"{spell('recompute')}, {spell('sync')}"
            raise OptionError(f"{names}: {source.name} says both itself; ask for them when you compile its scheme")
        if source.is_ir and self.tied:
            raise OptionError(f"{spell('tied')}: an IR text says itself which stages are tied, in its header")
        if source.is_ir and self.keep:
            raise OptionError(
                f"{spell('keep')}: an IR text says itself what stages keep, in its header: `keep 1/4 0..2`"
            )
        budget = self.budget(spell)
        if self.search is not None and self.offload:
            names = f"{spell('search')}, {spell('offload')}"
            raise OptionError(f"{names}: search first, then give the schedule that was found to {spell('offload')}")
        lengths = EqualTimes.EQUAL_TIMES if isinstance(self.slice_lengths, str) else tuple(self.slice_lengths)
        if lengths and not source.is_scheme:
            raise OptionError(f"{spell('slice_lengths')}: {source.name} has its own; give lengths to its scheme")
        if twice := [kind for kind in self.stage_costs if kind in {word.rpartition(".")[2] for word in self.costs}]:
            names = f"{spell('costs')}, {spell('stage_costs')}"
            raise OptionError(f"{names}: both say what {listed(twice)} costs; leave one of them out")
        forecast = self._forecast(spell)
        if self.keepings() is OfProfile.PROFILE and not forecast:
            needed = f"{spell('profile')}, {spell('cluster')} and {spell('micro_batch_size')}"
            raise OptionError(f"{spell('keep')} profile: sizes are those of a profile; add {needed}")
        if lengths is EqualTimes.EQUAL_TIMES and not forecast:
            needed = f"{spell('profile')}, {spell('cluster')} and {spell('micro_batch_size')}"
            raise OptionError(f"{spell('slice_lengths')} {lengths.value}: times are those of a profile; add {needed}")
        if forecast and (self.costs or self.stage_costs):
            names = f"{spell('costs' if self.costs else 'stage_costs')}, {spell('profile')}"
            raise OptionError(f"{names}: both say how long operations take; leave one of them out")
        return Request(
            source,
            settings,
            self.cost_model(),
            self.max_operations,
            change,
            forecast,
            self.ties(),
            self._against(spell),
            Communicators(self.communicators or Communicators.DIRECTED),
            self.require_fit,
            budget,
            self.limits(),
            offload=self.offload == "auto",
            slice_lengths=lengths,
            keep=self.keepings(),
        )

    def _against(self, spell: Spell) -> Source | None:
        try:
            return None if self.against is None else library.named(self.against, self.library)
        except UnreadableText as error:
            raise UnreadableText(f"{spell('against')}: {error}") from error

    def _forecast(self, spell: Spell) -> "Forecast | None":
        given = [name for name in _PREDICTING if getattr(self, name) not in (None, False)]
        if not given:
            return None
        if self.profile is None or self.cluster is None or self.micro_batch_size is None:
            needed = f"{spell('profile')}, {spell('cluster')} and {spell('micro_batch_size')}"
            raise OptionError(f"{', '.join(map(spell, given))}: a prediction needs {needed} together")
        from chimera_ir.predict.prediction import Forecast

        inputs = read_inputs(self.profile, self.cluster, spell)
        split = None if self.split is None else tuple(self.split)
        replicas = self.layout == "replica"
        return Forecast(inputs, self.copies or 1, self.micro_batch_size, replicas, split, self.shard_optimizer)


def compile(text: str | PathLike[str] | Source, /, *, options: Options | None = None, **parameters: int) -> Compilation:
    """Compilation of a text, which makes each level when it is asked for.

    The text is the name of a library scheme, the path of a .chim, .sir or .csv file, or a `Source`; ``parameters``
    replace the defaults of the scheme's parameters, and ``options`` are all else that may be asked for: costs, a
    profile, a limit. Raises `CompileError` if there is no such text, no such parameter or option, or the text cannot be
    read.

    Examples
    --------
    >>> import chimera_ir
    >>> chimera_ir.compile("chimera", D=4, N=8).report.makespan
    Fraction(30, 1)
    >>> chimera_ir.compile("chimera", d=4)
    Traceback (most recent call last):
    ...
    chimera_ir.errors.ParameterError: the scheme has no parameter d (did you mean D?); its parameters are D, N, f
    """
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise OptionError(f"options is {options!r:.60}: write options=chimera_ir.Options(...)")
    settings = {name: integer(name, value) for name, value in parameters.items()}
    compilation = Compilation(options.request(library.named(text, options.library), settings))
    if settings:
        from chimera_ir.elaborate.settings import require_settable

        require_parameters(settings, compilation.scheme)
        require_settable(compilation.scheme, settings)
    return compilation


def integer(name: str, value: object) -> int:
    """The value of a parameter as an integer; raises `ParameterError` for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ParameterError(f"{name} is {value!r:.60}: a parameter is an integer, as in {name}=8") from None


def require_parameters(settings: Mapping[str, object], scheme: Scheme) -> None:
    """Raises `OptionError` if ``settings`` names an option of the compiler, unless ``scheme`` has such a parameter."""
    parameters = {parameter.name.text for parameter in scheme.parameters}
    for option in fields(Options):
        if option.name in settings and option.name not in parameters:
            raise OptionError(f"{option.name} is no parameter but an option: write options=Options({option.name}=...)")


def read_inputs(profile: str | PathLike[str], cluster: str | PathLike[str], spell: Spell) -> "Inputs":
    """A profile and a cluster, read from their files; errors as in `Options.request`."""
    from chimera_ir.profile.choose import Unfit, are_swapped, read_both

    sources = library.read(Path(profile), spell("profile")), library.read(Path(cluster), spell("cluster"))
    try:
        return read_both(*sources)
    except Unfit:
        if not are_swapped(*sources):
            raise
    said = f"{spell('profile')} {profile} is a cluster file, and {spell('cluster')} {cluster} a profile"
    raise OptionError(f"{said}: exchange them")


def _cost_texts(name: str, by_kind: object, example: str, part: str) -> Iterator[tuple[str, str]]:
    """Yields each kind with its costs as the command line has them (``2,3``); ``part`` is what a list has one for."""
    if not isinstance(by_kind, Mapping):
        raise OptionError(f"{name} is {by_kind!r:.60}: write them as in {example}")
    for kind, cost in by_kind.items():
        letter = kind.rpartition(".")[2] if isinstance(kind, str) and part == "slice" else kind
        _require(letter in COST_LETTERS, name, kind, f"the kinds are {', '.join(COST_LETTERS)}")
        costs = cost if isinstance(cost, list | tuple) else [cost]
        are_costs = all(isinstance(value, Cost) and not isinstance(value, bool) for value in costs)
        says = f"it is a number, a text as '5/3', or one for each {part}"
        _require(are_costs and bool(costs), f"{name}[{kind!r}]", cost, says)
        yield kind, ",".join(map(str, costs))


def _as_word(value: object) -> str:
    if isinstance(value, Strategy):
        return value.value
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else as_argument(str(value))


def _require(holds: bool, name: str, value: object, says: str) -> None:
    if not holds:
        raise OptionError(f"{name} is {value!r:.60}: {says}")


def _is_in(value: Any, most: int | None = None, least: int = 1) -> bool:
    return type(value) is int and value >= least and (most is None or value <= most)
