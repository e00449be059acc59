"""Predicted against measured: equation 1 and the replay beside the median step of the generated programs.

    .venv/bin/python benchmarks/accuracy.py [--parts rehearsal links compute] [--depths 4 8] [--forward 10 20]
                                            [--steps 6] [--schemes chimera ..] [--markdown PAGE]

`rehearsal`: stages sleep F forward and 2 F backward (`train.py --rehearse`), messages are small, links are what
`chimera profile links` finds on as many ranks in the same launch. `links`: the same with larger messages, every rank in
a network namespace of its own behind a link of limited bandwidth; skipped where that is not permitted. `compute`: two
ranks train a real model, each with one thread; stages are measured by `chimera profile stages` on both cores at once.
Programs take turns, there also with profiles and links: what slows the machine down for a while meets all of them.
Each rank has profiles of its own, for two cores are seldom equally fast.

A step of a rehearsal with a flush begins at a barrier: it is compared with the seconds of a replay. Steps of training
follow each other, and do not take equally long: they are compared with `pace`, and with what is `expected`, which is
`pace` with the noise of the profile. The first step does not count, of training the first three, nor do the warm-up and
the drain of a scheme without a flush.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from commands import TORCHRUN, torchrun
from namespaces import Limit, NotPermitted, environment, joined
from tables import circumstances, publish, put, table

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.errors import TextError
from chimera_ir.ir.levels import Program
from chimera_ir.predict.equation import equation
from chimera_ir.predict.replay import expected, pace, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import Cluster, Link
from chimera_ir.profile.costs import ModelProfile, StageCosts, Timing
from chimera_ir.profile.read import read_cluster, read_profile
from chimera_ir.request import Request
from chimera_ir.source import Source

HERE = Path(__file__).resolve().parent
TINY, WIDE, GPT = HERE.parent / "docs/examples/tiny.py", HERE / "ranks/wide.py", HERE.parent / "examples/gpt.py"
PROFILE = (sys.executable, "-c", "from chimera_ir.start import profile; profile()")
BATCH = 2
"""Items of a micro-batch in a rehearsal; some schemes halve it."""

WARM_UP, COUNTED = 3, 5
"""Steps of training that do not count, as rounds of a profile do not, and the least that do, in every turn."""

PROFILED_ANEW, ROUNDS = 5, 8
"""Before so many programs stages are measured, each time in so many rounds at most: some moments last for minutes."""

Table = tuple[Sequence[str], list[list[str]]]
"""The heads of a table, and its rows."""

Predicted = Callable[[Program, Setting], float]
"""Seconds of an update."""

FROM_A_BARRIER: dict[str, Predicted] = {
    "equation 1": lambda program, setting: equation(program, setting).seconds,
    "replay": lambda program, setting: replay(program, setting).seconds,
}
ONE_AFTER_ANOTHER: dict[str, Predicted] = FROM_A_BARRIER | {"replay": pace, "expected": expected}
"""What is compared, in the order of the columns; the last one is what should be within the bound."""


@dataclass(frozen=True)
class Run:
    """A program to be run and predicted: where it lies, in how many turns, for how many steps, and which count."""

    scheme: str
    program: Program
    folder: Path
    forward: float
    steps: int
    counted: slice
    turns: int

    def metrics(self, turn: int) -> Path:
        """Where train.py writes the seconds of the steps."""
        return self.folder / f"{self.forward:g}-{turn}.json"

    def command(self, turn: int, model: Path, size: int, rehearsed: bool) -> list[str]:
        """The command line of train.py."""
        sleeps = ["--rehearse", ",".join(f"{k}={s}" for k, s in slept(self.forward).items())] if rehearsed else []
        common = ["--model", str(model), "--micro-batch-size", str(size), "--steps", str(self.steps)]
        return [str(self.folder / "train.py"), *common, *sleeps, "--metrics", str(self.metrics(turn))]

    def seconds(self) -> list[float]:
        """The steps that count, of all turns."""
        taken = (json.loads(self.metrics(turn).read_text())["step_seconds"] for turn in range(self.turns))
        return [second for seconds in taken for second in seconds[self.counted]]


def slept(forward: float) -> dict[str, float]:
    """Seconds of every kind of operation: a backward sleeps twice as long as a forward, each half of one as long.

    A pair sleeps as long as its two parts.
    """
    return {"F": forward, "B": 2 * forward, "I": forward, "W": forward, "pair": 3 * forward}


def compiled(scheme: str, depth: int, micro_batches: int, place: Path) -> tuple[Program, Path] | None:
    """A library scheme in a directory, with N micro-batches if it has that parameter; None if it refuses that N."""
    names = library.parameters(scheme)
    settings = {"P" if "P" in names else "D": depth}
    if "N" in names:
        settings["N"] = micro_batches
    elif micro_batches != depth:
        return None
    compilation, folder = Compilation(Request(library.source(scheme), settings)), place / f"{scheme}-{micro_batches}"
    try:
        compilation.write(folder)
    except TextError as refused:
        print(f"{scheme} with N = {micro_batches} is left out:\n{refused}", file=sys.stderr)
        return None
    return compilation.verified.program, folder


def runs(
    options: argparse.Namespace, depth: int, forward: Sequence[float], place: Path, warm_up: int = 1, least: int = 1
) -> Iterator[Run]:
    """Everything that is measured on so many ranks; of each turn at least so many steps count, after a warm-up."""
    many = [k * depth for k in options.times]
    made = [(scheme, compiled(scheme, depth, n, place)) for n in many for scheme in options.schemes]
    steps = max(least, -(-options.steps // options.turns))
    for seconds in forward:
        for scheme, found in made:
            if found is None:
                continue
            program, folder = found
            header = program.header
            if not header.asynchronous:
                yield Run(scheme, program, folder, seconds, warm_up + steps, slice(warm_up, None), options.turns)
                continue
            fill = max(warm_up, 1 + -(-2 * depth // header.whole_micro_batches))
            count = max(steps, 4 * depth // header.whole_micro_batches)
            yield Run(scheme, program, folder, seconds, 2 * fill + count, slice(fill, fill + count), options.turns)


def profiled(path: Path) -> tuple[StageCosts, ...]:
    """The stages of a profile with one depth, in seconds."""
    profile = read_profile(Source(str(path), path.read_text()))
    assert isinstance(profile, ModelProfile)
    (stages,) = profile.depths.values()
    return stages


def middle(profiles: Sequence[tuple[StageCosts, ...]]) -> tuple[StageCosts, ...]:
    """The same stages with the medians of what was measured, spreads included."""
    return tuple(
        replace(
            several[0],
            step=statistics.median(one.step for one in several),
            step_noise=statistics.median(one.step_noise or 0.0 for one in several),
            at={size: median_timing([one.at[size] for one in several]) for size in several[0].at},
        )
        for several in zip(*profiles, strict=True)
    )


def median_timing(several: Sequence[Timing]) -> Timing:
    """The medians of all times, and of their spread."""
    return replace(
        several[0],
        times={key: statistics.median(one.times[key] for one in several) for key in several[0].times},
        noise=statistics.median(one.noise or 0.0 for one in several),
    )


def middle_cluster(clusters: Sequence[Cluster]) -> Cluster:
    """The same cluster with the medians of what was measured of its links."""
    within, between, sums = (
        median_link([getattr(one, name) for one in clusters]) for name in ("within", "between", "sums")
    )
    return replace(clusters[0], within=within, between=between, sums=sums)


def median_link(several: Sequence[Link]) -> Link:
    """The medians of alpha, beta and the overhead."""
    return replace(
        several[0],
        alpha=statistics.median(one.alpha for one in several),
        beta=statistics.median(one.beta for one in several),
        overhead=statistics.median(one.overhead for one in several),
    )


def counted(model: Path, depth: int, size: int, place: Path) -> tuple[StageCosts, ...]:
    """The stages of a model, by the sizes alone of what they send and sum."""
    out = place / "counted.toml"
    words = ["stages", str(model), "--stages", str(depth), "--micro-batch-size", str(size), "--count"]
    subprocess.run([*PROFILE, *words, "--out", str(out)], check=True)
    profile = read_profile(Source(str(out), out.read_text()))
    assert not isinstance(profile, ModelProfile)
    return profile.counts.depths[depth]


Launch = Callable[[Sequence[Sequence[str]]], None]
"""Runs command lines one after another on all ranks."""


def here(ranks: int, place: Path) -> Launch:
    """All ranks on this machine."""

    def launch(plan: Sequence[Sequence[str]]) -> None:
        torchrun((f"--nproc-per-node={ranks}", str(HERE / "ranks/attempts.py"), written(plan, place)))

    return launch


def apart(ranks: int, limit: Limit, place: Path) -> Launch:
    """Every rank in a network namespace of its own, behind a limited link."""

    def launch(plan: Sequence[Sequence[str]]) -> None:
        listed = written(plan, place)
        with joined(ranks, limit) as machines:
            common = [*TORCHRUN, f"--nnodes={ranks}", "--nproc-per-node=1", f"--master-addr={machines[0].address}"]
            agents = []
            try:
                for number, machine in enumerate(machines):
                    words = [*common, f"--node-rank={number}", str(HERE / "ranks/attempts.py"), listed]
                    agents.append(subprocess.Popen(machine.command(words), env=environment(machine)))
                left = [agent.wait() for agent in agents]
                if any(left):
                    raise SystemExit("a rank failed; what it said stands above")
            finally:
                for agent in agents:
                    agent.terminate()

    return launch


def written(plan: Sequence[Sequence[str]], place: Path) -> str:
    """The file of a plan."""
    file = place / "plan.json"
    file.write_text(json.dumps([list(words) for words in plan]))
    return str(file)


def rehearsed(
    options: argparse.Namespace, depth: int, model: Path, launch: Launch, place: Path, bound: float
) -> list[list[str]]:
    """A row for every scheme at a depth, of rehearsals on links that are measured in the same launch."""
    cluster = place / "cluster.toml"
    wanted, turns = [*runs(options, depth, options.seconds, place)], range(options.turns)
    measured = ["chimera-profile", "links", "--largest", "1024", "--sum-ranks", "2", "--out", str(cluster)]
    launch([measured, *(run.command(turn, model, BATCH, rehearsed=True) for turn in turns for run in wanted)])
    print(cluster.read_text(), file=sys.stderr)
    found = read_cluster(Source(str(cluster), cluster.read_text()))
    depths = {run.program.header.stages for run in wanted}
    stages = {stages: counted(model, stages, BATCH, place) for stages in depths}
    rows = []
    for run in wanted:
        cut = stages[run.program.header.stages]
        sleeping = tuple(one.slept(BATCH, slept(run.forward)) for one in cut)
        rows.append(row(run, Setting(sleeping, found, 1, BATCH), bound, FROM_A_BARRIER))
    return rows


def heads(predictions: Iterable[str]) -> list[str]:
    """The headings of a table."""
    foreseen, off = [f"{name}, ms" for name in predictions], [f"{name.split()[0]} off" for name in predictions]
    return ["", "D", "N", "F, ms", *foreseen, "measured, ms", *off, "within"]


def row(run: Run, setting: Setting, bound: float, predictions: Mapping[str, Predicted]) -> list[str]:
    """Predictions beside the measurement."""
    foreseen, taken = [each(run.program, setting) for each in predictions.values()], run.seconds()
    low, mid, high = statistics.quantiles(taken, n=4) if len(taken) > 1 else taken * 3
    header, slowest = run.program.header, max(one.at[setting.micro_batch_size].times["F"] for one in setting.stages)
    off = [each / mid - 1 for each in foreseen]
    return [
        *(run.scheme, str(header.stages), str(header.whole_micro_batches), f"{1000 * slowest:.4g}"),
        *(f"{1000 * each:.1f}" for each in foreseen),
        f"{1000 * mid:.1f} ({1000 * low:.1f}..{1000 * high:.1f})",
        *(f"{each:+.1%}" for each in off),
        "yes" if abs(off[-1]) <= bound else "no",
    ]


def rehearsal(options: argparse.Namespace) -> Table:
    """Sleeping stages on this machine."""
    rows = []
    for depth in options.depths:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            rows += rehearsed(options, depth, TINY, here(depth, place), place, 0.03)
    return heads(FROM_A_BARRIER), rows


def links(options: argparse.Namespace) -> Table:
    """Sleeping stages with a limited link each; raises NotPermitted where this machine has no network namespaces."""
    rows = []
    for depth in options.depths:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            rows += rehearsed(options, depth, WIDE, apart(depth, Limit(options.rate), place), place, 0.05)
    return heads(FROM_A_BARRIER), rows


def compute(options: argparse.Namespace) -> Table:
    """A real model on two ranks of one thread, in turns with its profile and its links."""
    depth, size, turns = 2, options.micro_batch_size, range(options.turns)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        clusters = [place / f"cluster-{turn}.toml" for turn in turns]
        wanted = [*runs(options, depth, [0.0], place, WARM_UP, COUNTED)]
        parts = [wanted[first : first + PROFILED_ANEW] for first in range(0, len(wanted), PROFILED_ANEW)]
        sizes = ",".join(str(each) for each in (size // 2, size, 2 * size))
        stages = ["chimera-profile", "stages", str(GPT), "--stages", str(depth), "--micro-batch-size", sizes]
        network = ["chimera-profile", "links", "--sum-ranks", "2"]
        plan, profiles = [], []
        for turn in turns:
            plan.append([*network, "--out", str(clusters[turn])])
            for number, part in enumerate(parts):
                profiles.append(str(place / f"profile-{turn}-{number}-{{rank}}.toml"))
                plan.append([*stages, "--rounds", str(ROUNDS), "--out", profiles[-1]])
                plan += [run.command(turn, GPT, size, rehearsed=False) for run in part]
        here(depth, place)(plan)
        by_rank = [[Path(each.replace("{rank}", str(rank))) for each in profiles] for rank in range(depth)]
        print(*(file.read_text() for file in [*chain(*by_rank), *clusters]), file=sys.stderr)
        found = middle_cluster([read_cluster(Source(str(each), each.read_text())) for each in clusters])
        ranks = [middle([profiled(profile) for profile in several]) for several in by_rank]
        settings = [Setting(held(run.program, ranks), found, 1, size) for run in wanted]
        rows = [row(run, setting, 0.1, ONE_AFTER_ANOTHER) for run, setting in zip(wanted, settings, strict=True)]
        return heads(ONE_AFTER_ANOTHER), rows


def held(program: Program, ranks: Sequence[tuple[StageCosts, ...]]) -> tuple[StageCosts, ...]:
    """Each stage as the slowest of the ranks that hold it found it: the others wait for its gradients.

    One copy of the workers, so that a worker is a rank.
    """
    return tuple(
        max((ranks[worker][stage] for worker in workers), key=busy)
        for stage, workers in enumerate(program.header.holders)
    )


def busy(stage: StageCosts) -> float:
    """Seconds of a forward and a backward, of all sizes."""
    return sum(each.times["F"] + each.times["B"] for each in stage.at.values())


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], Table]]] = {
    "rehearsal": ("Rehearsed", rehearsal),
    "links": ("Rehearsed over limited links", links),
    "compute": ("Trained", compute),
}


def main() -> None:
    """Measures and prints the tables, and publishes them with a page."""
    parser = argparse.ArgumentParser(description="Predicted against measured.")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--schemes", nargs="+", choices=library.names(), default=[*library.names()])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8], metavar="D")
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4], metavar="K", help="N = K D [default: 1 4]")
    parser.add_argument("--forward", type=float, nargs="+", default=[10, 20], metavar="MS", help="F [default: 10 20]")
    parser.add_argument("--steps", type=int, default=6, help="steps that count, at least [default: 6]")
    parser.add_argument("--turns", type=int, default=3, help="in which they are taken [default: 3]")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="of the real model [default: 8]")
    parser.add_argument("--rate", default="200mbit", help="of a limited link, as tc has it [default: 200mbit]")
    parser.add_argument(
        "--markdown", type=Path, metavar="PAGE", help="write data files, and summaries between the page's marks"
    )
    options = parser.parse_args()
    options.seconds = [each / 1000 for each in options.forward]
    for part in options.parts:
        title, measure = PARTS[part]
        print(f"### {title}\n\n{circumstances()}\n", flush=True)
        try:
            columns, rows = measure(options)
        except NotPermitted as error:
            refusal = f"Skipped, for this machine does not permit it: {error}"
            print(refusal)
            if options.markdown is not None:
                put(options.markdown, f"accuracy {part}", refusal)
            continue
        print(table(columns, rows), flush=True)
        if options.markdown is not None:
            publish(options.markdown, f"accuracy {part}", columns, rows)


if __name__ == "__main__":
    main()
