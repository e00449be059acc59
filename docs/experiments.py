"""The paper's experiments by the planner: what the predictions say beside what was measured on Piz Daint.

    .venv/bin/python docs/experiments.py [--update]

Every figure is asked of ``chimera plan``; the tables of its page stand between marks, where ``--update`` writes
them. The paper's numbers are those of its text (section 4); its figures hold more that the text does not say.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from chimera_ir.profile.costs import WorkProfile
from chimera_ir.profile.read import read_profile
from chimera_ir.profile.write import write_profile
from chimera_ir.source import Source

HERE = Path(__file__).resolve().parent
INPUTS = HERE.parent / "examples" / "paper"
PLAN = (sys.executable, "-c", "from chimera_ir.start import plan; plan()")
COMPILE = (sys.executable, "-c", "from chimera_ir.start import compile_; compile_()")

BASELINES = ("gpipe", "gems", "dapple", "pipedream_2bw", "pipedream")
GREEDY = ("chimera", "--set", "f=1", "--greedy")
"""Chimera as section 3.4 chooses it: two pipelines, and for each W and D the largest B that fits."""

GIB = 2**30

Choice = dict[str, object]
Row = Sequence[str]


@dataclass(frozen=True)
class Case:
    """A network on so many workers of a cluster, with a mini-batch of so many items."""

    profile: str
    workers: int
    mini_batch: int
    cluster: str = "piz_daint"


BERT, GPT, LAYERS = "bert48", "gpt2", "gpt2_layers"


@cache
def choices(case: Case, scheme: str, *options: str, equal: bool = False) -> tuple[Choice, ...]:
    """What chimera plan finds for a scheme, best first; ``equal``: all stages take as long as one in the middle."""
    with tempfile.TemporaryDirectory() as folder:
        profile = INPUTS / f"{case.profile}.profile.toml"
        if equal:
            profile = Path(folder) / "equal.toml"
            profile.write_text(equal_stages(case.profile), encoding="utf-8")
        files = ("--profile", str(profile), "--cluster", str(INPUTS / f"{case.cluster}.cluster.toml"))
        size = ("--workers", str(case.workers), "--mini-batch", str(case.mini_batch))
        command = [*PLAN, *files, *size, "--scheme", scheme, "--json", "--top", "1000", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 1 and done.stdout:
            return ()
        if done.returncode:
            raise SystemExit(done.stderr)
        return tuple(json.loads(done.stdout)["choices"])


@cache
def equal_stages(profile: str) -> str:
    """The profile of a model whose stages are all like the one in the middle, as a file's text; bytes stay."""
    text = (INPUTS / f"{profile}.profile.toml").read_text(encoding="utf-8")
    found = read_profile(Source(profile, text))
    assert isinstance(found, WorkProfile)
    depths = {}
    for depth, stages in found.counts.depths.items():
        middle = stages[depth // 2 - 1 if depth > 2 else 0]
        depths[depth] = tuple(
            replace(
                stage,
                at={size: replace(timing, times=middle.at[size].times) for size, timing in stage.at.items()},
            )
            for stage in stages
        )
    return write_profile(WorkProfile(replace(found.counts, depths=depths)))


def best(case: Case, scheme: str, *options: str) -> Choice | None:
    """The first choice by the replay."""
    found = [each for each in choices(case, scheme, *options) if each["T_replay"] is not None]
    return max(found, key=throughput, default=None)


def by_the_paper(case: Case) -> Choice:
    """Chimera as section 3.4 chooses it: two pipelines, the largest B that fits, W and D by equation 1."""
    found = choices(case, *GREEDY)
    return min(found, key=lambda each: number(each, "T") / number(each, "mini_batch"))


def number(choice: Choice, key: str) -> float:
    """A figure of a choice."""
    value = choice[key]
    assert isinstance(value, int | float)
    return value


def throughput(choice: Choice) -> float:
    """Items per second by the replay, or by equation 1 where there was none."""
    seconds = choice["T_replay"] if choice["T_replay"] is not None else choice["T"]
    assert isinstance(seconds, float)
    return number(choice, "mini_batch") / seconds


def described(choice: Choice | None) -> str:
    """W, D, B, and whether it recomputes."""
    if choice is None:
        return "does not fit"
    more = ", R" if choice["recompute"] else ""
    return f"W={choice['W']}, D={choice['D']}, B={choice['B']}{more}"


def off(ours: float, paper: float) -> str:
    """By how much ours differs."""
    return f"{100 * (ours / paper - 1):+.0f}%"


def selection() -> Iterator[Row]:
    """Figure 15: the configurations that equation 1 chooses (section 4.2.2)."""
    cases = (
        ("Bert-48, 32 nodes, mini-batch 256", Case(BERT, 32, 256), ("W=8, D=4",)),
        ("GPT-2, 512 nodes, mini-batch 512", Case(GPT, 512, 512), ("W=16, D=32", "W=64, D=8")),
    )
    for name, case, wanted in cases:
        found = sorted(
            choices(case, *GREEDY),
            key=lambda each: number(each, "T") / number(each, "mini_batch"),
        )
        equal = {described(each): number(each, "T") for each in choices(case, *GREEDY, equal=True)}
        for place, each in enumerate(found, 1):
            here = described(each)
            mark = next((want for want in wanted if here.startswith(want + ",")), "")
            paper = "" if not mark else "chosen" if mark == wanted[0] else "best measured, 1.7 % ahead"
            replayed = each["T_replay"]
            yield (
                name if place == 1 else "",
                here,
                f"{number(each, 'T'):.2f}",
                f"{equal[here]:.2f}" if here in equal else "",
                f"{replayed:.2f}" if isinstance(replayed, float) else "",
                f"{max(numbers(each)) / GIB:.1f}",
                paper,
            )


def splits() -> Iterator[Row]:
    """The same for GPT-2, with the split of its layers whose slowest stage is fastest."""
    even = {(each["W"], each["D"], each["B"]): each for each in choices(Case(GPT, 512, 512), *GREEDY)}
    found = [each for each in choices(Case(LAYERS, 512, 512), *GREEDY) if isinstance(each["T_replay"], float)]
    for each in sorted(found, key=lambda each: number(each, "T_replay")):
        before, split = even.get((each["W"], each["D"], each["B"])), numbers(each, "split")
        counts = [end - first for first, end in pairwise((*split, 66))]  # 64, the embeddings and the projection
        yield (
            described(each),
            f"{counts[0]}, {min(counts[1:-1])} to {max(counts[1:-1])}, {counts[-1]}",
            *(f"{number(of, key):.2f}" if of else "does not fit" for key in ("T", "T_replay") for of in (before, each)),
        )


def numbers(choice: Choice, key: str = "memory") -> list[int]:
    """The figures of a choice: bytes by worker, or the first layer of each stage."""
    found = choice[key]
    assert isinstance(found, list)
    return found


def optima() -> Iterator[Row]:
    """Section 4.2.1: the best configuration of each baseline."""
    bert = {
        "gpipe": "W=8, D=4, B=4, R",
        "gems": "W=8, D=4, B=32",
        "dapple": "W=8, D=4, B=4",
        "pipedream_2bw": "W=8, D=4, B=16, R",
        "pipedream": "W=4, D=8, B=12",
    }
    for scheme in BASELINES:
        found = best(Case(BERT, 32, 512), scheme)
        yield scheme, bert[scheme], described(found)


def spread() -> Iterator[Row]:
    """Section 4.1: the most and the least that a worker needs, without recomputation, of 32 nodes."""
    cases = ((Case(BERT, 32, 512), (4, 8, 16), 8), (Case(GPT, 32, 512), (8, 16, 32), 1))
    for scheme in (*BASELINES, "chimera"):
        yield (
            scheme,
            *(_spread(compiled(case, scheme, depth, size)) for case, depths, size in cases for depth in depths),
        )


def compiled(case: Case, scheme: str, depth: int, size: int) -> list[int]:
    """Bytes by worker of a scheme at D stages and micro-batches of so many items; none if there is no such thing."""
    copies = case.workers // depth
    settings = {"D": depth, **({} if scheme == "pipedream" else {"N": case.mini_batch // copies // size})}
    options = [f"--set={name}={value}" for name, value in settings.items()]
    files = [f"--profile={INPUTS / case.profile}.profile.toml", f"--cluster={INPUTS / case.cluster}.cluster.toml"]
    command = [*COMPILE, scheme, *options, *files, f"--copies={copies}", f"--micro-batch-size={size}", "--emit=report"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["prediction"]["memory"] if done.returncode == 0 else []
    assert isinstance(found, list)
    return found


def _spread(each: Sequence[int]) -> str:
    if not each:
        return "none"
    least, most = min(each) / GIB, max(each) / GIB
    shown = f"{least:.1f}..{most:.1f}"
    return f"**{shown}**" if most > 16280 / 1024 - 1 else shown


def speed_ups() -> Iterator[Row]:
    """Sections 4.2.3: Chimera over the best of each baseline."""
    cases = (
        ("Bert-48, 64 nodes", Case(BERT, 64, 1024), (1.32, 2.41, 1.19, 1.17, 1.94)),
        ("GPT-2, 2,048 nodes", Case(GPT, 2048, 2048), (1.42, 2.34, 1.38, 1.16, 2.01)),
    )
    for name, case, papers in cases:
        own = by_the_paper(case)
        yield f"{name}: chimera, {described(own)}", "", "", "", ""
        yield from _over(case, own, dict(zip(BASELINES, papers, strict=True)))


def _over(case: Case, own: Choice, papers: dict[str, float]) -> Iterator[Row]:
    for scheme, paper in papers.items():
        other = best(case, scheme)
        if other is None:
            yield f"over {scheme}", "does not fit", f"{paper:.2f}", "", ""
        else:
            ours = throughput(own) / throughput(other)
            yield f"over {scheme}", described(other), f"{paper:.2f}", f"{ours:.2f}", off(ours, paper)


def scaling() -> Iterator[Row]:
    """Section 4.2.3: weak scaling of GPT-2 from 512 to 2,048 nodes, per node."""
    small, large = by_the_paper(Case(GPT, 512, 512)), by_the_paper(Case(GPT, 2048, 2048))
    ours = throughput(large) / throughput(small) / 4
    yield "GPT-2, 512 to 2,048 nodes", "91.4%", f"{100 * ours:.1f}%", off(ours, 0.914)


def pipelines() -> Iterator[Row]:
    """Section 4.4: one, two, four and eight pipelines for a GPT-2 of 32 layers on 64 nodes."""
    case = Case("gpt2_32", 64, 64)
    for depth in (32, 16):
        kinds = (("1", "dapple", ()), *((str(2 * f), "chimera", ("--set", f"f={f}")) for f in (1, 2, 4)))
        found = [(name, best(case, scheme, "--set", f"D={depth}", *more)) for name, scheme, more in kinds]
        rates = [(name, throughput(each) if each else 0.0) for name, each in found]
        said = "4 best" if depth == 32 else "2 best, 4 worse than 2"
        yield f"D={depth}", *(f"{rate:.1f}" if rate else "does not fit" for _, rate in rates), said


def strategies() -> Iterator[Row]:
    """Section 4.2.2: eager-sync-opt over eager-sync on 64 nodes, D=4, B=8."""
    case = Case(BERT, 64, 1024)
    found = {
        sync: next(
            each for each in choices(case, "chimera", "--set", "f=1", "--set", "D=4", "--sync", sync) if each["B"] == 8
        )
        for sync in ("eager_opt", "eager", "lazy")
    }
    for other, paper in (("eager", "1.09"), ("lazy", "")):
        ours = [number(found[other], key) / number(found["eager_opt"], key) for key in ("T", "T_replay")]
        yield f"eager_opt over {other}", paper, f"{ours[0]:.2f}", f"{ours[1]:.2f}", off(ours[1], 1.09) if paper else ""


WAYS = ("chimera", "chimera_doubling", "chimera_halving")


def large_batches() -> Iterator[Row]:
    """Section 4.3: the three ways to more micro-batches."""
    for name, case, sizes in (
        ("Bert-48, 32 nodes", Case(BERT, 32, 0), (1024, 2048, 4096)),
        ("GPT-2, 512 nodes", Case(GPT, 512, 0), (1024, 2048)),
    ):
        for mini_batch in sizes:
            here = replace(case, mini_batch=mini_batch)
            depth = ("--set", f"D={4 if case.profile == BERT else 8}")
            rates = [_rate(best(here, way, *depth, *(("--set", "f=1") if way == "chimera" else ()))) for way in WAYS]
            yield f"{name}, {mini_batch:,}", *(f"{rate:.0f}" if rate else "does not fit" for rate in rates)


def _rate(choice: Choice | None) -> float:
    return throughput(choice) if choice else 0.0


def large_speed_ups() -> Iterator[Row]:
    """Section 4.3: averages of the best way over each baseline."""
    papers = (
        ("Bert-48, direct", Case(BERT, 32, 0), "chimera", (1024, 2048, 4096), (1.13, 2.07, 1.06)),
        ("GPT-2, doubling", Case(GPT, 512, 0), "chimera_doubling", (1024, 2048), (1.18, 2.60, 1.34, 1.13)),
    )
    for name, case, way, sizes, said in papers:
        options = ("--set", f"D={4 if case.profile == BERT else 8}", *(("--set", "f=1") if way == "chimera" else ()))
        for scheme, paper in zip(BASELINES, said, strict=False):
            ratios = []
            for mini_batch in sizes:
                here = replace(case, mini_batch=mini_batch)
                own, other = best(here, way, *options), best(here, scheme)
                assert own is not None
                assert other is not None
                ratios.append(throughput(own) / throughput(other))
            ours = math.fsum(ratios) / len(ratios)
            yield name, f"over {scheme}", f"{paper:.2f}", f"{ours:.2f}", off(ours, paper)


def other_cluster() -> Iterator[Row]:
    """Section 4.2.3: Bert-48 of length 512 on 32 V100."""
    case = Case("bert48_512", 32, 256, "v100")
    own = by_the_paper(case)
    groups = (("flushing", ("gpipe", "gems", "dapple"), (1.10, 2.39)), ("others", BASELINES[3:], (1.05, 1.89)))
    for name, schemes, (low, high) in groups:
        found = [throughput(own) / _rate(best(case, scheme)) for scheme in schemes]
        yield (
            name,
            f"{low:.2f}..{high:.2f}",
            f"{min(found):.2f}..{max(found):.2f}",
            f"{off(min(found), low)}, {off(max(found), high)}",
        )


TABLES: dict[str, tuple[Row, Callable[[], Iterator[Row]]]] = {
    "selection": (
        ("", "", "T, s", "T if stages were equal, s", "replay, s", "GiB", "paper"),
        selection,
    ),
    "splits": (
        ("", "layers: first stage, between, last", "T, s, even", "T, s", "replay, s, even", "replay, s"),
        splits,
    ),
    "spread": (("", *(f"Bert-48 D={d}" for d in (4, 8, 16)), *(f"GPT-2 D={d}" for d in (8, 16, 32))), spread),
    "optima": (("", "paper", "ours"), optima),
    "speed-ups": (("", "", "paper", "ours", "error"), speed_ups),
    "scaling": (("", "paper", "ours", "error"), scaling),
    "pipelines": (("", *(f"{n} pipelines" for n in (1, 2, 4, 8)), "paper"), pipelines),
    "strategies": (("", "paper", "equation 1", "replay", "error"), strategies),
    "large": (("mini-batch", *WAYS), large_batches),
    "large-speed-ups": (("", "", "paper", "ours", "error"), large_speed_ups),
    "v100": (("chimera over", "paper", "ours", "error"), other_cluster),
}


def table(name: str) -> str:
    """A table of the page."""
    heads, rows = TABLES[name]
    head, *lines = (f"| {' | '.join(line)} |" for line in (heads, *rows()))
    return "\n".join([head, f"|{'---|' * len(heads)}", *lines])


def main() -> int:
    """Prints the tables, or writes them into the page; without ``--update`` also says where the page differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the tables into the page")
    parser.add_argument("--only", choices=list(TABLES), nargs="+", help="[default: all]")
    options = parser.parse_args()
    page = HERE / "evidence" / "experiments.md"
    text, differing = page.read_text(encoding="utf-8"), []
    for name in options.only or TABLES:
        found = table(name)
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        new = re.sub(f"{begin}.*?{end}", lambda _, b=begin, f=found, e=end: f"{b}\n\n{f}\n\n{e}", text, flags=re.DOTALL)
        sys.stdout.write(f"{name}\n\n{found}\n\n")
        if new != text:
            differing.append(name)
        text = new
    if options.update:
        page.write_text(text, encoding="utf-8")
        return 0
    if differing:
        sys.stderr.write(f"docs/evidence/experiments.md says something else: {', '.join(differing)}\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
