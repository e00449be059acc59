"""Graph of stages: which stages a stage feeds, which stages feed it, and which values pass between them.

All other code asks this module for the neighbours of a stage.
"""

from functools import cache
from typing import NamedTuple


class EdgeValue(NamedTuple):
    """A value that a stage makes for other stages: those that it feeds if it is ``onward``, else those that feed it.

    The other fields are names of methods and attributes. `Stage.<made>` returns the value. `Stage.<slots>` has the
    receive buffers for it, which `Boundary.<buffers>` allocates. `Boundary.<views>` returns the part of a buffer that a
    message uses.
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
    """Returns the letter of the value in a message that names only its stages.

    It is the first one in `VALUES` that goes from ``source`` to ``target``.
    """
    return next(value for value in VALUES if target in readers(value, source, stages))
