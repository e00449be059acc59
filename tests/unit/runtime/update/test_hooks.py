"""Without tools a pipeline is what it is."""

import logging

import pytest

from chimera_runtime.errors import PeerLost
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.assemble import components_of
from chimera_runtime.update import updates
from chimera_runtime.update.updates import Hooks
from chimera_runtime.values.losses import Tally
from tests.unit.runtime.models import setting
from tests.unit.runtime.thread_ranks import alone_job, worlds


def test_plain_hooks_make_plain_stages_and_leave_the_components_of_a_lane_as_they_are(alone: World) -> None:
    plain = Hooks()
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world)
        plain.ready(made, built)
        assert plain.stage_maker(world.job) is Stage
        components = components_of(made, {})
        assert plain.wrapped(components, {}) is components
        assert (
            plain.outcomes_class(world.job)(world.control_group, world.job, world.read, counted=False)
            .launch(0, Tally(6.0, 4.0))
            .loss
            == 1.5
        )
    assert (plain.measures, plain.loads) == (False, True)


def test_without_tools_remarks_go_to_a_logger_which_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Hooks().remark("50% of stage 0")
    assert capsys.readouterr() == ("", "50% of stage 0\n")
    logging.getLogger("chimera_runtime").setLevel(logging.ERROR)
    Hooks().remark("50% of stage 0")
    logging.getLogger("chimera_runtime").setLevel(logging.NOTSET)
    assert capsys.readouterr() == ("", "")


def test_without_tools_a_rank_that_is_not_answered_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[PeerLost] = []
    monkeypatch.setattr(updates, "end_process", ended.append)
    error = PeerLost("nobody answers", [1])
    Hooks().lost(error)
    assert ended == [error]
