"""Reports of one text at many sizes, as a table."""

from enum import Enum

MOST = 10_000
"""The most combinations of values."""


class TableForm(Enum):
    """The form in which a sweep is printed, for people or for programs; the values are those of ``--table``."""

    TEXT = "text"
    CSV = "csv"
    JSON = "json"
