"""Sizes of schemes for tests, whatever their parameters are called."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import product

from chimera_ir import library
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.elaborate.elaborate import outline
from chimera_ir.ir.levels import Header
from chimera_ir.planner.space import Roles, roles
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme
from chimera_ir.syntax.parser import parse

LARGEST = 10**6
"""The most operations of a scheme."""


@cache
def with_a_flush() -> tuple[str, ...]:
    """The library schemes whose every update ends before the next begins."""
    headers = {name: _header(library.source(name), {}) for name in library.names()}
    return tuple(name for name, header in headers.items() if header is not None and not header.period)


@cache
def chains() -> tuple[str, ...]:
    """The library schemes for models that are one chain of stages, as most models of the tests are."""
    headers = {name: _header(library.source(name), {}) for name in library.names()}
    return tuple(name for name, header in headers.items() if header is not None and not header.named)


def on_workers(name: str, workers: int, micro_batches: int) -> dict[str, int]:
    """Settings of a library scheme on so many workers, or on the next number that it takes; micro-batches too."""
    return dict(_on_workers(name, workers, micro_batches))


@cache
def _on_workers(name: str, workers: int, micro_batches: int) -> dict[str, int]:
    with suppress(AssertionError):
        return _first(library.source(name), workers, micro_batches, lambda header: header.workers == workers)
    return _on_workers(name, workers + 1, micro_batches)


def of_stages(name: str, stages: int, micro_batches: int) -> dict[str, int]:
    """The same for a number of stages."""
    return _first(library.source(name), stages, micro_batches, lambda header: header.stages == stages)


def usual() -> list[tuple[str, dict[str, int]]]:
    """The library with 4 workers and 4 or 8 micro-batches, and with 8 workers and 8: each size once."""
    sizes: list[tuple[str, dict[str, int]]] = []
    for name, (workers, micro_batches) in product(library.names(), ((4, 4), (4, 8), (8, 8))):
        size = name, on_workers(name, workers, micro_batches)
        if size not in sizes:
            sizes.append(size)
    return sizes


def all_sizes(
    source: Source, sizes: tuple[int, ...], micro_batches: tuple[int, ...], largest: int = LARGEST
) -> Iterator[tuple[dict[str, int], Header]]:
    """All settings that a scheme takes of such sizes and numbers, 1 and 2 of other parameters; with their headers."""
    known = _roles(source)
    values = dict.fromkeys(known.sizes, sizes) | dict.fromkeys(known.divisors, (1, 2)) | dict(known.listed)
    values |= {known.micro_batches: micro_batches} if known.micro_batches else {}
    for combination in product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        header = _header(source, settings, largest)
        if header is not None:
            yield settings, header


def _first(source: Source, most: int, micro_batches: int, fits: Callable[[Header], bool]) -> dict[str, int]:
    """The first settings that fit, with as many sizes at their defaults as can be."""
    known, header = _roles(source), _header(source, {})
    defaults = [dict(header.parameters)[size] for size in known.sizes]
    values = [(default, *range(1, most + 1)) for default in defaults]
    for count in range(micro_batches, micro_batches + 4 * most):
        for sizes in sorted(product(*values), key=lambda sizes: sum(map(int.__ne__, sizes, defaults))):
            settings = dict(zip(known.sizes, sizes, strict=True))
            settings |= {known.micro_batches: count} if known.micro_batches else {}
            header = _header(source, settings)
            if header is not None and fits(header):
                return settings
    raise AssertionError(f"{source.name} takes no such size")


@cache
def _tree(source: Source) -> Scheme:
    return parse(source)


@cache
def _roles(source: Source) -> Roles:
    return roles(source, _tree(source), LARGEST)


def _header(source: Source, settings: dict[str, int], largest: int = LARGEST) -> Header | None:
    try:
        return outline(_tree(source), settings, largest).header
    except Rejected:
        return None
