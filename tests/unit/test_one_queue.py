"""Which programs finish with a single hardware queue: the sentence about it in docs/gpus.md, and its reason."""

from pathlib import Path

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.ir.levels import Program
from chimera_ir.lower.lower import lower
from tests.one_queue import finishes
from tests.sizes import on_workers

SIZES = ((4, 4), (4, 8), (8, 8), (8, 16))
"""Workers, and the fewest micro-batches."""


def program(scheme: str, workers: int, micro_batches: int) -> Program:
    return chimera_ir.compile(scheme, **on_workers(scheme, workers, micro_batches)).verified.program


@pytest.fixture(scope="module")
def programs() -> dict[tuple[str, int, int], Program]:
    return {(scheme, *size): program(scheme, *size) for scheme in library.names() for size in SIZES}


def test_the_docs_say_how_many_of_the_library_finish(programs: dict[tuple[str, int, int], Program]) -> None:
    hanging = [size for size, made in programs.items() if not finishes(made, 1)]
    several = [size for size, made in programs.items() if finishes(made, 2)]
    text = (Path(library.__file__).parents[1] / "docs" / "gpus.md").read_text()
    sentence = f"of {len(programs)} programs of the library {len(programs) - len(hanging)} finish"
    assert sentence in " ".join(text.split())
    assert {scheme for scheme, *_ in hanging} == {"dualpipe", "dualpipe_v", "interleaved"}
    assert several == []


def test_it_is_what_is_posted_ahead_that_holds_up_what_is_behind_it() -> None:
    """Where all messages go one way before any goes back, and receives are posted where they are needed, nothing is."""
    checked = chimera_ir.compile("gpipe", **on_workers("gpipe", 4, 4)).verified.checked
    ahead, late = lower(checked.level, 1), lower(checked.level, 0)
    assert isinstance(ahead, Program)
    assert isinstance(late, Program)
    assert [finishes(ahead, 2), finishes(late, 2)] == [False, True]
