"""Groups of stages that a micro-batch may lack, by the program or by the data: training as in one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ranks import Job, Outcome, run_all
from tests.e2e.test_graphs import BOTH_WAYS, CHECK, ON_TWO, TRAINED, TWO_ENCODERS, Graph, written
from tests.graphs import Edge

LOOP = Path(__file__).parent / "loops" / "absent.py"
LOOPS = [
    f"loop{copies}{asked}" for copies in ("", " in two copies") for asked in ("", " counts varying", " sharded wide")
]
REHEARSED = ("a chain", "two encoders", "a decoder")
TRAINING = {"a chain", "a head", "encoders", "a head of the image", "one of two on a worker", "in two copies"}

CHAIN = Graph({"image": 2, "text": 2}, [Edge(1, 2)])
WITH_HEAD = Graph(
    {"image": 1, "sound": 1, "text": 1, "head": 1}, [Edge(0, 2), Edge(1, 2), Edge(0, 3)], sources="image sound"
)
DECODER = Graph({"encoder": 2, "decoder": 2}, [Edge(1, 2), Edge(1, 3)])
ON_ONE = Graph(
    {"image": 1, "sound": 3, "text": 1}, [Edge(0, 3), Edge(0, 4), Edge(3, 4)], [[0, 1, 2, 3, 3]], sources="image sound"
)
"""A stage of ``sound`` and one of ``text`` read the image on one worker."""
THIRD = {"image": [2, 5]}
BOTH = {"image": [2, 3, 5], "sound": [1, 3, 4]}

BY_TEXT: dict[str, tuple[Graph, dict[str, Any]]] = {
    "a chain": (CHAIN, {"absent": THIRD}),
    "two encoders": (TWO_ENCODERS, {"absent": BOTH}),
    "a decoder": (DECODER, {"absent": {"encoder": [0, 4]}}),
    "a head": (WITH_HEAD, {"absent": {"image": [1, 2], "head": [1, 2]}}),
    "readers on one worker": (ON_ONE, {"absent": {"sound": [0, 3, 4]}}),
    "recomputed": (CHAIN, {"absent": THIRD, "recompute": [0, 2]}),
    "recomputed encoders": (TWO_ENCODERS, {"absent": BOTH, "recompute": [0, 2]}),
    "split": (TWO_ENCODERS, {"absent": BOTH, "split": [0, 1, 2, 3]}),
    "several micro-batches": (TWO_ENCODERS, {"absent": {"image": [1], "sound": [2]}, "together": 2}),
    "slices": (TWO_ENCODERS, {"absent": BOTH, "lengths": [1, 1, 1]}),
    "a frozen text": (CHAIN, {"absent": THIRD, "frozen": [2]}),
    "a frozen image": (TWO_ENCODERS, {"absent": BOTH, "frozen": [0]}),
    "counts": (TWO_ENCODERS, {"absent": BOTH}),
    "ties": (TWO_ENCODERS, {"absent": BOTH, "tied": [0, 3]}),
    "moves": (TWO_ENCODERS, {"absent": BOTH}),
    "two copies": (TWO_ENCODERS._replace(on=ON_TWO), {"absent": BOTH}),
}


BY_DATA: dict[str, tuple[Graph, dict[str, Any]]] = {
    "encoders": (TWO_ENCODERS, {}),
    "a head of the image": (WITH_HEAD, {}),
    "one of two on a worker": (ON_ONE, {}),
    "again": (TWO_ENCODERS, {"recompute": [0, 2]}),
    "halves": (TWO_ENCODERS, {"split": [0, 1, 2, 3]}),
    "cut": (TWO_ENCODERS, {"lengths": [1, 1, 1]}),
    "frozen": (TWO_ENCODERS, {"frozen": [0]}),
    "frozen text": (TWO_ENCODERS, {"frozen": [2]}),
    "and counts": (TWO_ENCODERS, {}),
    "both": (TWO_ENCODERS, {"absent": {"image": [2], "sound": [3]}}),
    "tied": (TWO_ENCODERS, {"tied": [0, 3]}),
    "moving": (TWO_ENCODERS, {}),
    "in two copies": (TWO_ENCODERS._replace(on=ON_TWO), {}),
    "in both ways": (TWO_ENCODERS._replace(on=BOTH_WAYS), {}),
}


def jobs(folder: Path) -> Iterator[Job]:
    for name, (graph, asked) in (BY_TEXT | BY_DATA).items():
        further = {"PLAIN": "1"} if "together" in asked else {}
        further |= {"SEQUENCE": "6", "PLAIN": "1"} if "lengths" in asked else {}
        further |= {"COUNTS": "1"} if "counts" in name else {}
        further |= {"LACKING": "1"} if name in BY_DATA else {}
        further |= {"TOKENS": f"{min(edge.target for edge in graph.feeds)}"}
        further |= {"TIED": " ".join(map(str, asked["tied"]))} if "tied" in asked else {}
        further |= {"WIDTH": "36"} if "mov" in name else {}
        options = ("--offload", "auto") if "mov" in name else ()
        directory = written(folder, name, graph, 8 if "together" in asked else 6, options, **asked)
        environment = graph.environment(asked.get("frozen", ()), **further)
        arguments = TRAINED if name in TRAINING else CHECK
        yield Job(name, directory, arguments, "graphs.py", environment)
    directory, environment = folder / "a_chain", CHAIN.environment(EDGES="0-1 1-2 2-3", TOKENS="2")
    yield Job("reference", directory, CHECK, "graphs.py", environment)
    for name in REHEARSED:
        graph, asked = BY_TEXT[name]
        directory = written(folder, f"rehearsed {name}", graph, 6, **asked)
        rehearsed = (
            "--rehearse",
            "F=0.001,B=0.002",
            "--steps",
            "2",
            "--micro-batch-size",
            "2",
            "--trace",
            "trace.json",
        )
        environment = graph.environment(TOKENS=f"{min(edge.target for edge in graph.feeds)}")
        yield Job(f"rehearsed {name}", directory, rehearsed, "graphs.py", environment)
    loops = {"loop": TWO_ENCODERS, "loop in two copies": TWO_ENCODERS._replace(on=ON_TWO)}
    for name, graph in loops.items():
        directory = written(folder, name, graph, 6)
        for asked in ("", "counts varying", "sharded wide"):
            words = (str(directory), str(folder / f"{name} {asked}"), *asked.split())
            yield Job(f"{name} {asked}".strip(), LOOP, words, model=None)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("absent")
    return run_all(folder, 4, [*jobs(folder)])


@pytest.mark.parametrize("name", BY_TEXT)
def test_a_group_that_the_program_leaves_out_at_times_trains_as_in_one_process(
    ran: dict[str, Outcome], name: str
) -> None:
    ran[name].assert_passed()
    assert "check: passed" in ran[name].said[0]


@pytest.mark.parametrize("name", BY_DATA)
def test_a_micro_batch_that_lacks_an_input_trains_as_in_one_process(ran: dict[str, Outcome], name: str) -> None:
    ran[name].assert_passed()
    assert "check: passed" in ran[name].said[0]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_ones_own_steps_no_weights_that_nothing_used(ran: dict[str, Outcome], name: str) -> None:
    ran[name].assert_passed()


@pytest.mark.parametrize("name", REHEARSED)
def test_a_rehearsal_of_it_ends(ran: dict[str, Outcome], name: str) -> None:
    ran[f"rehearsed {name}"].assert_passed()


def test_the_model_in_one_piece_gets_no_micro_batches_without_a_group(ran: dict[str, Outcome]) -> None:
    assert ran["reference"].statuses[0] == "2"
    assert "of which a_chain() leaves out groups: take reference() out" in ran["reference"].said[0]
