"""The times of a profile as durations: each operation takes what its stage takes.

Messages take no time, as in every timeline (section 2); the replay has them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from math import ceil, floor, lcm

from chimera_ir.cost.numbers import Unit
from chimera_ir.ir.ids import Stage
from chimera_ir.ir.kinds import KINDS, Kind
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute
from chimera_ir.predict.setting import Setting

_Part = tuple[Stage, Fraction]
"""A stage of a profile, and how much of it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The durations of operations in a setting; ``cut`` has the parts of the profile's stages that make each stage."""

    setting: Setting
    cut: tuple[tuple[_Part, ...], ...]

    @staticmethod
    def of(setting: Setting) -> "Measured":
        """The durations where the schedule has the stages of the profile."""
        return Measured(setting, _cut(len(setting.stages), len(setting.stages)))

    def duration(self, operation: Compute, header: Header) -> Fraction:
        """What the profile says of the operation's stage, for all of its micro-batches."""
        return sum((share * self._whole(stage, operation, header) for stage, share in self.cut[operation.stage]), _ZERO)

    def _whole(self, stage: Stage, operation: Compute, header: Header) -> Fraction:
        seconds, times = self.setting.compute(stage, operation, header)
        return _exact(seconds) * times

    def tick(self, header: Header) -> Fraction:
        """A time of which those of all micro-batch sizes, and of parts of a micro-batch, are multiples."""
        timings = chain.from_iterable(stage.at.values() for stage in self.setting.stages)
        times = (_exact(time) for timing in timings for time in (timing.forward, timing.backward, timing.recomputing))
        shares = (share for parts in self.cut for _, share in parts)
        sizes = lcm(*(time.denominator for time in times)), lcm(*(share.denominator for share in shares))
        return Fraction(1, sizes[0] * sizes[1] * header.parts)

    def recut(self, stages: int, into: int) -> "Measured":
        """The same model, where a stage is several of the profile's, or a part of one."""
        return Measured(self.setting, _cut(stages, into))

    def told(self, header: Header, path: Sequence[Compute]) -> tuple[tuple[str, Fraction], ...]:
        """The mean cost of each kind over the path: stages differ, and the means give the length of the path."""
        return tuple(self._means(header, path))

    def _means(self, header: Header, path: Sequence[Compute]) -> Iterator[tuple[str, Fraction]]:
        for letter, kind in KINDS.items():
            operations = [operation for operation in path if operation.kind is kind]
            if operations:
                micro_batches = Fraction(sum(len(operation.micros) for operation in operations), header.parts)
                yield letter, sum((self.duration(operation, header) for operation in operations), _ZERO) / micro_batches

    def summary(self, header: Header) -> str:
        """What a forward and a backward over a micro-batch take: the least and the most of all stages."""
        micros = {
            (stage, stage in pipe.recompute): pipe.micros[: header.parts]
            for pipe in header.pipes
            if pipe.micros
            for stage in map(Stage, range(header.stages))
        }

        def times(kind: Kind) -> list[Fraction]:
            return [self.duration(Compute(kind, those, stage), header) for (stage, _), those in micros.items()]

        return ", ".join(f"{letter} = {_range(times(kind))}" for letter, kind in KINDS.items())

    def remarks(self, _: Schedule) -> tuple[str, ...]:
        """Nothing."""
        return ()

    @property
    def unit(self) -> Unit:
        """Seconds."""
        return Unit.SECOND


_ZERO = Fraction(0)


@lru_cache(maxsize=2**14)
def _exact(seconds: float) -> Fraction:
    """A time as it is written: ``0.1`` is one tenth."""
    return Fraction(repr(seconds))


def _cut(stages: int, into: int) -> tuple[tuple[_Part, ...], ...]:
    """For each stage of a new cut, into stages of equal size, the old stages that are in it, and the share of each."""
    size = Fraction(stages, into)
    return tuple(
        tuple(
            (Stage(stage), min((number + 1) * size, Fraction(stage + 1)) - max(number * size, Fraction(stage)))
            for stage in range(floor(number * size), ceil((number + 1) * size))
        )
        for number in range(into)
    )


def _range(times: Sequence[Fraction]) -> str:
    least, most = Unit.SECOND.show(min(times)), Unit.SECOND.show(max(times))
    return least if least == most else f"{least} to {most}"
