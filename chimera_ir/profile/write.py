"""The writer of profiles and cluster files: text that reads back as the same value."""

import json
from collections.abc import Callable, Iterator, Mapping

from chimera_ir.profile.cluster import Cluster, Link
from chimera_ir.profile.costs import ENTRIES, NO_OVERHEAD, ModelProfile, StageCosts, Times, Timing, WorkProfile
from chimera_ir.profile.quantity import show_bandwidth, show_share, show_size, show_time, show_work


def write_profile(profile: ModelProfile | WorkProfile) -> str:
    """The text that `read_profile` reads as this profile."""
    if isinstance(profile, WorkProfile):
        return "\n".join(_profile(profile.counts, show_work)) + "\n"
    return "\n".join(_profile(profile, show_time)) + "\n"


def write_cluster(cluster: Cluster) -> str:
    """The text that `read_cluster` reads as this cluster."""
    return "\n".join(_cluster(cluster)) + "\n"


def _table(heading: str, entries: Mapping[str, object]) -> Iterator[str]:
    yield heading
    yield from (f"{name} = {_written(value)}" for name, value in entries.items() if value is not None)


def _written(value: object) -> str:
    """A value as TOML: as in JSON, but DEL is escaped, and a character that UTF-8 cannot encode becomes "?"."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f").encode(errors="replace").decode()


def _profile(profile: ModelProfile, cost: Callable[[float], str]) -> Iterator[str]:
    length = None if profile.length == 1 else profile.length
    model = {"name": profile.name, "file": profile.file or None, "note": profile.note or None, "length": length}
    yield from _table("[model]", model)
    if profile.overhead != NO_OVERHEAD:
        yield from ("", *_table("[operation]", _times(profile.overhead, show_time)))
    for group, part in profile.groups.items() or [(None, profile)]:
        for depth, stages in part.depths.items():
            split = ",".join(map(str, part.splits[depth])) if depth in part.splits else None
            yield from ("", *_table("[[depth]]", {"group": group, "stages": depth, "split": split}))
            for stage in stages:
                yield ""
                last = stage is stages[-1] and group is None
                yield from (f"  {line}" for line in _part("depth.stage", stage, last, cost))
        for layer in part.layers:
            last = layer is part.layers[-1] and group is None
            yield from ("", *_part("layer", layer, last, cost, group))


def _times(times: Times, cost: Callable[[float], str]) -> dict[str, str]:
    return {entry: cost(times[key]) for key, entry in ENTRIES.items() if key in times}


def _part(
    table: str, part: StageCosts, last: bool, cost: Callable[[float], str], group: str | None = None
) -> Iterator[str]:
    """Lines of a stage or a layer, an entry of the list ``table``; the ``last`` one of a chain sends nothing on."""
    sizes = {"weights": part.weights, "gradients": part.gradients, "optimizer": part.optimizer}
    step, noise = show_time(part.step) if part.step else None, _noise(part.step_noise)
    entries = {name: show_size(size) for name, size in sizes.items()}
    yield from _table(f"[[{table}]]", {"group": group, **entries, "step": step, "step_noise": noise})
    for size, timing in part.at.items():
        lines = _table(f"[[{table}.at]]", {"micro_batch_size": size, **_timing(timing, last, cost)})
        yield from (f"  {line}" for line in lines)
        for part_of_it in timing.slices:
            lines = _table(f"[[{table}.at.slice]]", _timing(part_of_it, last, cost))
            yield from (f"    {line}" for line in lines)


def _timing(timing: Timing, last: bool, cost: Callable[[float], str]) -> dict[str, str | None]:
    kept = timing.kept
    always = {"activations": kept.activations, "input": kept.input}
    always |= {} if last else {"output": timing.output, "gradient_output": timing.gradient}
    further = {"released": kept.released, "operands": kept.operands, "resident": kept.resident}
    further |= {"resident_operands": kept.resident_operands}
    further |= {"carry": kept.carry, "carry_gradient": kept.carry_gradients}
    sizes = {name: show_size(size) for name, size in (always | further).items() if size or name in always}
    return {**_times(timing.times, cost), **sizes, "noise": _noise(timing.noise)}


def _noise(share: float | None) -> str | None:
    return None if share is None else show_share(share)


def _cluster(cluster: Cluster) -> Iterator[str]:
    entries = {"name": cluster.name, "workers": cluster.workers, "per_node": cluster.per_node}
    sizes = {"memory": show_size(cluster.memory), "reserved": show_size(cluster.reserved)}
    yield from _table("[cluster]", {**entries, **sizes})
    if device := cluster.device:
        entries = {"peak": show_work(device.peak, "FLOP/s"), "efficiency": device.efficiency, "half_at": device.half_at}
        overhead = show_time(device.operation) if device.operation else None
        yield from ("", *_table("[device]", {**entries, "operation": overhead}))
    for name, link in (("links.between", cluster.between), ("links.within", cluster.within), ("sum", cluster.sums)):
        yield from ("", *_table(f"[{name}]", {**_link(link), "shared": link.shared or None}))
    if host := cluster.host:
        workers = None if host.workers == 1 else host.workers
        memory = None if host.memory is None else show_size(host.memory)
        yield from ("", *_table("[host]", {**_link(host.link), "workers": workers, "memory": memory}))


def _link(link: Link) -> dict[str, str | None]:
    overhead = show_time(link.overhead) if link.overhead else None
    return {"latency": show_time(link.alpha), "bandwidth": show_bandwidth(link.beta), "overhead": overhead}
