"""No catalogue of messages is left out: each is held against mistakes by one of the tests beside this one."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from chimera_ir.diagnostics import catalogue
from chimera_ir.diagnostics.codes import messages
from tests.errors import test_front, test_middle, test_profiles
from tests.errors.goldens import classes, inputs

TESTED = [*test_front.CATALOGUES, *test_middle.CATALOGUES, *test_profiles.CATALOGUES]
ALL = [import_module(f"{catalogue.__name__}.{found.name}") for found in iter_modules(catalogue.__path__)]


def test_every_catalogue_is_held_against_mistakes_once() -> None:
    assert sorted(module.__name__ for module in TESTED) == sorted(module.__name__ for module in ALL)


def test_every_message_has_a_code_of_its_own() -> None:
    assert {*messages().values()} == {message for module in ALL for message in classes([module]).values()}


def test_two_mistakes_do_not_share_one_expected_message(tmp_path: Path) -> None:
    for name in ("few.chim", "few.sir", "few.err", "other.sir"):
        (tmp_path / name).touch()
    with pytest.raises(AssertionError, match=r"few\.chim and few\.sir share one \.err file"):
        inputs(tmp_path, "*.sir", "*.chim")
