"""Changed programs under the backend that keeps NCCL's rules, and under gloo: which of them fail.

    .venv/bin/python -m tests.e2e.strict_mutants [--count 100] [--seed 0]

A mutant is a program of the library with one change to the script of one worker. It runs with ``--check-only``, which
compares gradients, weights and losses with training in one process. What trains under the rules does so again with
other delays: only then it is counted as harmless. One that fails with gloo or with other delays, and not the first time
under the rules, is counted as missed.
"""

import argparse
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from chimera_ir import library
from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.e2e.strict_matrix import RULES, passed
from tests.e2e.test_strict import STRICT, lines_of
from tests.sizes import on_workers

SCHEMES = ("chimera", "dapple", "zb_h1", "interleaved", "pipedream_2bw")
REPLICATED = ("chimera", "gems", "dualpipe")
"""Schemes whose workers launch several sums."""
WORKERS = 4
TOGETHER = 16
"""Jobs under one torchrun."""
PATIENCE = {"STRICT_PATIENCE": "4"}
OTHER_DELAYS = 2
POST = r"    (in_\w+\.irecv|out_\w+\.isend|stage\d\.all_reduce)\("
SUM = r"    stage\d\.all_reduce\("

Edit = Callable[[list[str]], list[str]]


def places(lines: Sequence[str], pattern: str) -> list[int]:
    """The lines that begin with a pattern."""
    return [place for place, line in enumerate(lines) if re.match(pattern, line)]


def exchanged(lines: list[str], first: int, second: int) -> list[str]:
    """Two lines in each other's place."""
    lines[first], lines[second] = lines[second], lines[first]
    return lines


def swapped(lines: list[str], rng: random.Random) -> list[str]:
    """Two posts, neighbours among the posts, change places."""
    posts = places(lines, POST)
    number = rng.randrange(len(posts) - 1)
    return exchanged(lines, posts[number], posts[number + 1])


def dropped(lines: list[str], rng: random.Random) -> list[str]:
    """One post is not made; a send or a sum is then not waited for either."""
    place = rng.choice(places(lines, POST))
    sent = re.match(r"    (out_\w+)\.isend\(([^,]+),", lines[place])
    summed = re.match(r"    (stage\d)\.all_reduce\((\w*)\)", lines[place])
    gone = [place]
    if sent:
        gone += places(lines, re.escape(f"    {sent[1]}.wait({sent[2]})"))
    if summed:
        gone += places(lines, re.escape(f"    {summed[1]}.wait_all_reduce({summed[2]})"))
    return [line for number, line in enumerate(lines) if number not in gone]


def unwaited(lines: list[str], rng: random.Random) -> list[str]:
    """What comes is used without a wait, or weights are stepped before the wait for their sum."""
    waits = places(lines, r"    in_\w+\.wait\(") + places(lines, r"    stage\d\.wait_all_reduce\(")
    place = rng.choice(waits)
    if "wait_all_reduce" not in lines[place]:
        return [*lines[:place], *lines[place + 1 :]]
    stage = lines[place].split(".")[0]
    step = next(later for later in places(lines, rf"{stage}\.step\(") if later > place)
    return exchanged(lines, place, step)


def crossed(lines: list[str], rng: random.Random) -> list[str]:
    """Two sums are launched in the other order."""
    return exchanged(lines, *sorted(rng.sample(places(lines, SUM), 2)))


def redirected(directory: Path, worker: int, rng: random.Random) -> None:
    """The messages of one link go to another worker, or come from it: one that the worker exchanges messages with."""
    program, script = directory / "program.json", directory / f"rank_{worker}.py"
    facts = json.loads(program.read_text())
    mine = facts["ranks"][worker]
    routes = [(way, route) for way in ("incoming", "outgoing") for route in mine[way]]
    way, route = rng.choice(routes)
    source, target, right = route
    wrong = rng.choice([other for other in range(WORKERS) if other not in (worker, right)])
    route[2] = wrong
    program.write_text(json.dumps(facts))
    call = f"lane.{way}({source}, {target}, worker="
    text = script.read_text()
    assert call in text
    script.write_text(text.replace(f"{call}{right})", f"{call}{wrong})"))


