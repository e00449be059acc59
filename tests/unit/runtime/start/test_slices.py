"""Probe of a stage that looks back: its footprints are what is kept of it in training, carries apart."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from chimera_runtime.program.numbering import Numbering
from chimera_runtime.ranks.messages import Names
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.saved_tensors import Footprint, SavedTensors, footprint_of_slices, memory_of
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import SendOutput
from chimera_runtime.stage.weight_versions import Unstepped
from chimera_runtime.start.stage_probe import StageCall, probe_forward
from chimera_runtime.values.boundary import NO_CARRY, Boundary, Traits, slice_arguments
from chimera_runtime.values.nested import ONE_TENSOR
from tests.unit.runtime.carrying import CARRYING, WIDTH
from tests.unit.runtime.models import model

SLICES, SHAPE = 4, (2, 3, WIDTH)
BOUNDARY = Boundary(ONE_TENSOR, (SHAPE,), (torch.float32,), (True,), (True,))


def footprints(module: nn.Module, slices: int) -> list[Footprint]:
    """Bytes of each slice, as the probe has them."""
    carry, of_slices = NO_CARRY, []
    for number in range(slices):
        call = StageCall(BOUNDARY, (torch.ones(SHAPE),), None, False, {}, carry, leaves_carry=number < slices - 1)
        probed = probe_forward(model(), 1, module, call, measures=True)
        of_slices.append(probed.footprint)
        carry = probed.next_carry(call)
    return of_slices


@pytest.mark.parametrize("kind", CARRYING)
@pytest.mark.parametrize("slices", [1, SLICES])
def test_what_slices_keep_is_what_was_probed(kind: Callable[[], nn.Module], slices: int) -> None:
    module = kind()
    stage = Stage(
        number=1,
        module=module,
        weights=Unstepped(),
        before=BOUNDARY,
        output=SendOutput(1, BOUNDARY),
        gradient_sum=GradientSum("s1", list(module.parameters()), None, (0,), Names(0, 0, 3, 1.0), lambda w: w.wait()),
        traits=Traits((), "", takes=slice_arguments(module)),
        numbering=Numbering(0, 0, slices, slices, slices=slices),
    )
    saved = SavedTensors(module.parameters)
    carries: dict[object, int] = {}
    of_slices = footprints(module, slices)
    with saved.counting():
        for n in range(slices):
            stage.forward(n, (torch.ones(SHAPE),))
            stage.outputs(n)
            carries |= memory_of([carry.tensors for carry in stage.carries._left.values()])
            kept = sum((saved.sizes | carries).values())
            assert kept == sum(f.activations + f.carry for f in of_slices[: n + 1])
            counted = footprint_of_slices(of_slices)
            assert kept <= (n + 1) * (counted.activations + counted.carry)
