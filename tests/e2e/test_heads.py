"""Heads with losses of their own, each divided by its own count, train as in one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.e2e.test_graphs import BOTH_WAYS, ON_TWO, Graph, written
from tests.graphs import Edge

LOOP = Path(__file__).parent / "loops" / "heads.py"
HEADS = Graph(
    {"image": 1, "sound": 1, "text": 1, "head": 1}, [Edge(0, 2, "pixels"), Edge(1, 2, "waves"), Edge(0, 3)], None
)
TWICE = HEADS._replace(on=ON_TWO)
RUNS: dict[str, tuple[Graph, dict[str, Any], str]] = {
    "one copy": (HEADS, {}, ""),
    "two copies": (TWICE, {}, "both"),
    "lacking": (HEADS, {}, "both lacking"),
    "lacking beside a mean": (TWICE, {}, "lacking"),
    "blocks": (HEADS, {"together": [2, 1, 2, 4]}, "both"),
    "recomputed": (HEADS, {"recompute": [0, 2, 3]}, ""),
    "split": (TWICE, {"split": [0, 1, 2, 3]}, "both lacking"),
    "both ways": (HEADS._replace(on=BOTH_WAYS), {}, "both lacking"),
    "varying": (TWICE, {}, "varying"),
    "varying and lacking": (HEADS, {}, "both varying lacking"),
}
"""Plans, and what is asked of the loop."""

NUMBERS = """
scheme heads(N = 8)
feeds image[0] -> text[0] as pixels
feeds sound[0] -> text[0] as waves
feeds image[0] -> head[0]
workers 2
pipe down {
  stages image[i in 0..1] on 0
  stages sound[s in 0..1] on 1
  stages text[t in 0..1] on 1
  stages head[h in 0..1] on 0
  micros m in 0..N
  F(m, image[0]) prefer m
  F(m, sound[0]) prefer m
  F(m, text[0]) prefer m
  F(m, head[0]) prefer m
  B(m, text[0]) prefer m
  B(m, head[0]) prefer m
  B(m, sound[0]) prefer m
  B(m, image[0]) prefer m
}
"""
WITH_NUMBERS = {"numbers": "numbers", "numbers lacking": "both numbers lacking", "numbers varying": "numbers varying"}


def jobs(folder: Path) -> Iterator[Job]:
    for name, (graph, asked, words) in RUNS.items():
        yield Job(name, LOOP, (str(written(folder, name, graph, 8, **asked)), *words.split()), model=None)
    (path := folder / "heads.chim").write_text(NUMBERS)
    directory = compiled(folder, str(path), asked=("N=1,2,4,8",))
    for name, words in WITH_NUMBERS.items():
        yield Job(name, LOOP, (str(directory), *words.split()), model=None)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("heads")
    return run_all(folder, 4, [*jobs(folder)])


@pytest.mark.parametrize("name", [*RUNS, *WITH_NUMBERS])
def test_each_of_several_losses_is_divided_by_its_own_count(ran: dict[str, Outcome], name: str) -> None:
    ran[name].assert_passed()
