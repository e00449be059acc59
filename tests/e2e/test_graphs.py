"""Models that are no chain train as one process does: stages that several feed, that feed several, several losses."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.graphs import Edge, Groups, edges_of, plan

LOOP = Path(__file__).parent / "loops" / "graphs.py"
MODEL_OF_A_PAGE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "two_encoders.py"
CHECK = ("--check-only", "--micro-batch-size", "2")
TRAINED = ("--micro-batch-size", "2", "--steps", "2", "--eval-every", "1", "--clip-norm", "0.1", "--check")


class Graph(NamedTuple):
    """A graph of stages on four workers, or on two; ``ends`` names groups that get inputs and targets of their own."""

    groups: Groups
    feeds: Sequence[Edge]
    on: Sequence[Sequence[int]] | None = None
    sources: str = ""
    sinks: str = ""

    def environment(self, frozen: Sequence[int] = (), **further: str) -> Mapping[str, str]:
        stages = range(sum(self.groups.values()))
        last = {*stages} - {edge.source for edge in edges_of(self.groups, self.feeds)}
        named = {"SOURCES": self.sources, "SINKS": self.sinks, "FROZEN": " ".join(map(str, frozen))}
        return {**named, "LAST": " ".join(map(str, sorted(last))), **further}


TWO_ENCODERS = Graph(
    {"image": 1, "sound": 1, "text": 2}, [Edge(0, 2, "pixels"), Edge(1, 2, "waves")], sources="image sound"
)
DECODER = Graph({"encoder": 2, "decoder": 2}, [Edge(1, 2), Edge(1, 3)])
HEADS = Graph({"text": 3, "head": 1}, [Edge(1, 3)], sinks="text head")
NET = Graph({"net": 8}, [Edge(0, 7), Edge(1, 6), Edge(2, 5)], [[0, 1, 2, 3, 3, 2, 1, 0]])
ON_ONE = Graph({"encoder": 2, "decoder": 3}, [Edge(1, 2), Edge(1, 3), Edge(1, 4)], [[0, 1, 2, 3, 2]])
"""Two of three stages that read the activations of the encoder are on one worker, which gets them once."""

GRAPHS = {
    "two encoders": TWO_ENCODERS,
    "encoder and decoder": DECODER,
    "heads": HEADS,
    "u-net": NET,
    "readers on one worker": ON_ONE,
}

BOTH_WAYS: list[list[int]] = [[0, 1, 2, 3], [3, 2, 1, 0]]
ON_TWO: list[list[int]] = [[0, 1, 1, 0]]

VARIANTS: dict[str, tuple[Graph, dict[str, Any]]] = {
    **{name: (graph, {}) for name, graph in GRAPHS.items()},
    "whole input for all": (TWO_ENCODERS._replace(sources=""), {}),
    "three readers": (Graph({"encoder": 1, "decoder": 3}, [Edge(0, 1), Edge(0, 2), Edge(0, 3)]), {}),
    "several micro-batches": (TWO_ENCODERS, {"together": 2}),
    "several micro-batches of a decoder": (DECODER, {"together": 2}),
    "larger blocks of an encoder": (TWO_ENCODERS, {"together": [4, 2, 1, 1]}),
    "smaller blocks of an encoder": (TWO_ENCODERS, {"together": [1, 2, 4, 4]}),
    "blocks of a decoder": (DECODER, {"together": [2, 2, 1, 4], "recompute": [0, 2]}),
    "blocks of a decoder, split": (DECODER, {"together": [1, 4, 2, 1], "split": [0, 1, 2, 3]}),
    "blocks of a net": (NET, {"together": [1, 1, 2, 2, 2, 4, 4, 1]}),
    "blocks both ways": (HEADS._replace(on=BOTH_WAYS), {"together": [2, 1, 2, 2]}),
    "blocks of readers on one worker": (ON_ONE, {"together": [2, 4, 2, 1, 1]}),
    "readers on one worker recompute": (ON_ONE, {"together": 2, "recompute": [1, 2, 4]}),
    "readers on one worker, split": (ON_ONE, {"split": [0, 2, 4]}),
    "a frozen reader beside another": (ON_ONE, {"frozen": [0, 1, 2]}),
    "readers on one worker, both ways": (ON_ONE._replace(on=[[0, 1, 2, 3, 2], [3, 2, 1, 0, 0]]), {}),
    "slices of readers on one worker": (ON_ONE, {"lengths": [1, 1, 1]}),
    "recomputing encoders": (TWO_ENCODERS, {"recompute": [0, 2]}),
    "recomputing decoder": (DECODER, {"recompute": [1, 3]}),
    "split": (TWO_ENCODERS, {"split": [1, 2, 3]}),
    "split decoder": (DECODER, {"split": [0, 1, 2, 3]}),
    "split net": (NET, {"split": [1, 5, 6]}),
    "a frozen encoder": (TWO_ENCODERS, {"frozen": [0]}),
    "a frozen part of a decoder": (DECODER, {"frozen": [2]}),
    "a frozen encoder of a decoder": (DECODER, {"frozen": [0, 1]}),
    "both ways": (TWO_ENCODERS._replace(on=BOTH_WAYS), {}),
    "both ways with a decoder": (DECODER._replace(on=BOTH_WAYS), {"together": 2}),
    "both ways with heads": (HEADS._replace(on=BOTH_WAYS), {"recompute": [1, 3]}),
    "slices": (TWO_ENCODERS, {"lengths": [1, 1, 1]}),
    "unequal slices": (TWO_ENCODERS, {"lengths": [3, 2, 1]}),
    "slices of a decoder": (DECODER, {"lengths": [1, 1, 1], "split": [0, 1, 2, 3]}),
    "slices of heads": (HEADS, {"lengths": [1, 1], "recompute": [1]}),
    "counts": (TWO_ENCODERS, {}),
    "counts of a decoder": (DECODER, {"recompute": [1]}),
    "losses with counts": (HEADS._replace(on=ON_TWO), {}),
    "losses with counts of unequal slices": (HEADS, {"lengths": [3, 2, 1]}),
    "ties": (TWO_ENCODERS, {"tied": [0, 3]}),
    "ties of a decoder": (DECODER, {"tied": [1, 2]}),
    "two copies": (TWO_ENCODERS._replace(on=ON_TWO), {}),
    "two copies with heads": (HEADS._replace(on=ON_TWO), {"split": [1, 3]}),
}
"""Graphs with what a plan may ask for beside."""

MOVED = {"moves": (DECODER, "36"), "moves of a net": (NET, "24")}
"""Graphs whose activations move to the host, and the width of their values."""

WIDE = """
scheme wide(a = 4, b = 2, N = 8)
feeds encoder[1] -> decoder[s in 0..2]
workers 4
pipe down {
  stages encoder[i in 0..2] on i
  stages decoder[s in 0..2] on 2 + s
  micros m in 0..N
  F(m..m+a, encoder[i]) prefer m when m % a == 0
  F(m..m+b, decoder[s]) prefer m when m % b == 0
  B(m..m+a, decoder[s]) prefer m when m % a == 0
  B(m..m+b, encoder[i]) prefer m when m % b == 0
}
"""
WIDTHS = {"4 to 2": (4, 2), "8 to 1 with counts": (8, 1)}
"""How many micro-batches the encoder and the decoder take together."""

LONG = {"two encoders", "encoder and decoder"}
"""Jobs with so many micro-batches that scripts have loops."""


def written(
    folder: Path, name: str, graph: Graph, micro_batches: int, options: tuple[str, ...] = (), **asked: Any
) -> Path:
    path = folder / f"{re.sub(r'[^a-z]+', '_', name)}.sir"
    path.write_text(plan(graph.groups, graph.feeds, micro_batches, graph.on, name=path.stem, **asked))
    return compiled(folder, str(path), asked=options)


def of_model(graph: Graph) -> Iterator[tuple[str, ...]]:
    return (tuple(map(str, edge)) for edge in edges_of(graph.groups, graph.feeds))


def jobs(folder: Path) -> Iterator[Job]:
    for name, (graph, asked) in VARIANTS.items():
        directory = written(folder, name, graph, 24 if name in LONG else 8, **asked)
        further = {"PLAIN": "1"} if "together" in asked else {}
        further |= {"SEQUENCE": "6", "PLAIN": "1"} if "lengths" in asked else {}
        further |= {"COUNTS": "1"} if "counts" in name or "unequal" in name else {}
        further |= {"LOSSES": "1"} if "losses" in name else {}
        further |= {"TIED": " ".join(map(str, asked["tied"]))} if "tied" in asked else {}
        environment = graph.environment(asked.get("frozen", ()), **further)
        yield Job(name, directory, CHECK, "graphs.py", environment)
    for name, (a, b) in WIDTHS.items():
        (path := folder / "wide.chim").write_text(WIDE)
        directory = compiled(folder, str(path), a=a, b=b)
        further = {"COUNTS": "1"} if "counts" in name else {}
        yield Job(name, directory, CHECK, "graphs.py", DECODER.environment(**further))
    for name, (graph, width) in MOVED.items():
        path = written(folder, name, graph, 8, ("--offload", "auto"))
        yield Job(name, path, CHECK, "graphs.py", graph.environment(WIDTH=width))
    for name, graph in GRAPHS.items():
        directory = written(folder, f"trained {name}", graph, 8)
        losses = {"LOSSES": "1"} if graph.sinks else {}
        losses["EDGES"] = " ".join("-".join(map(str, filter(None, edge))) for edge in of_model(graph))
        yield Job(f"trained {name}", directory, TRAINED, "graphs.py", graph.environment(**losses))
        yield Job(f"loop {name}", LOOP, (str(directory), name, str(folder / "weights.pt")), model=None)
        rehearsed = ("--rehearse", "F=0.001,B=0.002", "--steps", "2", "--micro-batch-size", "2")
        yield Job(f"rehearsed {name}", directory, rehearsed, "graphs.py", graph.environment())


def of_the_library(folder: Path) -> Iterator[Job]:
    """The model of the page on models of several parts, and each of the library's schemes for such models."""
    trained = ("--micro-batch-size", "2", "--steps", "2", "--check")
    yield Job("page", compiled(folder, "two_encoders", a=1, b=1, D=2, N=4), trained, str(MODEL_OF_A_PAGE))
    yield Job("encoder_decoder", compiled(folder, "encoder_decoder", E=2, D=2), CHECK, "graphs.py", {"LAST": "3"})
    for scheme in ("colocated", "colocated_nested"):
        yield Job(scheme, compiled(folder, scheme, P=4, N=8), CHECK, "graphs.py", {"LAST": "4"})


