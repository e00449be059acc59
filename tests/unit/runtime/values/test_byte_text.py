"""Bytes as a person reads them."""

import pytest

from chimera_runtime.values.byte_text import byte_text


def test_sizes_are_shown_with_three_digits() -> None:
    assert [byte_text(size) for size in (0, 12, 4096, 16 * 2**30, 1234567)] == [
        "0 B",
        "12 B",
        "4 KiB",
        "16 GiB",
        "1.18 MiB",
    ]


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 B"), (1000, "0.977 KiB"), (1023692, "0.976 MiB"), (5000 * 2**40, "5000 TiB")]
)
def test_no_size_is_shown_with_an_exponent(size: int, text: str) -> None:
    """Also between the units, and beyond the largest."""
    assert byte_text(size) == text
