"""The graph of stages: which stages feed a stage, and which it feeds, and the values that go along its edges.

Nothing else computes a neighbouring stage.
"""

from functools import cache
from typing import NamedTuple


class EdgeValue(NamedTuple):
    """A value that a stage makes for the stages that it feeds, or, if not ``onward``, for those that feed it.

    Three names of methods and one of an attribute: `Stage.<made>` returns the value, and `Stage.<slots>` has its
    receive buffers, which `Boundary.<buffers>` allocates; `Boundary.<views>` returns the part of them that a message
    uses.
    """

    onward: bool
    made: str
    slots: str
    buffers: str
    views: str


VALUES = {
    "y": EdgeValue(True, made="outputs", slots="inputs", buffers="buffers", views="views"),
    "dx": EdgeValue(
        False, made="input_gradients", slots="gradients", buffers="gradient_buffers", views="gradient_views"
    ),
}
"""The values by their letters, as the compiler's table of kinds has them."""


@cache
def fed(stages: int) -> tuple[tuple[int, ...], ...]:
    """The stages that stage s feeds, as ``fed(stages)[s]``, ascending. Stages are a chain: each feeds the next one."""
    return (*((stage,) for stage in range(1, stages)), ())


@cache
def feeding(stages: int) -> tuple[tuple[int, ...], ...]:
    """The stages that feed stage s, as ``feeding(stages)[s]``, ascending: the inverse of ``fed``."""
    return ((), *((stage,) for stage in range(stages - 1)))


def readers(value: str, stage: int, stages: int) -> tuple[int, ...]:
    """The stages that read a value which ``stage`` makes."""
    return (fed if VALUES[value].onward else feeding)(stages)[stage]


def implied(source: int, target: int, stages: int) -> str:
    """The value of a message that names only its stages: the first in `VALUES` from ``source`` to ``target``."""
    return next(value for value in VALUES if target in readers(value, source, stages))
