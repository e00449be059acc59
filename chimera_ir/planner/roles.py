"""The roles of a scheme's parameters in the planner, found by trying values.

Each parameter in turn gets another value, while the others keep their defaults, and the scheme is compiled to a header.
If the number of stages or workers changes, the parameter is a *size*. If the parameter equals the number of
micro-batches, it is N. If it equals the number of slices, the planner tries `SLICES` for it; for any other parameter
the planner tries the divisors of the sizes. A ``library.toml`` next to the scheme may state other roles.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from chimera_ir import library
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.elaborate.elaborate import outline, parameter_names
from chimera_ir.elaborate.evaluate import LIMIT
from chimera_ir.errors import ParameterError, UnreadableText
from chimera_ir.ir.levels import Header
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme

SIZE, MICRO_BATCHES, DIVISOR, DEFAULT = "size", "micro_batches", "divisor", "default"
"""Roles that a ``library.toml`` may give to a parameter; it may also list values to try."""

SLICES = (2, 4, 8)
"""The numbers of slices that the planner tries."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a scheme's parameters in the planner.

    ``sizes`` give the numbers of stages and workers, ``micro_batches`` is N, if there is one. For ``divisors`` the
    planner tries the divisors of the sizes, for ``listed`` the values in the list. Any other parameter keeps its
    default.
    """

    sizes: tuple[str, ...] = ()
    micro_batches: str | None = None
    divisors: tuple[str, ...] = ()
    listed: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def without_micro_batches(self, settings: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        """The settings of all parameters but N."""
        return tuple(setting for setting in settings if setting[0] != self.micro_batches)


def roles(source: Source, scheme: Scheme, max_operations: int) -> Roles:
    """The roles of a scheme's parameters: which give its size, which is N, and which the planner tries values of.

    The ``library.toml`` next to the scheme may state roles. All other roles are derived from the scheme's headers;
    ``max_operations`` limits each compilation to a header.

    Raises `UnreadableText` if the ``library.toml`` names an unknown parameter or an impossible role.
    """
    stated = _stated(source, scheme)
    derived = _derived(scheme, max_operations) if set(parameter_names(scheme)) - stated.keys() else {}
    by_name = {name: stated.get(name, derived.get(name, DIVISOR)) for name in parameter_names(scheme)}
    counters = [name for name, role in by_name.items() if role == MICRO_BATCHES]
    return Roles(
        tuple(name for name, role in by_name.items() if role == SIZE),
        counters[0] if counters else None,
        tuple(name for name, role in by_name.items() if role == DIVISOR or name in counters[1:]),
        tuple((name, role) for name, role in by_name.items() if isinstance(role, tuple)),
    )


def _stated(source: Source, scheme: Scheme) -> dict[str, str | tuple[int, ...]]:
    stated: dict[str, str | tuple[int, ...]] = {}
    for name, role in library.stated(source).items():
        where = f"library.toml beside {source.name}: {name}"
        if name not in parameter_names(scheme):
            raise UnreadableText(f"{where}: {Path(source.name).stem} has no such parameter")
        values = isinstance(role, list) and role and all(type(value) is int and abs(value) <= LIMIT for value in role)
        if not values and role not in (SIZE, MICRO_BATCHES, DIVISOR, DEFAULT):
            words = ", ".join(f'"{word}"' for word in (SIZE, MICRO_BATCHES, DIVISOR, DEFAULT))
            raise UnreadableText(
                f"{where}: write a list of whole numbers of at most 64 bits to try, as in [2, 4], or one of {words}"
            )
        stated[name] = tuple(role) if isinstance(role, list) else str(role)
    return stated


def _derived(scheme: Scheme, max_operations: int) -> Mapping[str, str | tuple[int, ...]]:
    """Maps each parameter to the role that follows from the scheme's headers; empty if it refuses its own defaults."""
    header = _header(scheme, {}, max_operations)
    if header is None:
        return {}
    defaults = dict(header.parameters)
    return {name: _role(name, defaults, header, scheme, max_operations) for name in defaults}


def _role(
    name: str, defaults: Mapping[str, int], header: Header, scheme: Scheme, max_operations: int
) -> str | tuple[int, ...]:
    """The role of a parameter, from the headers at its default and at the first other value that the scheme accepts."""
    for settings in _variations(name, defaults):
        other = _header(scheme, settings, max_operations)
        if other is None:
            continue
        if (header.stages, header.workers) != (other.stages, other.workers):
            return SIZE
        if header.slices != other.slices == settings[name]:
            return SLICES
        counted = header.whole_micro_batches, other.whole_micro_batches
        return MICRO_BATCHES if counted == (defaults[name], settings[name]) else DIVISOR
    return DIVISOR


def _variations(name: str, defaults: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields settings that give a parameter another value.

    In the first ones all other parameters have their defaults as fixed values; in the last ones they are not set.
    """
    value = defaults[name]
    values = [2 * value, value + 1, value + 2, 3 * value, 4 * value, value // 2, value - 1]
    for fixed in (dict(defaults), {}):
        yield from ({**fixed, name: other} for other in values if other != value and other >= 1)


def _header(scheme: Scheme, settings: Mapping[str, int], max_operations: int) -> Header | None:
    try:
        return outline(scheme, settings, max_operations).header
    except (Rejected, ParameterError):
        return None
