"""How much time of the host an operation takes, beside torch.distributed.pipelining on the same ranks.

    .venv/bin/python benchmarks/host_time.py [--rounds 30] [--jobs "dapple D=2" ..] [--backend NAME] [--markdown PAGE]

Stages are linear layers of four numbers, with 64 micro-batches of one item, so that nearly all time is that of the
Python between two kernels. Both systems train the same modules on the same mini-batch: they cut it, compute all losses,
and add up all gradients, which are compared before anything is timed. They alternate in the same processes, one thread
each; a sample is the processor time of the rank's main thread in an update, without garbage collection. The first five
rounds do not count. *Bare* is what the modules take by themselves: forward, loss and ``torch.autograd.backward``.

Messages: ``gloo`` is a whole `Pipeline.step` and a whole step of torch's schedule. ``fake`` is torch's process group
that sends nothing: both systems have run on gloo before, then send there, and one rank is measured after the other. On
it ours is a step without the sum of the losses over the ranks and the comparison of the ranks, which torch's schedules
do not have, and which need answers.

With ``--backend nccl`` there are only whole steps, over NCCL, with a GPU for each rank, or one GPU for all. A sample is
the time until the update is launched. It has not run on a GPU.

A ratio is the median over the rounds of ours / torch, with the 95 % interval of the sign test; *minus bare* is the same
without what the bare modules took in the round. Calls are the Python functions that an update calls, the modules' own
among them, over its operations: forwards, backwards or halves of backwards, sends and receives.

``--markdown`` also writes the range of the ratios into the README two folders above the page.
"""

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from commands import torchrun
from paired import Middle, ratio
from plots import Panel, Row, ratios, ready
from tables import circumstances, picture, publish, shown, table

import chimera_ir

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "ranks" / "host_time.py"
NODE = HERE.parent / "tests" / "gpu" / "node.py"
"""Makes each rank a node, as NCCL lets no two ranks of one share a GPU."""

README_RANGE = re.compile(r"\d\.\d to \d\.\d(?= of torch's\]\(docs/evidence/benchmarks\.md#)")

MICRO_BATCHES = 64
STEP_LIMIT, CALLS_LIMIT = 0.8, 10
"""The most that a whole step may take of torch's, and Python calls of an operation of plain stages where nothing is
sent."""


@dataclass(frozen=True)
class Job:
    """A library scheme of some parameters beside a class of torch's schedules; stages go round the ranks.

    ``limit`` is the most that ours may take of torch's, minus bare, where nothing is sent. With ``branches`` stages
    take a keyword argument and hand on two tensors.
    """

    label: str
    scheme: str
    parameters: dict[str, Any]
    schedule: str
    limit: float
    ranks: int = 2
    stages_of_rank: int = 1
    branches: bool = False


@dataclass(frozen=True)
class Measured:
    """Measurements of a job on a rank: samples in microseconds and Python calls by contender."""

    job: Job = field(repr=False)
    messages: str
    rank: int
    operations: int
    samples: dict[str, list[float]]
    calls: dict[str, int]

    @property
    def whole(self) -> Middle:
        """Ratio of our time to torch's, the modules' own included."""
        return ratio(self.samples["ours"], self.samples["torch"])

    @property
    def minus_bare(self) -> Middle:
        """Ratio of our time to torch's, without the modules' own work."""
        return ratio(*(self._without_modules(name) for name in ("ours", "torch")))

    def _without_modules(self, name: str) -> list[float]:
        return [whole - bare for whole, bare in zip(self.samples[name], self.samples["bare"], strict=True)]

    @property
    def limit(self) -> float:
        """Limit of the ratio: of that minus bare where nothing is sent, else of the whole step."""
        return self.job.limit if self.messages == "fake" else STEP_LIMIT

    @property
    def is_within(self) -> bool:
        """Whether it is reached."""
        return (self.minus_bare if self.messages == "fake" else self.whole).value <= self.limit

    def time(self, name: str) -> str:
        """Microseconds of an operation."""
        return f"{statistics.median(self.samples[name]) / self.operations:.2f}"

    def calls_of(self, name: str) -> float:
        """Python calls of an operation."""
        return self.calls[name] / self.operations

    @property
    def calls_within(self) -> str:
        """Whether calls are within their limit, where there is one."""
        if self.messages != "fake" or self.job.branches:
            return ""
        return yes(self.calls_of("ours") <= CALLS_LIMIT)


JOBS = (
    Job("dapple D=2", "dapple", {"D": 2}, "Schedule1F1B", 0.4),
    Job("dapple D=3", "dapple", {"D": 3}, "Schedule1F1B", 0.4, ranks=3),
    Job("gpipe D=2", "gpipe", {"D": 2}, "ScheduleGPipe", 0.2),
    Job("interleaved P=2 v=2", "interleaved", {"P": 2, "v": 2}, "ScheduleInterleaved1F1B", 0.25, stages_of_rank=2),
    Job("zb_h1 D=2", "zb_h1", {"D": 2}, "ScheduleInterleavedZeroBubble", 0.6),
    Job("dapple D=2, keywords, two outputs", "dapple", {"D": 2}, "Schedule1F1B", 0.6, branches=True),
)
HEADS = (
    *("", "messages", "rank", "torch", "ours, us", "torch, us", "bare, us"),
    *("ours / torch", "minus bare", "limit", "within", "calls", "torch's calls", f"at most {CALLS_LIMIT} calls"),
)


