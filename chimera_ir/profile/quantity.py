"""Quantities with units, as people write them: ``"31.2 ms"``, ``"4 MiB"``, ``"9.7 GB/s"``.

A quantity is read exactly and rounded once, at the end; it is written so that reading gives the same number again.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil, log10

_NUMBER = re.compile(r"\s*([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,12})?)\s*(.*?)\s*", re.ASCII | re.S)
_LONGEST = 64
_DIGITS = 40

_EXTREME = 400
"""A power of ten that no quantity reaches."""

_SI = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True, slots=True)
class Dimension:
    """A physical dimension: its units as multiples of the base unit, the largest value that is accepted, an example."""

    noun: str
    units: Mapping[str, Fraction]
    most: Fraction
    example: str

    def limits(self, least: Fraction) -> tuple[str, str, str, str]:
        """The smallest and the largest value in the first unit, the noun of the dimension, and that unit."""
        unit, size = next(iter(self.units.items()))
        return _brief(least / size), _brief(self.most / size), self.noun, unit


def _brief(value: Fraction) -> str:
    return f"{float(value):g}".replace("e+", "e").replace("e-0", "e-").replace("e0", "e")


POSITIVE = Fraction(1, 10**12)
"""The smallest positive value, in the base unit of any dimension."""


def _units(base: str, prefixes: Mapping[str, int], over: int = 1) -> dict[str, Fraction]:
    return {f"{prefix}{base}": Fraction(factor, over) for prefix, factor in prefixes.items()}


TIME = Dimension(
    "time",
    {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "µs": Fraction(1, 10**6)}
    | {"ns": Fraction(1, 10**9)},
    Fraction(10**9),
    "31.2 ms",
)
SIZE = Dimension("size", _units("B", _SI) | _units("B", _BINARY), Fraction(10**18), "670 MB")
BANDWIDTH = Dimension(
    "bandwidth",
    _units("B/s", _SI) | _units("B/s", _BINARY) | _units("bit/s", _SI, over=8),
    Fraction(10**18),
    "9.7 GB/s",
)
WORK = Dimension("work", _units("FLOP", _SI), Fraction(10**24), "1.21 TFLOP")
RATE = Dimension("computing speed", _units("FLOP/s", _SI), Fraction(10**21), "9.3 TFLOP/s")
SHARE = Dimension("share", {"%": Fraction(1, 100)}, Fraction(1), "2 %")


def split(text: str) -> tuple[Fraction, str] | None:
    """The number that a text begins with, exactly, and the unit behind it; None if there is no number.

    A number with a huge exponent, which the caller will refuse, gets the exponent 400 or -400: it is cheap to handle.

    Examples
    --------
    >>> split("31.2 ms"), split("8"), split("nan s")
    ((Fraction(156, 5), 'ms'), (Fraction(8, 1), ''), None)
    """
    match = _NUMBER.fullmatch(text) if len(text) <= _LONGEST else None
    if not match:
        return None
    number = Decimal(match[1])
    if abs(number.adjusted()) > _EXTREME:
        sign, digits, _ = number.as_tuple()
        number = Decimal((sign, digits, _EXTREME if number.adjusted() > 0 else -_EXTREME))
    return Fraction(number), match[2]


def show_time(seconds: float) -> str:
    """A time in seconds, in the largest unit in which it is at least 1.

    Examples
    --------
    >>> show_time(0.0312), show_time(0.0), show_time(90.0)
    ('31.2 ms', '0 s', '90 s')
    """
    return _shown(Decimal(repr(seconds)), ((0, "s"), (-3, "ms"), (-6, "us"), (-9, "ns")))


def show_size(count: int) -> str:
    """A number of bytes, in a binary unit if that gives an integer, else in a decimal one.

    Examples
    --------
    >>> show_size(2**22), show_size(669790012), show_size(512)
    ('4 MiB', '669.790012 MB', '512 B')
    """
    for prefix, factor in reversed(_BINARY.items()):
        if count and count % factor == 0 and count % 10**6:
            return f"{count // factor} {prefix}B"
    return _shown(Decimal(count), _powers("B"))


def show_work(flop: float, unit: str = "FLOP") -> str:
    """A number of floating-point operations, or a rate of them.

    Examples
    --------
    >>> show_work(1.21e12), show_work(312e12, "FLOP/s")
    ('1.21 TFLOP', '312 TFLOP/s')
    """
    return _shown(Decimal(repr(flop)), _powers(unit))


def show_share(share: float) -> str:
    """A share, in per cent.

    Examples
    --------
    >>> show_share(0.02)
    '2 %'
    """
    return f"{_plain(Decimal(repr(share)).scaleb(2))} %"


def show_bandwidth(beta: float) -> str:
    """The bandwidth with the fewest digits that reads back as ``beta`` seconds per byte.

    Examples
    --------
    >>> show_bandwidth(1 / 9.7e9), show_bandwidth(0.0)
    ('9.7 GB/s', 'unlimited')
    """
    if beta == 0:
        return UNLIMITED
    exact = 1 / Fraction(beta)
    magnitude = log10(exact.numerator) - log10(exact.denominator)
    for digits in range(1, _DIGITS):
        power = digits - ceil(magnitude)
        rounded = Decimal(round(exact * Fraction(10) ** power)).scaleb(-power)
        if inverse(Fraction(rounded)) == beta:
            return _shown(rounded, _powers("B/s"))
    raise ValueError(f"{beta} is no time per byte")


UNLIMITED = "unlimited"
"""The bandwidth of a link whose messages take the latency alone, whatever their size."""


def inverse(bandwidth: Fraction) -> float:
    """beta, in seconds per byte, of a bandwidth in bytes per second."""
    return float(1 / bandwidth)


def _powers(unit: str) -> tuple[tuple[int, str], ...]:
    return tuple((3 * power, f"{prefix}{unit}") for power, prefix in reversed([*enumerate(_SI)]))


def _shown(value: Decimal, units: tuple[tuple[int, str], ...]) -> str:
    """A value in the first of ``units`` (power of ten, name) in which it is at least 1, else in the last one."""
    if value == 0:
        return f"0 {next(unit for power, unit in units if power == 0)}"
    power, unit = next((pair for pair in units if value.adjusted() >= pair[0]), units[-1])
    return f"{_plain(value.scaleb(-power))} {unit}"


def _plain(value: Decimal) -> str:
    """A number without needless zeros, with an exponent only if it would have very many digits."""
    if not -_LONGEST // 4 < value.adjusted() < _LONGEST // 4:
        return str(value).replace("E+", "e").replace("E", "e")
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
