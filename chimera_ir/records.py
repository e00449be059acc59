"""Frozen dataclasses of which a run of the compiler uses few: each is made when it is first used."""

from dataclasses import dataclass, field
from typing import Self, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class LazyDataclass:
    """Makes a subclass a frozen dataclass when it, or a subclass of it, gets its first instance.

    There are 300 messages and 40 nodes of syntax. To make all of these takes longer than to read a scheme, and a scheme
    has few of them.
    """

    def __new__(cls, *_: object, **__: object) -> Self:
        """Returns the instance, as yet without values; its class is a dataclass then."""
        if "__dataclass_fields__" not in vars(cls):
            for record in reversed(cls.__mro__[:-1]):
                if "__dataclass_fields__" not in vars(record):
                    dataclass(frozen=True)(record)
        return super().__new__(cls)
