"""Which programs finish with a single hardware queue: the sentence about it in gpus.md, and its reason."""

import chimera_ir
from chimera_ir.ir.levels import Program
from chimera_ir.lower.lower import lower
from tests.one_queue import finishes
from tests.pages import compare
from tests.sizes import on_workers, usual


def test_the_docs_say_how_many_of_the_library_finish(update_goldens: bool) -> None:
    programs = [(scheme, chimera_ir.compile(scheme, **settings).verified.program) for scheme, settings in usual()]
    hanging = [scheme for scheme, program in programs if not finishes(program, 1)]
    several = [scheme for scheme, program in programs if finishes(program, 2)]
    figures = len(programs), len(programs) - len(hanging)
    compare("gpus.md", "of {} programs of the library {} finish", *figures, update=update_goldens)
    assert {*hanging} == {"chimera_doubling", "dualpipe", "dualpipe_v", "interleaved"}
    assert {*several} == {"dapple_recompute", "eager_1f1b"}


def test_it_is_what_is_posted_ahead_that_holds_up_what_is_behind_it() -> None:
    """Where all messages go one way before any goes back, and receives are posted where they are needed, nothing is."""
    checked = chimera_ir.compile("gpipe", **on_workers("gpipe", 4, 4)).verified.checked
    ahead, late = lower(checked.level, 1), lower(checked.level, 0)
    assert isinstance(ahead, Program)
    assert isinstance(late, Program)
    assert [finishes(ahead, 2), finishes(late, 2)] == [False, True]
