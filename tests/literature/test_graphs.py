"""Models that are no chain: makespans and peaks, as an independent simulator found them."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import networkx as nx
import pytest

import chimera_ir
from chimera_ir.options import Options
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import StageCosts
from chimera_ir.source import Source
from tests.simulator import Simulator
from tests.timings import stage_timing

searching = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is not installed: the extra search")

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"

SHARED_WORKERS = """
scheme shared_workers(P = 3, N = 6)
feeds enc[P-1] -> dec[s in 0..P]
workers P
fn turn(m, c) = 2*P*(m / P) + P*c + m % P          # as in interleaved 1F1B with two stages on a worker
pipe down {
  stages enc[i in 0..P] on i
  stages dec[s in 0..P] on s
  micros m in 0..N
  F(m, enc[i]) @ 2*turn(m, 0) + i
  F(m, dec[s]) @ 2*turn(m, 1) + s
  B(m, dec[s]) @ 2*turn(m, 0) + 2*P + 2*(P-1) - s + 1
  B(m, enc[i]) @ 2*turn(m, 1) + 2*P + 2*(P-1) - i + 1
}
"""

UNET = """
scheme unet(P = 4, N = 8)
feeds net[s in 0..P-1] -> net[2*P-1 - s]
workers P
let D = 2*P
fn t(m) = 4*(m % P) + 2*D*(m / P)
pipe down {
  stages net[s in 0..D] on if s < P then s else D-1 - s
  micros m in 0..N
  F(m, net[s]) @ 2*(t(m) + 3*s) + 1
  B(m, net[s]) @ 2*(t(m) + 3*(2*(D-1) - s) + 1)
}
"""

SPLIT_ENCODERS = """
scheme split_encoders(a = 2, b = 1, D = 3, N = 8)
feeds image[a-1] -> text[0]
feeds sound[b-1] -> text[0]
workers a + b + D
fn peak(w) = if w < a then max(a, b) + D - w else if w < a + b then D + b - (w - a) else D - (w - a - b)
memory activations on w <= peak(w)
pipe down {
  stages image[i in 0..a] on i
  stages sound[j in 0..b] on a + j
  stages text[s in 0..D]  on a + b + s
  micros m in 0..N
  F(m, image[i]) prefer N + m
  I(m, image[i]) prefer m
  W(m, image[i]) prefer m
  F(m, sound[j]) prefer N + m
  I(m, sound[j]) prefer m
  W(m, sound[j]) prefer m
  F(m, text[s])  prefer N + m
  I(m, text[s])  prefer m
  W(m, text[s])  prefer m
}
"""

UNEQUAL = {"F": [1, 1, 3, 2, 2, 2], "B": [2, 2, 6, 4, 4, 4]}

INSTANCES: Mapping[str, tuple[str | Path | Source, Mapping[str, Sequence[int]], int, int | None, Sequence[int]]] = {
    "two encoders": ("two_encoders", {}, 36, None, [5, 4, 4, 3, 2, 1]),
    "two encoders, unequal stages": ("two_encoders", UNEQUAL, 81, 93, [5, 4, 4, 3, 2, 1]),
    "a frozen encoder": (EXAMPLES / "frozen_encoder.chim", {}, 32, None, [0, 0, 3, 2, 1]),
    "every third micro-batch without an image": (EXAMPLES / "sometimes_an_image.chim", {}, 36, None, [4, 3, 3, 2, 1]),
    "encoder and decoder": ("encoder_decoder", {}, 36, 54, [5, 4, 3, 2, 1]),
    "encoder and decoder on the same workers": (Source("shared_workers.chim", SHARED_WORKERS), {}, 42, None, [6, 5, 4]),
    "a U-Net in a V": (Source("unet.chim", UNET), {}, 57, None, [9, 10, 12, 12]),
}
"""Text, costs of stages, makespan with free messages and with messages of 1, peaks of the workers."""


@pytest.mark.parametrize("name", INSTANCES)
def test_makespan_and_peaks(name: str) -> None:
    text, costs, makespan, with_messages, peaks = INSTANCES[name]
    compiled = chimera_ir.compile(text, options=Options(stage_costs=costs))
    assert compiled.report.makespan == makespan
    assert [*compiled.report.activations] == peaks
    for message, expected in ((0, makespan), (1, with_messages)):
        assert expected in (None, _longest_path(compiled.dag, message))
    if not costs:
        stage = StageCosts(1, 1, 0, {1: stage_timing(1, 2, 3, 1, 1, 1, 1, halves=(1, 1))})
        setting = Setting((stage,) * compiled.header.stages, Cluster("free", 4096, 1, 1, 0, FREE, FREE, FREE), 1, 1)
        assert max(end for *_, end in Simulator(compiled.program, setting).computes) == makespan


@searching
def test_two_encoders_with_split_backwards_take_75() -> None:
    """I and W each as long as F, with the peaks of whole backwards, which take 81: no order is shorter."""
    halves = dict.fromkeys("FIW", UNEQUAL["F"])
    source = Source("split_encoders.chim", SPLIT_ENCODERS)
    found = chimera_ir.compile(source, options=Options(stage_costs=halves, search=60))
    assert (found.improvement.result.proven, found.improvement.result.makespan) == (True, 75)
    assert all(here <= peak for here, peak in zip(found.report.activations, [5, 4, 4, 3, 2, 1], strict=True))


@searching
def test_an_encoder_and_a_decoder_on_the_same_workers_take_45_within_smaller_bounds() -> None:
    text = SHARED_WORKERS.replace("workers P\n", "workers P\nmemory activations on w <= 5 - w\n").replace("@", "prefer")
    found = chimera_ir.compile(Source("within_bounds.chim", text), options=Options(search=60))
    assert (found.improvement.result.proven, found.improvement.result.makespan) == (True, 45)
    assert [*found.report.activations] == [5, 4, 3]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 3, 2, 4), (3, 1, 4, 9), (2, 2, 1, 12)])
def test_two_encoders_take_the_time_of_the_longest_way(sizes: tuple[int, int, int, int]) -> None:
    a, b, D, N = sizes
    report = chimera_ir.compile("two_encoders", a=a, b=b, D=D, N=N).report
    behind = [*range(D + a, D, -1), *range(D + b, D, -1), *range(D, 0, -1)]
    assert report.makespan == 3 * (N + max(a, b) + D - 1)
    assert [*report.activations] == [min(stages, N) for stages in behind]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 6), (3, 2, 3)])
def test_an_encoder_and_a_decoder_take_the_time_of_a_chain(sizes: tuple[int, int, int]) -> None:
    E, D, N = sizes
    report = chimera_ir.compile("encoder_decoder", E=E, D=D, N=N).report
    chain = chimera_ir.compile("dapple", D=E + D, N=N).report
    assert (report.makespan, report.activations) == (chain.makespan, chain.activations)


def _longest_path(dag: "nx.DiGraph[int]", message: int) -> int:
    """The length of the longest path, on which data between workers take the time of a ``message``."""
    weighed: nx.DiGraph[object] = nx.DiGraph()
    for a, b, why in dag.edges(data="why"):
        crosses = why == "data" and dag.nodes[a]["worker"] != dag.nodes[b]["worker"]
        weighed.add_edge(a, b, weight=dag.nodes[a]["cost"] + message * crosses)
    weighed.add_weighted_edges_from((node, "end", dag.nodes[node]["cost"]) for node in dag)
    return nx.dag_longest_path_length(weighed)
