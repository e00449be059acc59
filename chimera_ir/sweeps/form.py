"""The forms in which a sweep is printed."""

from enum import Enum


class TableForm(Enum):
    """A table for people, or a text for programs; the values are those of ``--table``."""

    TEXT = "text"
    CSV = "csv"
    JSON = "json"
