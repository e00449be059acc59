"""Prediction of a program's time and memory on a cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import le, sub
from sys import maxsize
from typing import NamedTuple

from chimera_ir.cost.curves import WorkerBytes
from chimera_ir.cost.number_text import number, rounded, seconds
from chimera_ir.cost.report import group_entries
from chimera_ir.errors import DoesNotFit, WrongOption
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.memory_bounds import Quantity
from chimera_ir.ir.streams import ProgramStream, ScheduleStream, view_of
from chimera_ir.lower.lower import lower
from chimera_ir.plural import counted
from chimera_ir.predict.equation import Equation, equation
from chimera_ir.predict.free_memory import bounded
from chimera_ir.predict.measured import Measured
from chimera_ir.predict.memory_need import MemoryNeed, memory, memory_of, worker_bytes
from chimera_ir.predict.replay import Replay, expected, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.predict.splits import LayerSplits, Split, loads_of
from chimera_ir.profile.choose import Inputs, Wanted
from chimera_ir.profile.cluster import torchrun
from chimera_ir.profile.layers import stages_of
from chimera_ir.verify.holdings import holdings


@dataclass(frozen=True, slots=True, repr=False)
class Prediction:
    """Time and memory of an iteration, or of an update of the steady state, in seconds and bytes.

    The time is given twice: by equation 1, and by a replay of the program. ``expected`` is the mean time of many
    updates that follow one another if times scatter as in the profile; None if the profile has no noise. ``memory`` is
    what each worker needs. An iteration or update trains on ``items`` items. ``warnings`` are those about the profile
    and the cluster file.
    """

    setting: Setting
    equation: Equation
    replay: Replay
    expected: float | None
    memory: tuple[MemoryNeed, ...]
    items: int
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Prediction of {self.replay.header.title}: {seconds(self.replay.seconds)} by replay>"

    @property
    def throughput(self) -> float:
        """Items per second, by equation 1."""
        return self.items / self.equation.seconds

    @property
    def replayed_throughput(self) -> float:
        """Items per second, by the replay."""
        return self.items / self.replay.seconds

    @property
    def available(self) -> int:
        """Bytes that a worker has for the model."""
        return self.setting.cluster.memory - self.setting.cluster.reserved

    def require_fit(self, text: str) -> None:
        """Raises `DoesNotFit`, which calls the program ``text``, if a worker needs more memory than it has."""
        needs = [need.total for need in self.memory]
        if (most := max(needs)) > self.available:
            raise DoesNotFit(text, needs.index(most), most, self.available)

    def bytes_of(self, worker: int) -> WorkerBytes:
        """Bytes of a worker: all that it needs but activations, and those that a micro-batch takes (`worker_bytes`)."""
        return worker_bytes(self.replay.header, self.setting, worker, self.memory[worker])

    def as_json(self) -> dict[str, object]:
        """The prediction in the shape of ``prediction`` in report.json."""
        terms = self.equation
        noisy = {} if self.expected is None else {"T_expected": self.expected}
        hosted = [need.host for need in self.memory]
        return rounded(
            {
                "F_t": terms.forward,
                "B_t": terms.backward,
                "C_f": number(terms.forwards),
                "C_b": number(terms.backwards),
                **{f"{term.kind}_t": term.seconds for term in terms.further},
                **{f"C_{term.kind.lower()}": number(term.count) for term in terms.further},
                "Comm_p2p": terms.p2p,
                "Comm_allreduce": list(terms.all_reduce),
                "free_regions": [
                    [{**group_entries(region.group), "region": region.seconds} for region in regions]
                    for regions in terms.regions
                ],
                "Comm_unoverlapped": list(terms.unoverlapped),
                "T": terms.seconds,
                "T_replay": self.replay.seconds,
                **noisy,
                "throughput": self.throughput,
                "throughput_replay": self.replayed_throughput,
                "memory": [need.total for need in self.memory],
                "memory_available": self.available,
                **({"host_memory": hosted} if any(hosted) else {}),
                "optimizer_state": [need.optimizer for need in self.memory],
                "copies": self.setting.copies,
                "micro_batch_size": self.setting.micro_batch_size,
                "warnings": list(self.warnings),
            }
        )


class BaselinePrediction(NamedTuple):
    """The prediction for a report's baseline: replayed seconds of an update, and bytes of the fullest worker."""

    seconds: float
    memory: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """The conditions of a prediction, from which a `Setting` follows once the program's stages are known.

    ``inputs`` are the profile and the cluster, ``copies`` is W. ``split`` has the first layer of each stage; if it is
    None, the fastest split is taken. ``replica_layout`` and ``sharded_optimizer`` are as in `Setting`.
    """

    inputs: Inputs
    copies: int
    micro_batch_size: int
    replica_layout: bool
    split: tuple[int, ...] | None = None
    sharded_optimizer: bool = False

    def torchrun(self, workers: int, script: str, split: tuple[int, ...] | None) -> str:
        """The command line that starts ``script`` for the predicted run; a copy of it has ``workers`` workers."""
        per_node = self.inputs.cluster.per_node
        ranks, more = self.copies * workers, (self.sharded_optimizer, self.inputs.counts.file)
        return torchrun(ranks, per_node, script, self.micro_batch_size, self.replica_layout, split, *more)

    def split_of(self, header: Header) -> tuple[int, ...] | None:
        """The first layer of each stage, as the user asked or else as is fastest; None if the profile has no layers."""
        return self.inputs.split(self._wanted(header))

    def within_bounds(self, level: Schedule | ScheduleStream | Program | ProgramStream) -> "Forecast":
        """The forecast with the fastest split of the profile's layers that keeps declared bounds in bytes.

        This forecast is returned if it has a split, if the profile has no layers, or if no split keeps the bounds.
        ``level`` is a program, or a verified schedule.
        """
        header, layers = level.header, self.inputs.counts.layers
        if self.split or not layers or not any(bound.quantity is Quantity.BYTES for bound in header.bounds):
            return self
        # What is kept does not depend on the durations with which a schedule is lowered.
        program = level if isinstance(level, Program | ProgramStream) else lower(level)
        held, room = tuple(holdings(view_of(program))), header.limits(Quantity.BYTES, maxsize)

        def needed(split: Split | None) -> list[int]:
            setting = replace(self, split=split)._setting(header)
            return [need.total for need in memory_of(header, setting, held)]

        if all(map(le, needed(None), room)):
            return self
        splits = LayerSplits(layers, header, self.micro_batch_size, self.copies, self.sharded_optimizer)
        candidates = splits.candidates(room, lambda: loads_of(header, held), needed)
        fitting = (split for split in candidates if all(map(le, needed(split), room)))
        return replace(self, split=next(fitting, None))

    def _wanted(self, header: Header) -> Wanted:
        sizes = header.stages, header.workers, self.copies, self.micro_batch_size
        return Wanted(*sizes, self.split, moves=header.moves)

    def durations(self, header: Header) -> Measured:
        """Durations, from the profile, of the operations of a program or schedule with this header.

        Raises `Unfit` if the profile has no costs for them, or the cluster too few workers. Raises `OptionError` if
        ``sharded_optimizer`` is set for a schedule without a flush, inside which stages step.
        """
        return Measured.of(self._setting(header))

    def equal_times(self, header: Header) -> tuple[int, ...]:
        """The lengths of slices that take equally long, as `Setting.equal_times` finds them.

        They add up to the length of an item, or to a round number if the profile does not have it. Raises `WrongOption`
        if the profile has no costs of slices, and the errors of `durations`.
        """
        setting, length = self._setting(header), self.inputs.counts.positions
        if not setting.slices_known:
            measures = f"chimera profile stages --slices {header.slices} measures them"
            raise WrongOption("slice_lengths", f" equal-times: the profile has no costs of slices; {measures}")
        if length < header.slices:
            items, cut = counted(length, "position"), counted(header.slices, "slice")
            raise WrongOption("slice_lengths", f" equal-times: an item of the profile has {items}, too few for {cut}")
        return setting.equal_times(header.slices, length)

    def _setting(self, header: Header) -> Setting:
        if self.sharded_optimizer and header.steps_inside:
            lacks = "no flush, and its stages step inside the schedule, which leaves no place to gather their weights"
            raise WrongOption("shard_optimizer", f": {header.scheme} has {lacks}")
        stages, cluster = self.inputs.choose(self._wanted(header)), self.inputs.cluster
        return Setting(stages, cluster, self.copies, self.micro_batch_size, self.replica_layout, self.sharded_optimizer)

    def baseline(self, program: Program, like: Header) -> BaselinePrediction | None:
        """The prediction for a verified program that trains the same model as one with the header ``like``.

        None if there is no setting for it.
        """
        setting = self.setting_of_baseline(program.header, like)
        if setting is None:
            return None
        fullest = max(need.total for need in memory(program, setting))
        return BaselinePrediction(replay(program, setting).seconds, fullest)

    def setting_of_baseline(self, header: Header, like: Header) -> Setting | None:
        """The setting of a program with ``header`` that trains the same model as one with the header ``like``.

        The profile has costs for the stages of ``like``. If the program has fewer stages, each consists of an equal
        number of these in a row; the result is None if there is no such number.
        """
        larger, rest = divmod(like.stages, header.stages)
        if rest:
            return None
        setting = self._setting(like)
        return replace(setting, stages=stages_of(setting.stages, range(0, like.stages, larger)))

    def needs(self, program: Program) -> Mapping[Quantity, Sequence[int]]:
        """The bytes that each worker of a verified program needs, in its own memory and in that of its host.

        Raises the errors of `durations`.
        """
        needs = memory(program, self._setting(program.header))
        return {
            Quantity.BYTES: [need.total for need in needs],
            Quantity.HOST_BYTES: [need.host for need in needs],
        }

    def with_room(self, schedule: Schedule) -> Schedule:
        """Returns the verified schedule with a bound on each worker's activations: no more than its memory holds.

        What the schedule itself keeps is always allowed. A schedule with moves to the host is returned as it is. Raises
        the errors of `durations`.
        """
        header, setting = schedule.header, self._setting(schedule.header)
        if header.moves:
            return schedule
        available = setting.cluster.memory - setting.cluster.reserved
        room = header.limits(Quantity.BYTES, available)
        needs = memory(view_of(lower(schedule)), setting)
        return bounded(schedule, setting, map(sub, room, (need.total for need in needs)))

    def of(self, program: Program) -> Prediction:
        """The prediction for a verified program; raises the errors of `durations`."""
        header, setting = program.header, self._setting(program.header)
        items = header.whole_micro_batches * self.micro_batch_size * self.copies
        return Prediction(
            setting=setting,
            equation=equation(program, setting),
            replay=replay(program, setting),
            expected=expected(program, setting) if setting.noisy else None,
            memory=memory(program, setting),
            items=items,
            warnings=self.inputs.warnings,
        )
