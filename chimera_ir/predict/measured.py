"""Durations of operations from a profile. Messages take no time in a timeline (section 2); a replay adds theirs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from math import lcm

from chimera_ir.cost.number_text import Unit
from chimera_ir.cost.stage_shares import StagePart, stage_shares
from chimera_ir.ir.ids import Stage
from chimera_ir.ir.kinds import COSTED, KINDS, PAIR, Kind, Pairing
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, Operation, Pair, singles
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.costs import time_of


@dataclass(frozen=True, slots=True)
class Measured:
    """Durations of operations in a setting: on a cluster, with the costs that a profile has for its stages.

    ``cut[s]`` lists the stages of the profile that make up stage s, each with the share of it that belongs to s.
    """

    setting: Setting
    cut: tuple[tuple[StagePart, ...], ...]

    @staticmethod
    def of(setting: Setting) -> "Measured":
        """Durations for a schedule that has the stages of the profile."""
        return Measured(setting, stage_shares(len(setting.stages), len(setting.stages)))

    def duration(self, operation: Operation, header: Header) -> Fraction:
        """Seconds of an operation on its stage, for all its micro-batches; for a pair, the time of both together."""
        if isinstance(operation, Pair):
            joint = self.setting.joint(operation, header)
            alone = (self.duration(part, header) for part in operation.parts)
            return sum(alone, _ZERO) if joint is None else _exact(joint[0]) * joint[1]
        parts = self.cut[operation.stage]
        if len(parts) == 1 and parts[0][1] == 1:
            return self._whole(parts[0][0], operation, header)
        return sum((share * self._whole(stage, operation, header) for stage, share in parts), _ZERO)

    def _whole(self, stage: Stage, operation: Compute, header: Header) -> Fraction:
        terms = self.setting.compute(stage, operation, header)
        return sum((_exact(seconds) if times == 1 else _exact(seconds) * times for seconds, times in terms), _ZERO)

    def tick(self, header: Header) -> Fraction:
        """Returns a unit of time such that the durations of all operations, of every size, are multiples of it."""
        stages = self.setting.stages
        whole = [timing for stage in stages for timing in stage.at.values()]
        timings = [*whole, *(part for timing in whole for part in timing.slices)]
        times = [timing.seconds(kind) for timing in timings for kind in KINDS]
        times += [time_of(stage.overhead, kind) for stage in stages for kind in KINDS]
        moves = [kind for kind in header.kinds if kind.moves]
        transfers = (self.setting.transfer(stage, kind) for stage in range(len(stages)) for kind in moves)
        times += chain.from_iterable(transfers)
        times += [timing.times[PAIR.letter] for timing in timings if PAIR.letter in timing.times]
        second = lcm(*(_exact(time).denominator for time in times))
        stage_size = lcm(*(share.denominator for parts in self.cut for _, share in parts))
        return Fraction(1, second * stage_size * header.parts * header.weight_unit)

    def recut(self, stages: int, into: int) -> "Measured":
        """Durations of the same model if the ``stages`` stages of the profile become ``into`` stages of equal size."""
        return Measured(self.setting, stage_shares(stages, into))

    def report_costs(self, header: Header, path: Sequence[Operation]) -> tuple[tuple[str, Fraction], ...]:
        """The mean cost per micro-batch (of weight 1) for each kind of operation on ``path``, with the kind's letter.

        The length of ``path`` is the sum of these means, each multiplied by the kind's number of micro-batches on the
        path.
        """
        means = []
        for letter in COSTED:
            operations = [operation for operation in path if operation.kind.letter == letter]
            if operations:
                micro_batches = Fraction(sum(map(header.weight, operations)), header.parts)
                total = sum((self.duration(operation, header) for operation in operations), _ZERO)
                means.append((letter, total / micro_batches))
        return tuple(means)

    def for_baseline(self, splits: bool) -> "Measured":
        """Returns the durations for a report's baseline: the same, whether or not the schedule ``splits`` backwards.

        Where the profile lacks the halves of a backward, each takes half of it.
        """
        return self

    def summary(self, header: Header, kinds: Collection[str]) -> str:
        """Says how long each kind of operation takes on a micro-batch: the shortest and the longest time of all stages.

        ``kinds`` are the letters of the kinds that the text names.
        """
        micros = next((pipe.micros[: header.parts] for pipe in header.pipes if pipe.micros), ())

        def operation(kind: Kind | Pairing, stage: Stage) -> Operation:
            if isinstance(kind, Pairing):
                forward, backward = (Compute(part, micros, stage) for part in kind.kinds)
                return Pair(forward, backward)
            return Compute(kind, micros, stage)

        def times(kind: Kind | Pairing) -> list[Fraction]:
            return [self.duration(operation(kind, stage), header) for stage in map(Stage, range(header.stages))]

        return ", ".join(
            f"{letter} = {Unit.SECOND.show_range(times(kind))}" for letter, kind in COSTED.items() if letter in kinds
        )

    def remarks(self, schedule: Schedule) -> tuple[str, ...]:
        """Remarks that the profile lacks costs of split backwards or slices, if the schedule has these."""
        remarks = []
        splits = any(operation.kind.splits for lane in schedule.lanes for operation in singles(lane))
        if splits and not self.setting.halves_known:
            entries = "input_gradient and weight_gradient"
            remarks.append(
                f"the profile has no times of split backwards ({entries}): each half counts as half a backward"
            )
        slices = schedule.header.slices
        if slices > 1 and not self.setting.slices_known:
            measure = f"chimera profile stages --slices {slices} measures them"
            remarks.append(
                f"the profile has no costs of slices: each takes 1/{slices} of a micro-batch's time, "
                f"and carries are not counted in memory; {measure}"
            )
        return tuple(remarks)

    @property
    def unit(self) -> Unit:
        """The unit of a profile's times."""
        return Unit.SECOND


_ZERO = Fraction(0)


@lru_cache(maxsize=2**14)
def _exact(seconds: float) -> Fraction:
    """The exact value of a time as it is written in the file: ``0.1`` is one tenth."""
    return Fraction(repr(seconds))