def going_on(folder: Path, name: str) -> Iterator[Job]:
    """Jobs that train four updates, and two and then two more from a checkpoint."""
    graph = GRAPHS[name]
    directory, environment = folder / f"trained_{name}", graph.environment()
    size, saved = ("--micro-batch-size", "2", "--steps"), str(folder / f"saved {name}")
    for word, steps, further in (
        ("whole", "4", ()),
        ("begun", "2", ("--save", saved)),
        ("resumed", "4", ("--resume", saved)),
    ):
        exported = str(folder / f"{word} {name}.pt")
        yield Job(f"{word} {name}", directory, (*size, steps, *further, "--export", exported), "graphs.py", environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, Outcome]:
    return run_all(folder, 4, [*jobs(folder), *of_the_library(folder), *going_on(folder, "heads")])


@pytest.mark.parametrize("name", [*VARIANTS, *WIDTHS, *MOVED, *(f"trained {name}" for name in GRAPHS)])
def test_a_graph_of_stages_trains_as_one_process_does(ran: dict[str, Outcome], name: str) -> None:
    ran[name].assert_passed()
    assert "check: passed" in ran[name].said[0]


@pytest.mark.parametrize("name", ["page", "encoder_decoder", "colocated", "colocated_nested"])
def test_schemes_of_the_library_for_graphs_train_as_one_process_does(ran: dict[str, Outcome], name: str) -> None:
    ran[name].assert_passed()
    assert "check: passed" in ran[name].said[0]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_rehearsal_of_it_ends(ran: dict[str, Outcome], name: str) -> None:
    ran[f"rehearsed {name}"].assert_passed()


@pytest.mark.parametrize("name", GRAPHS)
def test_a_loop_of_ones_own_over_it(ran: dict[str, Outcome], name: str) -> None:
    ran[f"loop {name}"].assert_passed()


def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_been(ran: dict[str, Outcome], folder: Path) -> None:
    for word in ("whole", "begun", "resumed"):
        ran[f"{word} heads"].assert_passed()
    whole, resumed = (torch.load(folder / f"{word} heads.pt", weights_only=True) for word in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_each_of_several_losses_is_reported_by_name(ran: dict[str, Outcome]) -> None:
    said = ran["trained heads"].said[0]
    assert "loss of text" in said
    assert "loss of head" in said
