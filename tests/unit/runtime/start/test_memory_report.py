"""What is told of memory where there is no more of it."""

import re
from dataclasses import replace

import torch

from chimera_runtime.program.rank_facts import HostedMicros
from chimera_runtime.start.probe import memory_report
from tests.unit.runtime.models import facts

CPU = torch.device("cpu")


def test_the_host_has_a_peak_and_a_size() -> None:
    size = r"[0-9.]+ [KMGT]iB"
    assert re.fullmatch(
        rf"memory: this process has used at most {size}, of {size} in the machine", memory_report(CPU, None)
    )


def test_what_the_schedule_keeps_is_told_in_the_units_of_the_report() -> None:
    known = facts(0, 3, kept=(((0, 2, 0), (3, 1, 0)), ((0, 0, 4), (3, 1, 2))), copies=2)
    words = memory_report(CPU, known).split("; ")
    assert words[1] == (
        "the schedule keeps 4 x M_theta of weights here (stage 0: 2, stage 3: 2) and up to 3 x M_a of activations "
        "(stage 0: 2, stage 3: 1)"
    )
    recomputing = memory_report(CPU, facts(1, kept=(((1, 1, 3),),)))
    assert "up to 1 x M_a of activations (stage 1: 1 and 3 x inputs alone)" in recomputing
    assert "up to 0 x M_a of activations (none)" in memory_report(CPU, facts(1))
    on_host = replace(facts(1), on_host=((HostedMicros(1, 2),), (HostedMicros(1, 3),)))
    assert "up to 0 x M_a of activations (none), of up to 3 more on the host; --mem" in memory_report(CPU, on_host)
    sliced = memory_report(CPU, facts(1, kept=(((1, 5, 0, 0, 5, 1),),)), slices=4, units=4)
    assert "up to 1.25 x M_a of activations (stage 1: 1.25 and 5 carries)" in sliced
    unequal = memory_report(CPU, facts(1, kept=(((1, 12, 0, 0, 6, 2),),)), slices=4, units=8)
    assert "up to 1.5 x M_a of activations (stage 1: 1.5 and 3 carries)" in unequal
