"""``--device-peak``: share of the peak speed of the devices that an update uses.

The "model FLOPs utilization" of Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B: it
counts the floating-point operations of the model, and not those of a forward that recomputation repeats.
"""

import re

import torch
from torch.utils.flop_counter import FlopCounterMode

from chimera_runtime.errors.tools import peak_is_unknown
from chimera_runtime.stage.module_state import state_of
from chimera_runtime.start.rank_context import RankContext
from chimera_runtime.start.stage_probe import StageCall, probe_backward, probe_forward
from chimera_runtime.values.carries import NO_CARRY
from chimera_runtime.values.nested import to_device
from chimera_runtime.values.tensors import all_generators_kept

_TERA = 1e12

_HALF = {torch.bfloat16, torch.float16}

_PEAKS = {
    "GB200": (2500.0, 1250.0, 80.0, 40.0),
    "B200": (2250.0, 1100.0, 75.0, 37.0),
    "H200 NVL": (835.5, 417.5, 60.0, 60.0),
    "GH200": (989.5, 494.5, 67.0, 67.0),
    "H200": (989.5, 494.5, 67.0, 67.0),
    "H100 NVL": (835.5, 417.5, 60.0, 60.0),
    "H100 PCIe": (756.5, 378.0, 51.0, 51.0),
    "H100": (989.5, 494.5, 67.0, 67.0),
    "A100": (312.0, 156.0, 19.5, 19.5),
    "A30": (165.0, 82.0, 10.3, 10.3),
    "A40": (149.7, 74.8, 37.4, None),
    "A10": (125.0, 62.5, 31.2, None),
    "L40S": (362.0, 183.0, 91.6, None),
    "L4": (121.0, 60.0, 30.3, None),
}
"""Peak speeds of devices: dense TFLOPS in bfloat16 or float16, TF32, float32 and float64, with tensor cores; None if
the data sheet does not say. Of several keys that are words of CUDA's name of a device, the first counts.

From NVIDIA's data sheets of these devices, and for B200 and GB200 from that of the Blackwell architecture; half of the
number if the sheet gives only that with sparsity.
"""


def peak_of(device: str, dtype: torch.dtype, tensor_float: bool) -> float | None:
    """Floating-point operations per second of a device by its name; None if not known, as for a part of a device (MIG).

    ``tensor_float`` says that products of float32 are computed in TF32.
    """
    peaks = next((peaks for name, peaks in _PEAKS.items() if re.search(rf"\b{name}\b", device)), None)
    if peaks is None or "MIG" in device:
        return None
    half, tf32, single, double = peaks
    by_dtype = {torch.float32: tf32 if tensor_float else single, torch.float64: double}
    peak = half if dtype in _HALF else by_dtype.get(dtype)
    return None if peak is None else peak * _TERA


def peak_seconds(
    context: RankContext, modules: dict[int, torch.nn.Module], peak: float | None, dtype: torch.dtype
) -> float:
    """Seconds that an update would take if all ranks computed at their peak all the time; every rank calls it.

    ``peak`` is the peak of each device in TFLOPS; for None it is looked up in the table of devices. ``dtype`` is the
    type in which products of matrices are computed.

    Raises `Misuse` if the device of this rank is not in the table.
    """
    world = context.world
    if peak is None:
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        per_second = peak_of(device, dtype, _in_tf32())
        if per_second is None:
            raise peak_is_unknown(device, str(dtype).removeprefix("torch."))
    else:
        per_second = peak * _TERA
    mine = [s for s in modules if world.place.rank == world.place.rank_of(0, world.job.placement[0][s])]
    figures = sum(of_stage(context, modules[s], s) for s in mine), per_second
    of_ranks = world.control_group.collect("flops", figures, "for the floating-point operations of its stages")
    operations, peaks = map(sum, zip(*of_ranks, strict=True))
    return float(operations * world.job.passes // world.job.slices * world.place.copies / peaks)


def of_stage(context: RankContext, module: torch.nn.Module, stage: int) -> int:
    """Floating-point operations of a forward and a backward of one micro-batch; a sum and a product are two.

    They are counted while both run, on the first items of the dataset or, after the first stage, on zeros of the right
    shapes. `torch.utils.flop_counter` counts products of matrices, convolutions and attention. Afterwards the state of
    the stage is restored.
    """
    boundaries, source, world = context.probed.boundaries, context.source, context.world
    assert source is not None, "options.parse refuses that in a rehearsal"
    last, before = not world.job.fed[stage], context.probed.before(stage, world.job)
    state, contents = state_of(module, context.probed.traits[stage].touched)
    operations, carry = 0, NO_CARRY
    with all_generators_kept():
        for micro in range(world.job.slices):
            handed = (
                to_device(source.input(0, micro), world.device)
                if before is None
                else before.at(micro).buffers(world.device)
            )
            target = to_device(source.target(0, micro), world.device) if last else None
            names = context.probed.traits[stage].keywords
            loaded = to_device(source.keywords(0, micro), world.device) if names else {}
            keywords = {name: value for name, value in loaded.items() if name in names}
            with FlopCounterMode(display=False) as counter:
                call = StageCall(before, handed, target, last, keywords, carry, micro + 1 < world.job.slices)
                trace = probe_forward(context.model, stage, module, call, measures=False)
                probe_backward(stage, module, trace, None if last else boundaries[stage].differentiable)
            operations += counter.get_total_flops()
            carry = trace.next_carry(call)
    state.restore(contents)
    return operations


def computing_dtype(modules: dict[int, torch.nn.Module], autocast: torch.dtype | None) -> torch.dtype:
    """Type in which products of matrices are computed: that of autocast or, without autocast, that of most weights."""
    if autocast is not None:
        return autocast
    sizes: dict[torch.dtype, int] = {}
    for module in modules.values():
        for parameter in module.parameters():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _in_tf32() -> bool:
    """Whether a GPU computes products of float32 in TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
