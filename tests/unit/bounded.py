"""What the planner knows of a configuration's memory, against the program that is compiled in the end."""

from chimera_ir.planner.compiled import Variant, least, standing
from chimera_ir.predict.memory_need import memory_of
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import StageCosts
from chimera_ir.verify.holdings import holdings

ALONE = Cluster("any", 10**6, 1, 10**12, 0, FREE, FREE, FREE)


def assert_bounded(one: Variant, costs: tuple[StageCosts, ...]) -> None:
    """What is known without messages is right.

    Raises
    ------
    Rejected
        If the scheme says nothing that can be run.
    """
    one.check()
    setting = Setting(costs[: one.header.stages], ALONE, 1, 1)
    program = one.lowered(setting)
    held = tuple(holdings(program))
    needed = [each.total for each in memory_of(program.header, setting, held)]
    assert [each.total for each in memory_of(program.header, setting, one.holdings(setting))] == needed
    assert [dict(each.copies) for each in held] == list(one.copies)
    at_least = least(one, setting)
    assert all(map(int.__le__, standing(one, setting), at_least))
    assert all(map(int.__le__, at_least, needed)), f"{at_least} {needed}"
