"""The facts of an update: what a rank gives, what its optimizers do, and its weights from time to time."""

from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.data.feed import Feed
from chimera_runtime.optimizer.optimizer_facts import OptimizerFacts
from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.agreement import STEPS, TERMS, settings_of, weights_of
from chimera_runtime.ranks.messages import from_host
from chimera_runtime.stage.gradient_sums import Replicas
from chimera_runtime.update.shared_facts import FlushFacts, StreamFacts
from tests.unit.runtime.thread_ranks import job

STAGE: Group = (0,)


class Rank:
    """A stage, its optimizer and a feed."""

    def __init__(self, *trained: Group) -> None:
        self.weight = nn.Parameter(torch.ones(3))
        self.feed = Feed(job(), 1)
        parameters = {STAGE: [self.weight]}
        self.parts: Any = (
            self.feed,
            OptimizerFacts(parameters if trained else {}, [STAGE], {self.weight: "weight"}),
            Replicas(parameters, {self.weight: "weight"}, from_host),
        )
        self.optimizer = torch.optim.SGD([self.weight], lr=0.5)


def test_terms_count_with_the_number_of_the_update() -> None:
    terms = {"accumulate": 0.0}
    facts = FlushFacts(*Rank(STAGE).parts, lambda: terms)
    first, again, next_one = facts(3)[TERMS], facts(3)[TERMS], facts(4)[TERMS]
    assert (first[0] == again[0], first[0] == next_one[0]) == (True, False)
    assert first[1]() == {"update": "4", "accumulate": "0.0"}
    terms["accumulate"] = 1.0
    assert facts(3)[TERMS][0] != first[0]


def test_steps_count_where_there_is_something_to_step() -> None:
    rank, frozen = Rank(STAGE), Rank()
    facts = FlushFacts(*rank.parts, dict)
    before = facts(0)[STEPS]
    rank.optimizer.step()
    after = facts(1)
    steps = [fact[1]()["steps since the last update"] for fact in (before, after[STEPS], facts(2)[STEPS])]
    assert steps == ["0", "1", "0"]
    assert after[settings_of(STAGE)][1]()["lr"] == "0.5"
    assert STEPS not in FlushFacts(*frozen.parts, dict)(0)


def test_weights_come_with_the_update_after_the_one_that_they_are_read_in() -> None:
    facts = FlushFacts(*Rank(STAGE).parts, dict)
    assert [weights_of(STAGE) in facts(update) for update in range(11)] == [
        *(False, False, True, True, False, True, False, False, False, True, False),
    ]


def test_data_are_those_that_step_was_given() -> None:
    rank = Rank(STAGE)
    facts = FlushFacts(*rank.parts, dict)
    rank.feed.put(0, (torch.ones(2, 3), None))
    assert [key for key in facts(0) if key[0] == "data"] == [("data", 0, 0)]
    rank.feed.put(1, lambda _micro: (torch.ones(1, 3), torch.zeros(1)))
    assert [key for key in facts(1) if key[0] == "data"] == [], "it has not been asked yet"


@pytest.mark.parametrize("launched", [[0, 1, 2, 3], [3]])
def test_a_stream_has_the_facts_of_the_step_that_made_the_update(launched: list[int]) -> None:
    rank = Rank(STAGE)
    facts = StreamFacts(*rank.parts)
    for update in range(4):
        rank.optimizer.param_groups[0]["lr"] = float(update)
        rank.optimizer.step()
        facts.note_step(STAGE, update)
    seen = {update: facts(update) for update in launched}
    assert {update: known[settings_of(STAGE)][1]()["lr"] for update, known in seen.items()} == {
        update: str(float(update)) for update in launched
    }
    assert [update for update, known in seen.items() if weights_of(STAGE) in known] == [u for u in launched if u != 2]
    assert facts(3).keys() == {TERMS}, "nothing is kept"
