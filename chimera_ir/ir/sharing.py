"""The choice of which messages share a communicator."""

from enum import Enum


class Communicators(Enum):
    """The messages that share a communicator; the values are the names in report.json.

    ``DIRECTED``: messages from one worker to another. ``PAIR``: messages between two workers, in both directions.
    """

    DIRECTED = "directed"
    PAIR = "pair"
