"""Parameters with which a scheme has as many workers and micro-batches as another one."""

from collections.abc import Iterator, Mapping
from itertools import chain, permutations

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.elaborate.elaborate import outline, parameter_names
from chimera_ir.elaborate.settings import SettingError
from chimera_ir.ir.levels import Header
from chimera_ir.syntax.ast import Scheme

Settings = Mapping[str, int]


def fitting(scheme: Scheme, like: Header, max_operations: int) -> Settings | Rejected | None:
    """Settings that give a scheme the workers and micro-batches of a header, as few as do.

    Parameters that both schemes have keep the value that the other one has, if that is possible. If no settings fit,
    it is what the scheme is rejected with at one of those sizes; None if it is never rejected, but has other sizes.

    Examples
    --------
    >>> from chimera_ir.source import Source
    >>> from chimera_ir.syntax.parser import parse
    >>> text = "scheme a(P = 2, M = 1) workers P pipe p { stages s in 0..P on s  micros m in 0..M  F(m, s) @ m + s }"
    >>> fitting(parse(Source("", text)), Header("other", (), 4, 4, 6, ()), 1000)
    {'P': 4, 'M': 6}
    """
    refused = None
    for settings in _candidates(scheme, like):
        try:
            header = outline(scheme, settings, max_operations).header
        except Rejected as rejected:
            refused = refused or rejected
            continue
        except SettingError:
            continue
        if (header.workers, header.whole_micro_batches) == (like.workers, like.whole_micro_batches):
            return settings
    return refused


def _candidates(scheme: Scheme, like: Header) -> Iterator[Settings]:
    """Settings that may fit, those with the fewest sizes first."""
    names, sizes = parameter_names(scheme), (like.workers, like.whole_micro_batches)
    shared = {name: value for name, value in like.parameters if name in names}
    both = (dict(zip(pair, sizes, strict=True)) for pair in permutations(names, 2))
    alone = ({name: size} for size in sizes for name in names)
    for settings in chain([{}], alone, both):
        yield from ({**shared, **settings}, settings) if shared else (settings,)
