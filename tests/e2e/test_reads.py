"""What the host reads of the device in an update, and how often it waits for it: a wait leaves the device idle.

On a board (tests/e2e/board.py), where each operation of torch whose result is the host's is a read. Each kind of job
has two sizes: the larger one has twice as many micro-batches, and three times as many parameters. In an update the host
may do no more than this, of any size:

- wait once for the copies of losses, auxiliary losses, reports and results of comparisons;
- read, for each weight group, what a mini-batch counts, and which parameters without a gradient have one elsewhere: of
  the sum, which with gloo is on the host anyway, unless a single rank holds the group;
- read the scale of a GradScaler, and which gradients are zeros that ``zero_grad(set_to_none=False)`` has left.
"""

import json
from typing import NamedTuple

import pytest

from tests.e2e.ranks import HERE, Job, compiled, run_all

MICROS, LAYERS, COMPARED = 4, 3, 3


class Kind(NamedTuple):
    """A kind of job: its scheme, sizes and options of the compiler, and what its model and its loop do.

    ``reads`` is the number of reads in an update, from the second on, and ``waits`` that of waits, on each rank.
    """

    scheme: str
    words: tuple[str, ...] = ()
    reads: tuple[int, int] = (0, 0)
    waits: tuple[int, int] = (0, 1)
    sizes: tuple[tuple[str, int], ...] = (("D", 2),)
    asked: tuple[str, ...] = ()


KINDS = {
    "flush": Kind("dapple"),
    "counted": Kind("dapple", ("counted",), reads=(1, 1)),
    "counted in two directions": Kind("chimera", ("counted",), waits=(1, 1)),
    "auxiliary losses and reports": Kind("dapple", ("beside",), waits=(1, 1)),
    "several outputs and keywords": Kind("dapple", ("several",)),
    "a mini-batch that is cut": Kind("dapple", ("several", "cut")),
    "groups of micro-batches": Kind("chimera_doubling", ("counted",), waits=(1, 1)),
    "slices with carries": Kind("seq1f1b_zb", ("carries",), sizes=(("D", 2), ("k", 2))),
    "recomputing": Kind("dapple", ("beside",), waits=(1, 1), asked=("--recompute",)),
    "recomputing with state": Kind("dapple", ("state",), asked=("--recompute",)),
    "halves": Kind("zb_h1"),
    "parameters without a gradient": Kind("chimera", ("absent", "counted", "nccl"), (4, 4), (1, 1)),
    "wide sums": Kind("chimera", ("absent", "wide", "nccl"), (2, 2), (1, 1)),
    "off-loading": Kind("interleaved_offload", sizes=(("P", 2), ("v", 2))),
    "stream": Kind("pipedream_2bw", ("stream",)),
    "stream of single micro-batches": Kind("pipedream", ("stream", "beside"), waits=(1, 1)),
    "a scaler": Kind("dapple", ("scaled",), reads=(1, 1)),
    "gradients that become zeros": Kind("dapple", ("zeros",), reads=(1, 1)),
}

Counts = dict[str, dict[str, list[int]]]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Counts, Counts]:
    """The reads and waits of the updates of each case, on both ranks."""
    folder = tmp_path_factory.mktemp("reads")
    cases = []
    for name, kind in KINDS.items():
        for size, (micros, layers) in {"small": (MICROS, 1), "large": (2 * MICROS, LAYERS)}.items():
            sizes = dict(kind.sizes) | ({} if kind.scheme == "pipedream" else {"N": micros})
            directory = compiled(folder, kind.scheme, asked=kind.asked, **sizes)
            case = {"name": f"{name}, {size}", "directory": str(directory), "words": kind.words, "layers": layers}
            cases.append(case)
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    job = Job("reads", HERE / "loops" / "reads.py", (str(listed),), model=None)
    outcome = run_all(folder, 2, [job])["reads"]
    outcome.assert_passed()
    first, second = (json.loads(said.splitlines()[-1]) for said in outcome.said)
    return first, second


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_the_host_waits_as_often_whatever_the_number_of_micro_batches_and_parameters(
    counts: tuple[Counts, Counts], name: str, rank: int
) -> None:
    """Of a stream for the update that is complete: so the first updates have no wait.

    In the first three updates the two runs of a forward are compared. Results are read with the losses, but state of
    the module, such as a buffer, is read in every forward.
    """
    kind, first = KINDS[name], COMPARED if name == "recomputing with state" else 1
    for size in ("small", "large"):
        of_updates = counts[rank][f"{name}, {size}"]
        reads, waits = of_updates["reads"][first:], of_updates["waits"][2 if "stream" in kind.words else first :]
        assert ({*reads}, {*waits}) == ({kind.reads[rank]}, {kind.waits[rank]}), size
