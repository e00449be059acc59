"""Without tools a pipeline is what it is."""

from chimera_runtime.hooks import Hooks
from chimera_runtime.lane import Lane
from chimera_runtime.losses import Tally
from chimera_runtime.stage import Stage
from chimera_runtime.world import World
from tests.unit.runtime.models import setting
from tests.unit.runtime.ranks import alone_job, worlds


def test_plain_hooks_make_plain_stages_and_a_plain_lane(alone: World) -> None:
    hooks = Hooks()
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world)
        hooks.ready(made, built)
        assert hooks.stage_maker(made) is Stage
        assert type(hooks.lane(made, {})) is Lane
        assert hooks.outcomes(world, False, ()).launch(0, Tally(6.0, 4.0)).loss == 1.5
    assert (hooks.measures, hooks.loads) == (False, True)