KINDS: dict[str, Callable[[list[str], random.Random], list[str]] | None] = {
    "two posts swapped": swapped,
    "a post dropped": dropped,
    "another peer": None,
    "sums in another order": crossed,
    "a use before its wait": unwaited,
}


@dataclass(frozen=True)
class Mutant:
    """A changed program; ``name`` says what was changed, for those who look for it."""

    kind: str
    name: str
    directory: Path

    def by_gloo(self) -> Job:
        """The mutant with gloo."""
        return Job(f"{self.name} gloo", self.directory, ("--check-only", "--timeout", "4"))

    def by_rules(self, seed: int) -> Job:
        """The mutant under the strict backend."""
        name, words = f"{self.name} strict {seed}", (*STRICT, "--timeout", "8")
        return Job(name, self.directory, words, environment=RULES | PATIENCE | {"STRICT_SEED": str(seed)})


def mutants(folder: Path, count: int, seed: int) -> list[Mutant]:
    """As many changed programs, of all kinds and schemes in turn."""
    rng = random.Random(seed)
    made: list[Mutant] = []
    for number in range(count):
        kind, change = list(KINDS.items())[number % len(KINDS)]
        schemes = REPLICATED if change is crossed else SCHEMES
        scheme = schemes[number // len(KINDS) % len(schemes)]
        directory = compiled(folder / str(number), scheme, **on_workers(scheme, WORKERS, 8))
        worker = rng.randrange(WORKERS)
        if change is None:
            redirected(directory, worker, rng)
        else:
            script = directory / f"rank_{worker}.py"
            script.write_text(lines_of(script.read_text(), partial(change, rng=rng)))
        made.append(Mutant(kind, f"{number} {scheme} worker {worker}", directory))
    return made


def results(folder: Path, jobs: Sequence[Job]) -> dict[str, Outcome]:
    """What became of jobs, which run in portions."""
    ended: dict[str, Outcome] = {}
    for first in range(0, len(jobs), TOGETHER):
        ended |= run_all(folder, WORKERS, jobs[first : first + TOGETHER])
        print(f"{len(ended)}/{len(jobs)}", flush=True)
    return ended


def verdicts(folder: Path, made: Sequence[Mutant], seed: int) -> list[tuple[str, str]]:
    """The kind of each mutant, and what it turned out to be."""
    ended = results(folder, [job for mutant in made for job in (mutant.by_gloo(), mutant.by_rules(seed))])
    left = [mutant for mutant in made if passed(ended[mutant.by_rules(seed).name])]
    seeds = range(seed + 1, seed + 1 + OTHER_DELAYS)
    ended |= results(folder, [mutant.by_rules(other) for mutant in left for other in seeds])
    judged: list[tuple[str, str]] = []
    for mutant in made:
        with_gloo = passed(ended[mutant.by_gloo().name])
        if mutant not in left:
            verdict = "fails, gloo passes" if with_gloo else "fails"
        elif with_gloo and all(passed(ended[mutant.by_rules(other).name]) for other in seeds):
            verdict = "harmless"
        else:
            verdict = "missed"
        judged.append((mutant.kind, verdict))
        said = next((text for text in ended[mutant.by_rules(seed).name].said if text), "").strip().split("\n")
        print(f"{mutant.kind}, {mutant.name}: {verdict}: {said[0][:300]}")
    return judged


def main() -> None:
    """Runs the mutants, and prints a row of a table for each kind."""
    parser = argparse.ArgumentParser(description="Changed programs under a backend that keeps NCCL's rules.")
    parser.add_argument("--count", type=int, default=100, help="changed programs [default: 100]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    assert set(SCHEMES) | set(REPLICATED) <= set(library.names())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        counts = Counter(verdicts(folder, mutants(folder, options.count, options.seed), options.seed))
    print("| change | mutants | fail | of these gloo passes | harmless | missed |\n|---|---|---|---|---|---|")
    for kind in KINDS:
        failed, forgiven = counts[kind, "fails"], counts[kind, "fails, gloo passes"]
        harmless, missed = counts[kind, "harmless"], counts[kind, "missed"]
        total = failed + forgiven + harmless + missed
        print(f"| {kind} | {total} | {failed + forgiven} | {forgiven} | {harmless} | {missed} |")


if __name__ == "__main__":
    main()
