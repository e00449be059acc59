"""Text for numbers of bytes."""

UNITS = ("KiB", "MiB", "GiB", "TiB")

_FOUR_DIGITS = 999.5
"""Smallest number that would be rounded to four digits."""


def byte_text(count: int) -> str:
    """Returns a number of bytes with three digits, as in ``1.18 MiB``."""
    value, unit = float(count), "B"
    for larger in UNITS:
        if value < _FOUR_DIGITS:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < _FOUR_DIGITS else f"{value:.0f} {unit}"
