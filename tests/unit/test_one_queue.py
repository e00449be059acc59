"""Which programs finish with a single hardware queue: the sentence about it in docs/gpus.md, and its reason."""

from pathlib import Path

import chimera_ir
from chimera_ir import library
from chimera_ir.ir.levels import Program
from chimera_ir.lower.lower import lower
from tests.one_queue import finishes
from tests.sizes import on_workers, usual


def test_the_docs_say_how_many_of_the_library_finish() -> None:
    programs = [(scheme, chimera_ir.compile(scheme, **settings).verified.program) for scheme, settings in usual()]
    hanging = [scheme for scheme, program in programs if not finishes(program, 1)]
    several = [scheme for scheme, program in programs if finishes(program, 2)]
    text = (Path(library.__file__).parents[1] / "docs" / "gpus.md").read_text()
    sentence = f"of {len(programs)} programs of the library {len(programs) - len(hanging)} finish"
    assert sentence in " ".join(text.split()), f"docs/gpus.md has to say: {sentence}"
    assert {*hanging} == {"dualpipe", "dualpipe_v", "interleaved"}
    assert several == []


def test_it_is_what_is_posted_ahead_that_holds_up_what_is_behind_it() -> None:
    """Where all messages go one way before any goes back, and receives are posted where they are needed, nothing is."""
    checked = chimera_ir.compile("gpipe", **on_workers("gpipe", 4, 4)).verified.checked
    ahead, late = lower(checked.level, 1), lower(checked.level, 0)
    assert isinstance(ahead, Program)
    assert isinstance(late, Program)
    assert [finishes(ahead, 2), finishes(late, 2)] == [False, True]
