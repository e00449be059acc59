"""Random graphs of stages train on one rank as a walk of the graph in one process does."""

import copy
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import HashStore

import chimera_ir
from chimera_runtime import Pipeline
from tests.graphs import Edge, Groups, edges_of, plan
from tests.repeatable import examples

MICRO_BATCHES, SIZE, WIDTH = 4, 2, 3


class Drawn(NamedTuple):
    groups: Groups
    feeds: Sequence[Edge]
    asked: dict[str, Any]
    without: Sequence[frozenset[int]] = ((),) * MICRO_BATCHES  # the sources of which each micro-batch has no input

    def group_of(self, stage: int) -> str:
        return [name for name, size in self.groups.items() for _ in range(size)][stage]

    def lacking(self, absent: dict[str, list[int]], micro: int, without: Collection[int] = ()) -> set[int]:
        """The stages that do not have a micro-batch: the program leaves out blocks, and inputs others."""
        lacking = set[str]()
        for name in self.groups:
            inside = {stage for stage in self.stages if self.group_of(stage) == name}
            feeding = {self.group_of(edge.source) for edge in self.edges if edge.target in inside} - {name}
            inputs = inside.intersection(self.sources)
            if inputs.intersection(without) if inputs else feeding <= lacking:
                lacking.add(name)
        left_out = {name for name, micros in absent.items() if micro // max(self.asked["together"]) in micros}
        return {stage for stage in self.stages if self.group_of(stage) in lacking | left_out}

    def allows(self, lacking: set[int]) -> bool:
        """Whether a micro-batch may lack stages: each output is read, and there is a loss."""
        fed = {s: {edge.target for edge in self.edges if edge.source == s} for s in self.stages}
        is_read = all(not fed[s] or fed[s] - lacking for s in {*self.stages} - lacking)
        return is_read and not lacking.issuperset(self.sinks)

    @property
    def sources(self) -> list[int]:
        return sorted({*self.stages} - {edge.target for edge in self.edges})

    @property
    def edges(self) -> list[Edge]:
        return edges_of(self.groups, self.feeds)

    @property
    def stages(self) -> range:
        return range(sum(self.groups.values()))

    @property
    def sinks(self) -> list[int]:
        return sorted({*self.stages} - {edge.source for edge in self.edges})


@st.composite
def graphs(draw: st.DrawFn) -> Drawn:
    """Graphs of up to six stages, of which some are frozen, split or recomputed; edges go to higher numbers."""
    groups = {f"g{number}": draw(st.integers(1, 3)) for number in range(draw(st.integers(1, 3)))}
    feeds: list[tuple[int, int]] = []
    start = 0
    for size in groups.values():
        if start:  # what connects the group with those before it
            feeds.append((draw(st.integers(0, start - 1)), start + draw(st.integers(0, size - 1))))
        start += size
    stages = range(start)
    inside = {edge[:2] for edge in edges_of(groups, [])}
    others = [(s, t) for t in stages for s in range(t) if (s, t) not in {*feeds, *inside}]
    feeds += draw(st.lists(st.sampled_from(others), max_size=3, unique=True)) if others else []
    keywords = [draw(st.sampled_from(["", f"from_{source}"])) for source, _ in feeds]
    some = st.sets(st.sampled_from(stages)).map(sorted)
    asked: dict[str, Any] = {
        "frozen": draw(some)[: len(stages) - 1],
        "split": draw(some),
        "recompute": draw(some),
        "together": draw(st.lists(st.sampled_from([1, 1, 2, 4]), min_size=start, max_size=start)),
    }
    drawn = Drawn(groups, [Edge(*edge, name) for edge, name in zip(feeds, keywords, strict=True)], asked)
    # Some groups have no part in some blocks of micro-batches, and some inputs lack.
    absent: dict[str, list[int]] = {name: [] for name in groups}
    size = max(asked["together"])
    blocks = st.integers(0, MICRO_BATCHES // size - 1)
    for name, block in draw(st.lists(st.tuples(st.sampled_from([*groups]), blocks), max_size=4, unique=True)):
        absent[name].append(block)
        if not drawn.allows(drawn.lacking(absent, block * size)):
            absent[name].remove(block)
    absent = {name: sorted(of_group) for name, of_group in absent.items() if of_group}
    without = [draw(st.frozensets(st.sampled_from(drawn.sources))) for _ in range(MICRO_BATCHES)]
    if draw(st.booleans()) or len(drawn.sources) == 1 or size > 1:
        without = [frozenset[int]()] * MICRO_BATCHES
    for micro, sources in enumerate(without):
        if len(sources) == len(drawn.sources) or not drawn.allows(drawn.lacking(absent, micro, sources)):
            without[micro] = frozenset()
    return drawn._replace(asked={**asked, "absent": absent}, without=without)


class Node(nn.Module):
    def __init__(self, stage: int, is_sink: bool) -> None:
        super().__init__()
        self.stage, self.is_sink = stage, is_sink
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *values: Any, tokens: torch.Tensor, **named: Any) -> Any:
        total: Any = tokens
        for place, value in enumerate((*values, *(named[name] for name in sorted(named))), start=1):
            if value is None:  # of a stage that does not have the micro-batch
                continue
            main, spare = value if isinstance(value, tuple) else (value, None)
            total = total + place * main
            if spare is not None and self.stage % 2:  # others get this tensor, and use it not
                total = total + spare.sin()
        y = torch.tanh(self.linear(total))
        return y if self.is_sink else (y, 2 * y)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def walked(drawn: Drawn, modules: Sequence[nn.Module], micro: int, batch: tuple[Any, ...]) -> torch.Tensor:
    """The sum of the losses of a micro-batch."""
    x, y, named = batch
    outputs: list[Any] = []
    lacking = drawn.lacking(drawn.asked["absent"], micro, drawn.without[micro])
    for stage, module in enumerate(modules):
        if stage in lacking:
            outputs.append(None)
            continue
        fed = [edge for edge in drawn.edges if edge.target == stage]
        of_stage = x[drawn.group_of(stage)] if isinstance(x, dict) and not fed else x
        positional = [outputs[edge.source] for edge in fed if not edge.keyword] if fed else [of_stage]
        by_name = {edge.keyword: outputs[edge.source] for edge in fed if edge.keyword}
        outputs.append(module(*positional, **named, **by_name))
    return torch.stack([loss(outputs[sink], y) for sink in drawn.sinks if sink not in lacking]).sum()


def micro_batch(drawn: Drawn, micro: int, *, is_whole: bool = False) -> tuple[Any, ...]:
    x, y, tokens = torch.randn(3, SIZE, WIDTH, dtype=torch.float64)
    if not any(drawn.without):
        return x, y, {"tokens": tokens}
    missing = set[int]() if is_whole else drawn.without[micro]
    return {drawn.group_of(s): None if s in missing else x + s for s in drawn.sources}, y, {"tokens": tokens}


@pytest.fixture(scope="module")
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@examples(40)
@given(drawn=graphs(), seed=st.integers(0, 9), items=st.integers(1, MICRO_BATCHES * SIZE))
def test_a_graph_on_one_rank_trains_as_a_walk_of_it_does(drawn: Drawn, seed: int, items: int) -> None:
    torch.manual_seed(seed)
    batches = [micro_batch(drawn, micro) for micro in range(MICRO_BATCHES)]
    made = [Node(stage, stage in drawn.sinks).double() for stage in drawn.stages]
    for stage in drawn.asked["frozen"]:
        made[stage].requires_grad_(False)
    alone = copy.deepcopy(made)
    text = plan(drawn.groups, drawn.feeds, MICRO_BATCHES, [[0] * len(made)], **drawn.asked)
    with TemporaryDirectory() as folder:
        path = Path(folder, "graph.sir")
        path.write_text(text)
        chimera_ir.compile(path).write(Path(folder, "out"))
        example = micro_batch(drawn, 0, is_whole=True)
        with Pipeline(Path(folder, "out"), lambda s, _: made[s], loss, example) as pipe:
            outcome = pipe.step(batches.__getitem__)
            assert not any(stage._made for stage in pipe._updates.stages.values()), "what is made is taken"
            total = sum(walked(drawn, alone, micro, batch) for micro, batch in enumerate(batches)) / MICRO_BATCHES
            if total.requires_grad:
                total.backward()
            assert outcome is not None
            assert outcome.loss == pytest.approx(total.item(), rel=1e-12)
            assert float(pipe.evaluate([batches.__getitem__])) == pytest.approx(total.item(), rel=1e-12)
            if not (any(drawn.without) or drawn.asked["absent"]):
                x, y = (torch.cat([batch[part] for batch in batches])[:items] for part in (0, 1))
                tokens = torch.cat([named["tokens"] for _, _, named in batches])[:items]
                mean = walked(drawn, alone, 0, (x, y, {"tokens": tokens}))
                assert float(pipe.evaluate([(x, y, {"tokens": tokens})])) == pytest.approx(mean.item(), rel=1e-12)
    for stage, (here, there) in enumerate(zip(made, alone, strict=True)):
        for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
            assert (mine.grad is None) is (theirs.grad is None), stage
            assert mine.grad is None or torch.allclose(mine.grad, theirs.grad, rtol=1e-10, atol=1e-14), stage


PAIRS = """\
schedule pairs
workers 1
stages 4
micro_batches 2
named image 0..1 sound 1..2 text 2..4
feeds s0->s2
feeds s1->s2 as from_1
pipe down on 0 0 0 0 micros 0..2

worker 0:
  F m0 s0
  F m0 s1
  F m0 s2
  F m1 s0
  F m1 s1
  F m0 s3
  F m1 s2 & B m0 s3
  F m1 s3 & B m0 s2
  B m1 s3
  B m0 s0
  B m0 s1
  B m1 s2
  B m1 s0
  B m1 s1
"""


class Both(Node):
    """Runs the backward of a pair behind its forward."""

    def forward_and_backward(self, *values: Any, backward: Any, **named: Any) -> Any:
        result = self(*values, **named)
        backward()
        return result


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("kind", [Node, Both])
@pytest.mark.parametrize("without", [((), ()), ((0,), ()), ((), (0,)), ((1,), (0,))])
def test_pairs_of_stages_that_several_feed(tmp_path: Path, kind: type[Node], without: Any) -> None:
    groups, feeds = {"image": 1, "sound": 1, "text": 2}, [Edge(0, 2), Edge(1, 2, "from_1")]
    drawn = Drawn(groups, feeds, {"absent": {}, "together": 1}, without)
    torch.manual_seed(0)
    batches = [micro_batch(drawn, micro) for micro in range(2)]
    made = [kind(stage, stage == 3).double() for stage in range(4)]
    alone = copy.deepcopy(made)
    (tmp_path / "pairs.sir").write_text(PAIRS)
    chimera_ir.compile(tmp_path / "pairs.sir").write(tmp_path / "out")
    assert "stage2.pair((1, (*stage0.outputs(1), *stage1.outputs(1)))," in (tmp_path / "out" / "rank_0.py").read_text()
    with Pipeline(tmp_path / "out", lambda s, _: made[s], loss, micro_batch(drawn, 0, is_whole=True)) as pipe:
        pipe.step(batches.__getitem__)
    (sum(walked(drawn, alone, micro, batch) for micro, batch in enumerate(batches)) / 2).backward()
    for here, there in zip(made, alone, strict=True):
        for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-10, atol=1e-14)
