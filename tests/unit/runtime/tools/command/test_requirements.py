"""Options of train.py that the program cannot follow are refused, with what to do in their place."""

import pytest

from chimera_runtime.errors import Misuse
from chimera_runtime.program.job import Job
from chimera_runtime.tools.command.options import parse, require_fitting
from tests.unit.runtime.thread_ranks import job

STREAM = job(period=1, lag=1)
HALVES = job(parts=2)
SPLIT = job(kinds=("F", "I", "W"))


def require(program: Job, *words: str) -> None:
    require_fitting(parse(["--model", "model.py", *words]), program)


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        (STREAM, ("--clip-norm=1",), "--clip-norm: two has no flush, .*; take a scheme with a flush, or clip in"),
        (STREAM, ("--shard-optimizer",), "--shard-optimizer: two has no flush, .*, or leave the option out"),
        (HALVES, (), "--micro-batch-size 1: two cuts .* into 2 halves; choose an even size"),
        (HALVES, ("--micro-batch-size=3",), "--micro-batch-size 3: two cuts every micro-batch"),
        (
            job(kinds=("F", "B", "pair")),
            ("--rehearse=F=0.01,B=0.02",),
            "lacks pair: two has such operations; give F=0.01,B=0.02,pair=0.03",
        ),
        (SPLIT, ("--rehearse=F=0.01,B=0.02",), "--rehearse lacks I and W: two has such operations; give F=0.01,I="),
        (
            job(kinds=("F", "B", "I", "W")),
            ("--rehearse=F=0.01,I=0.01,W=0.01",),
            "--rehearse lacks B: two has such operations",
        ),
        (job(), ("--rehearse=F=0.01,I=0.01,W=0.01",), "--rehearse lacks B: two has such operations; give F=0.01,B="),
        (job(), ("--backend=nccl", "--communicators=pair"), "communicators pair: two could wait for ever"),
    ],
)
def test_what_the_program_cannot_do_is_refused(program: Job, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        require(program, *words)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (STREAM, ()),
        (job(), ("--clip-norm=1", "--shard-optimizer")),
        (HALVES, ("--micro-batch-size=4",)),
        (SPLIT, ("--rehearse=F=0.01,I=0.02,W=0.03",)),
        (job(communicators=("directed", "pair")), ("--backend=nccl", "--communicators=pair")),
    ],
)
def test_what_it_can_do_is_not(program: Job, words: tuple[str, ...]) -> None:
    require(program, *words)
