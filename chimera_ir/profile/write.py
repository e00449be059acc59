"""The writer of profiles and cluster files: text that reads back as the same value."""

import json
from collections.abc import Callable, Iterator

from chimera_ir.profile.cluster import Cluster, Link
from chimera_ir.profile.costs import ENTRIES, NO_OVERHEAD, ModelProfile, StageCosts, Times, Timing
from chimera_ir.profile.quantity import show_bandwidth, show_rate, show_share, show_size, show_time, show_work
from chimera_ir.profile.work import Device, WorkProfile


def write_profile(profile: ModelProfile | WorkProfile) -> str:
    """The text that `read_profile` reads as this profile."""
    if isinstance(profile, WorkProfile):
        return "\n".join(_profile(profile.counts, show_work)) + "\n"
    return "\n".join(_profile(profile, show_time)) + "\n"


def write_cluster(cluster: Cluster) -> str:
    """The text that `read_cluster` reads as this cluster."""
    return "\n".join(_cluster(cluster)) + "\n"


def _profile(profile: ModelProfile, cost: Callable[[float], str]) -> Iterator[str]:
    yield "[model]"
    yield f"name = {_quoted(profile.name)}"
    if profile.file:
        yield f"file = {_quoted(profile.file)}"
    if profile.note:
        yield f"note = {_quoted(profile.note)}"
    if profile.length != 1:
        yield f"length = {profile.length}"
    yield from _overhead(profile.overhead)
    for depth, stages in profile.depths.items():
        yield ""
        yield "[[depth]]"
        yield f"stages = {depth}"
        if depth in profile.splits:
            yield f"split = {_quoted(','.join(map(str, profile.splits[depth])))}"
        for stage in stages:
            yield ""
            yield from (f"  {line}" for line in _part("depth.stage", stage, stage is stages[-1], cost))
    for layer in profile.layers:
        yield ""
        yield from _part("layer", layer, layer is profile.layers[-1], cost)


def _overhead(overhead: Times) -> Iterator[str]:
    if overhead != NO_OVERHEAD:
        yield ""
        yield "[operation]"
        yield from (f'{name} = "{text}"' for name, text in _times(overhead, show_time))


def _times(times: Times, cost: Callable[[float], str]) -> Iterator[tuple[str, str]]:
    yield from ((entry, cost(times[key])) for key, entry in ENTRIES.items() if key in times)


def _part(table: str, part: StageCosts, last: bool, cost: Callable[[float], str]) -> Iterator[str]:
    """Yields the lines of a stage or layer in the list ``table``; the ``last`` sends nothing, ``cost`` writes costs."""
    yield f"[[{table}]]"
    yield f'weights = "{show_size(part.weights)}"'
    yield f'gradients = "{show_size(part.gradients)}"'
    yield f'optimizer = "{show_size(part.optimizer)}"'
    if part.step:
        yield f'step = "{show_time(part.step)}"'
    if part.step_noise is not None:
        yield f'step_noise = "{show_share(part.step_noise)}"'
    for size, timing in part.at.items():
        yield f"  [[{table}.at]]"
        yield f"  micro_batch_size = {size}"
        yield from (f'  {name} = "{text}"' for name, text in _timing(timing, last, cost))


def _timing(timing: Timing, last: bool, cost: Callable[[float], str]) -> Iterator[tuple[str, str]]:
    yield from _times(timing.times, cost)
    yield "activations", show_size(timing.activations)
    yield "input", show_size(timing.input)
    if not last:
        yield "output", show_size(timing.output)
        yield "gradient_output", show_size(timing.gradient)
    for name, size in (("released", timing.released), ("operands", timing.operands)):
        if size:
            yield name, show_size(size)
    if timing.noise is not None:
        yield "noise", show_share(timing.noise)


def _cluster(cluster: Cluster) -> Iterator[str]:
    yield "[cluster]"
    yield f"name = {_quoted(cluster.name)}"
    yield f"workers = {cluster.workers}"
    yield f"per_node = {cluster.per_node}"
    yield f'memory = "{show_size(cluster.memory)}"'
    yield f'reserved = "{show_size(cluster.reserved)}"'
    if cluster.device is not None:
        yield from _device(cluster.device)
    for name, link in (("links.between", cluster.between), ("links.within", cluster.within), ("sum", cluster.sums)):
        yield from _link(name, link)


def _device(device: Device) -> Iterator[str]:
    yield ""
    yield "[device]"
    yield f'peak = "{show_rate(device.peak)}"'
    yield f"efficiency = {device.efficiency!r}"
    yield f"half_at = {device.half_at!r}"
    if device.operation:
        yield f'operation = "{show_time(device.operation)}"'


def _link(name: str, link: Link) -> Iterator[str]:
    yield ""
    yield f"[{name}]"
    yield f'latency = "{show_time(link.alpha)}"'
    yield f'bandwidth = "{show_bandwidth(link.beta)}"'
    if link.overhead:
        yield f'overhead = "{show_time(link.overhead)}"'
    if link.shared:
        yield "shared = true"


def _quoted(text: str) -> str:
    """A basic string of TOML: JSON's escapes, and one more; a character that UTF-8 cannot encode is a question mark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode(errors="replace").decode()
