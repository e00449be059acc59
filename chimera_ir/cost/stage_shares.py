"""A model cut into another number of stages: the parts of the old stages of which each new one consists."""

from fractions import Fraction
from functools import lru_cache
from math import ceil, floor

from chimera_ir.ir.ids import Stage

StagePart = tuple[Stage, Fraction]
"""A stage of the old cut, and the share of it that is in a stage of the new cut."""


@lru_cache(maxsize=2**8)
def stage_shares(stages: int, into: int) -> tuple[tuple[StagePart, ...], ...]:
    """Cuts a model of ``stages`` stages into ``into`` new stages of equal size.

    Returns the parts of each new stage as pairs: an old stage, and the share of this old stage that goes into the new
    one.

    Examples
    --------
    >>> stage_shares(2, 4)[3], stage_shares(4, 2)[0]
    (((1, Fraction(1, 2)),), ((0, Fraction(1, 1)), (1, Fraction(1, 1))))
    """
    size = Fraction(stages, into)
    return tuple(
        tuple(
            (Stage(stage), min((number + 1) * size, Fraction(stage) + 1) - max(number * size, Fraction(stage)))
            for stage in range(floor(number * size), ceil((number + 1) * size))
        )
        for number in range(into)
    )
