"""First use of a model: its modules are made on all ranks, and probed with the example."""

from functools import partial

import torch

from chimera_runtime.blame import Located
from chimera_runtime.data.feed import Feed
from chimera_runtime.model.model import Model
from chimera_runtime.program.rank_facts import RankFacts
from chimera_runtime.ranks.rendezvous import failures_shared
from chimera_runtime.ranks.world import World
from chimera_runtime.start.assemble import agree_on_weights, modules
from chimera_runtime.start.memory_report import memory_report
from chimera_runtime.start.probe import ProbeResult, probe_stages
from chimera_runtime.values.boundary import keyword_names
from chimera_runtime.values.tensors import generators_kept


def located_at(world: World, facts: RankFacts, *, explains: bool) -> Located:
    """The context of errors for everything that this rank runs; ``explains`` is as in `World.leak_groups`."""
    abandon = partial(world.leak_groups, explains=explains)
    return Located(world.place.rank, world.place.worker, lambda: memory_report(world.device, facts), abandon)


def prepare(
    world: World, located: Located, model: Model, feed: Feed, *, seed: int, measures: bool
) -> tuple[dict[int, torch.nn.Module], ProbeResult]:
    """The modules of this rank's stages, and the result of their probe; every rank calls it.

    The feed has the example; afterwards it has the names of keyword arguments, too. An error on one rank reaches the
    others while they wait for it.
    """
    with located, failures_shared(world.control_group.store, world.place.rank), generators_kept():
        built = modules(world, model, seed)
        agree_on_weights(world.control_group, world.job, built)
        probed = probe_stages(world, model, feed, built, seed=seed, measures=measures)
    feed.names = keyword_names(probed.traits, built)
    return built, probed
