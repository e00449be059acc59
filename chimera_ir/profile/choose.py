"""Selection of the costs that a schedule needs from a profile and a cluster, with errors for what they lack."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from chimera_ir.diagnostics.catalogue import profiles as say
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.errors import TextError, WrongOption
from chimera_ir.ir.graph import NamedStages
from chimera_ir.ir.levels import Header
from chimera_ir.plural import listed
from chimera_ir.profile.cluster import Cluster
from chimera_ir.profile.costs import ModelProfile, StageCosts, WorkProfile, fastest, problem
from chimera_ir.profile.document import TomlPlaces, entries, warnings
from chimera_ir.profile.read import read_cluster, read_profile
from chimera_ir.source import Source, Span

T = TypeVar("T")


class Unfit(TextError):
    """Errors in a profile or a cluster, or in the combination of both."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Requirements of a schedule: costs of its stages at a micro-batch size, and workers for each of its copies.

    ``split`` is the first layer of each stage, for a profile of layers; by default the fastest split is taken.
    ``moves`` is whether operations move activations to the host and back. ``named`` are the groups of the stages, if
    they have names, and ``sources`` the stages that no other feeds.
    """

    stages: int
    workers: int
    copies: int
    micro_batch_size: int
    split: tuple[int, ...] | None = None
    moves: bool = False
    named: tuple[NamedStages, ...] = ()
    sources: tuple[int, ...] = (0,)

    @staticmethod
    def of(header: Header, copies: int, micro_batch_size: int, split: tuple[int, ...] | None = None) -> "Wanted":
        """The requirements of a schedule with this header."""
        sources = tuple(stage for stage, feeding in enumerate(header.feeding) if not feeding)
        where = header.stages, header.workers, copies, micro_batch_size
        return Wanted(*where, split, header.moves, header.named, sources)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A profile and a cluster, with the texts that they were read from."""

    profile_source: Source
    cluster_source: Source
    profile: ModelProfile | WorkProfile
    cluster: Cluster

    def choose(self, wanted: Wanted) -> tuple[StageCosts, ...]:
        """The costs of the stages, in seconds.

        Raises `Unfit` if the profile has no such costs, or the cluster not as many workers. Raises `OptionError` if the
        wanted split does not split the profile's layers.
        """
        timed = self._timed()
        return self._chosen(timed or self.counts, wanted, () if timed else (self._without(say.NoDevice),))

    def choose_sizes(self, wanted: Wanted) -> tuple[StageCosts, ...]:
        """The costs of the stages, in seconds or in FLOP; raises `Unfit` as `choose`, but needs no device."""
        return self._chosen(self.counts, wanted, ())

    def split(self, wanted: Wanted) -> tuple[int, ...] | None:
        """The first layer of each stage, in the wanted split or, if none is wanted, in the fastest one.

        In a profile of stages it is the split that was measured; None if the profile does not say. Raises `OptionError`
        if the wanted split is not possible.
        """
        model = self.of_stages(wanted)
        layers, measured = model.layers, model.splits.get(wanted.stages)
        if not layers and wanted.split not in (None, measured):
            raise WrongOption(
                "split", ": the profile has the costs of stages, and so of one split; it needs one of layers"
            )
        if not layers:
            return measured
        split = wanted.split or fastest(model, wanted.stages, wanted.micro_batch_size)
        wrong = problem(split, wanted.stages, len(layers), model.begins)
        if wrong:
            raise WrongOption("split", f" {','.join(map(str, split))}: {wrong}")
        return split

    def model(self) -> ModelProfile:
        """The profile in seconds; raises `Unfit` if it counts work, and the cluster has no device."""
        timed = self._timed()
        if timed is None:
            raise Unfit(((self.cluster_source, (self._without(say.NoDevice),)),))
        return timed

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings in the files: measured figures that are too uncertain."""
        return (*warnings(self.profile_source), *warnings(self.cluster_source))

    @property
    def counts(self) -> ModelProfile:
        """The profile as it is written: in seconds or in FLOP."""
        return self.profile.counts if isinstance(self.profile, WorkProfile) else self.profile

    def of_stages(self, wanted: Wanted) -> ModelProfile:
        """The profile, as it is written, of stages in the groups that are wanted (`ModelProfile.joined`)."""
        return self.counts.joined(wanted.named, wanted.sources)

    def _chosen(self, written: ModelProfile, wanted: Wanted, unknown: tuple[Diagnostic, ...]) -> tuple[StageCosts, ...]:
        if lacking_groups := tuple(_groups_lack(written, wanted, self.profile_source)):
            raise Unfit(((self.profile_source, lacking_groups),))
        model = written.joined(wanted.named, wanted.sources)
        lacks = _layers_lack(model, wanted, self.profile_source) if model.layers else None
        in_profile = tuple(_lacks(model.depths, wanted, self.profile_source) if lacks is None else lacks)
        lacking = [self._without(say.NoHostLink)] if wanted.moves and self.cluster.host is None else []
        in_cluster = (*_too_small(self.cluster, wanted, self.cluster_source), *lacking, *unknown)
        if in_profile or in_cluster:
            errors = (self.profile_source, in_profile), (self.cluster_source, in_cluster)
            raise Unfit((source, diagnostics) for source, diagnostics in errors if diagnostics)
        return model.stages_in(wanted.stages, self.split(wanted))

    def _without(self, message: type[say.NoDevice] | type[say.NoHostLink]) -> Diagnostic:
        """The error ``message``: that the cluster lacks a table; it is placed at the heading ``[cluster]``."""
        return message(TomlPlaces(self.cluster_source.text).key(("cluster",)))

    def _timed(self) -> ModelProfile | None:
        if isinstance(self.profile, ModelProfile):
            return self.profile
        return self.profile.on(self.cluster.device) if self.cluster.device else None


def read_both(profile_source: Source, cluster_source: Source) -> Inputs:
    """Reads a profile and a cluster from their texts; raises `Unfit` with all errors of both."""
    errors: list[tuple[Source, tuple[Diagnostic, ...]]] = []

    def read(reader: Callable[[Source], T], source: Source) -> T | None:
        try:
            return reader(source)
        except Rejected as rejected:
            errors.append((source, rejected.diagnostics))
            return None

    profile, cluster = read(read_profile, profile_source), read(read_cluster, cluster_source)
    if profile is None or cluster is None:
        raise Unfit(tuple(errors))
    return Inputs(profile_source, cluster_source, profile, cluster)


def are_swapped(profile_source: Source, cluster_source: Source) -> bool:
    """Whether the text given as a profile is a cluster's, and the text given as a cluster is a profile's."""
    try:
        return "cluster" in entries(profile_source) and "model" in entries(cluster_source)
    except Rejected:
        return False


def _lacks(depths: Mapping[int, tuple[StageCosts, ...]], wanted: Wanted, source: Source) -> Iterator[Diagnostic]:
    if wanted.stages not in depths:
        span = TomlPlaces(source.text).key(("depth", 0))
        yield say.NotThatDeep(span, wanted.stages, _listed(depths))
        return
    stages = depths[wanted.stages]
    lacking: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        if wanted.micro_batch_size not in stage.at:
            lacking.setdefault(_listed(stage.at), []).append(number)
    if not lacking:
        return
    places = TomlPlaces(source.text)
    for sizes, (first, *others) in lacking.items():
        name, place, many = _place(first, wanted, source)
        span = places.key(("depth", *place))
        yield say.NotThatSize(span, name, many, wanted.micro_batch_size, sizes, 1 + len(others))


def _place(stage: int, wanted: Wanted, source: Source) -> tuple[str, tuple[int, str, int], int]:
    """A stage as messages name it, the path of its table in a list of depths, and the stages of that depth."""
    group, start, stop = next(
        (group for group in wanted.named if group.start <= stage < group.stop), ("", 0, wanted.stages)
    )
    tables = [(table.get("group", ""), table["stages"]) for table in entries(source)["depth"]]
    if (group, stop - start) not in tables:  # groups of a profile that has none
        group, start, stop = "", 0, wanted.stages
    path = tables.index((group, stop - start)), "stage", stage - start
    return f"{group}[{stage - start}]" if group else f"{stage}", path, stop - start


def _groups_lack(model: ModelProfile, wanted: Wanted, source: Source) -> Iterator[Diagnostic]:
    """Yields what a profile of groups lacks for a schedule: the same groups, as many stages or layers of each."""
    if not model.groups:
        return
    in_layers = any(group.layers for group in model.groups.values())
    span = TomlPlaces(source.text).key(("layer" if in_layers else "depth", 0))
    names, profiled = [name for name, *_ in wanted.named], [*model.groups]
    if {*names} != {*profiled} or (in_layers and names != profiled):
        schedule = f"of {listed(names)}" if names else "a chain without groups"
        yield say.OtherGroups(span, schedule, listed(profiled))
        return
    for name, start, stop in wanted.named:
        group, stages = model.groups[name], stop - start
        if in_layers and stages > len(group.layers):
            yield say.GroupTooDeep(span, name, stages, len(group.layers))
        elif not in_layers and stages not in group.depths:
            yield say.GroupNotThatDeep(span, name, stages, _listed(group.depths))


def _layers_lack(model: ModelProfile, wanted: Wanted, source: Source) -> Iterator[Diagnostic]:
    place = TomlPlaces(source.text).key(("layer", 0))
    if wanted.stages > len(model.layers):
        yield say.TooFewLayers(place, wanted.stages, len(model.layers))
    if wanted.micro_batch_size not in model.sizes:
        yield say.SizeOfNoLayer(place, wanted.micro_batch_size, _listed(model.sizes))


def _too_small(cluster: Cluster, wanted: Wanted, source: Source) -> Iterator[Diagnostic]:
    needed = wanted.copies * wanted.workers
    if needed > cluster.workers:
        span: Span = TomlPlaces(source.text).value(("cluster", "workers"))
        yield say.ClusterTooSmall(span, wanted.copies, wanted.workers, needed, cluster.workers)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