def yes(is_so: bool) -> str:
    """A cell of the table."""
    return "yes" if is_so else "no"


def row(measured: Measured) -> list[str]:
    """The row of a rank."""
    return [
        *(measured.job.label, measured.messages, str(measured.rank), measured.job.schedule),
        *(measured.time(name) for name in ("ours", "torch", "bare")),
        *(str(measured.whole), str(measured.minus_bare), f"{measured.limit:g}", yes(measured.is_within)),
        *(f"{measured.calls_of(name):.1f}" for name in ("ours", "torch")),
        measured.calls_within,
    ]


def run(jobs: Sequence[Job], rounds: int, backend: str) -> list[Measured]:
    """Measures all jobs, those of as many ranks under one torchrun."""
    results = []
    for ranks in sorted({job.ranks for job in jobs}):
        results += launch([job for job in jobs if job.ranks == ranks], rounds, backend)
    places = {job.label: place for place, job in enumerate(jobs)}
    return sorted(results, key=lambda measured: (places[measured.job.label], measured.messages, measured.rank))


def launch(jobs: Sequence[Job], rounds: int, backend: str) -> list[Measured]:
    """Compiles and measures jobs of as many ranks."""
    by_label, ranks = {job.label: job for job in jobs}, jobs[0].ranks
    shares_device = backend == "nccl" and torch.cuda.device_count() < ranks
    with tempfile.TemporaryDirectory() as folder:
        plan, result = Path(folder, "plan.json"), Path(folder, "result.json")
        listed = [described(job, Path(folder, str(place))) for place, job in enumerate(jobs)]
        plan.write_text(json.dumps({"result": str(result), "backend": backend, "rounds": rounds, "jobs": listed}))
        started_by = (str(NODE),) if shares_device else ()
        torchrun((f"--nproc-per-node={ranks}", *started_by, str(SCRIPT), str(plan)))
        return [Measured(by_label[figures.pop("job")], **figures) for figures in json.loads(result.read_text())]


def described(job: Job, directory: Path) -> dict[str, Any]:
    """A job as ranks take it, with the directory of its compiled scheme."""
    chimera_ir.compile(job.scheme, **job.parameters, N=MICRO_BATCHES).write(directory)
    names = ("label", "schedule", "stages_of_rank", "branches")
    return {name: getattr(job, name) for name in names} | {
        "directory": str(directory),
        "micro_batches": MICRO_BATCHES,
    }


def answer(results: Sequence[Measured]) -> str:
    """The result in a sentence for each way of messages."""
    sentences = []
    for messages in dict.fromkeys(measured.messages for measured in results):
        mine = [measured for measured in results if measured.messages == messages]
        whole, minus_bare = (
            sorted(getattr(measured, name).value for measured in mine) for name in ("whole", "minus_bare")
        )
        sentences.append(
            f"{messages}: {whole[0]:.2f} to {whole[-1]:.2f} of torch's time, minus bare {minus_bare[0]:.2f} to "
            f"{minus_bare[-1]:.2f}; {sum(measured.is_within for measured in mine)} of {len(mine)} within their limits."
        )
    return "\n".join(sentences)


def fill_readme(readme: Path, whole: Sequence[float]) -> None:
    """Replaces the range of ascending ratios in the table of the README."""
    text, count = README_RANGE.subn(f"{whole[0]:.1f} to {whole[-1]:.1f}", readme.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"{readme} has no range of host times")
    readme.write_text(text, encoding="utf-8")


def report(results: Sequence[Measured], page: Path | None) -> None:
    """Prints the table, and publishes it with its picture if there is a page."""
    rows = [row(measured) for measured in results]
    print(f"{circumstances()}\n\n{table(HEADS, rows)}\n\n{answer(results)}")
    if page is None:
        return
    panels = (Panel("host time, ours / torch", 1.0), Panel("minus bare", 1.0))
    drawn = [
        Row(f"{measured.job.label}, {measured.messages}, rank {measured.rank}", (measured.whole, measured.minus_bare))
        for measured in results
    ]
    ratios(picture(page, "host_time"), panels, drawn)
    fill_readme(page.parents[2] / "README.md", sorted(measured.whole.value for measured in results))
    publish(
        page, "host_time", HEADS, rows, answer(results), shown("Host time: ratios with their intervals", "host_time")
    )


def main() -> None:
    """Measures and prints the table, and publishes it with a page."""
    parser = argparse.ArgumentParser(description="Time of the host per operation.")
    parser.add_argument("--rounds", type=int, default=30, help="rounds that count [default: 30]")
    labels = [job.label for job in JOBS]
    parser.add_argument("--jobs", nargs="+", choices=labels, default=labels, help="[default: all]")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="nccl: GPUs [default: gloo]")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="write data file, picture and summary")
    options = parser.parse_args()
    if options.markdown is not None:
        ready()
    report(run([job for job in JOBS if job.label in options.jobs], options.rounds, options.backend), options.markdown)


if __name__ == "__main__":
    main()
