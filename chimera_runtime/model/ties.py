"""Ties: parameters that stages share. The model declares them; `unite` makes each of them one object on this rank."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import MISUSED
from chimera_runtime.errors import model as mistakes
from chimera_runtime.model.model import Model
from chimera_runtime.program.job import Job
from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.agreement import ControlGroup
from chimera_runtime.values.last_stage import LOSS
from chimera_runtime.values.mesh_tensors import is_spread, local

_LOSS = "loss"
"""Word that a model writes in place of the number of a stage or layer, for an end in the loss."""

End = tuple[int, str]
"""End of a tie: a stage, and the name of a parameter in it. With layers, the name begins with the layer's index."""

Modules = Mapping[int, torch.nn.Module]
"""The modules of stages, by their number."""


@dataclass(frozen=True)
class Tie:
    """All parameters that the same stages share: one weight group, with one sum and one step.

    ``parameters`` has the ends of each parameter: the stages with the names that the parameter has there. The first end
    gives the initial value. ``stages`` are ascending. If layers of one stage share parameters, there is a tie with this
    one stage; its parameters are in the stage's own weight group.
    """

    stages: Group
    parameters: tuple[tuple[End, ...], ...]


def declared(model: Model, job: Job) -> tuple[Tie, ...]:
    """Returns the ties that a model declares: across stages, in the order of the program, then within one stage. Raises
    `Misuse` if the declaration is malformed, or not what the program was compiled for.
    """
    returned: Any = []
    if model.tied is not None:
        with UserCode(f"tied({job.stages})", MISUSED):
            returned = model.tied(job.stages)
    by_stages: dict[Group, list[tuple[End, ...]]] = defaultdict(list)
    for ends in _read(returned, job.stages, model):
        by_stages[tuple(sorted({stage for stage, _ in ends}))].append(ends)
    across = [stages for stages in by_stages if len(stages) > 1]
    if {*across} != {*job.ties}:
        raise mistakes.ties_differ(model.file, job.name, across, job.ties)
    within = sorted(by_stages.keys() - {*across})
    return tuple(Tie(stages, tuple(by_stages[stages])) for stages in (*job.ties, *within))


def _read(returned: Any, stages: int, model: Model) -> Iterator[tuple[End, ...]]:
    """Checks what ``tied`` returned, and yields the ends of each tied parameter with stages in place of layers."""
    layers, ends_before = model.layers, set[End]()
    kind, count = ("stage", stages) if layers is None else ("layer", len(layers.layers))
    try:
        ends_of = [[(n if n == _LOSS else int(n), str(name)) for n, name in ends] for ends in returned]
    except (TypeError, ValueError):
        last = "num_stages - 1" if layers is None else count - 1
        raise mistakes.ties_have_no_form(file=model.file, stages=stages, returned=returned, last=last) from None
    for ends in ends_of:
        outside = next((number for number, _ in ends if number != _LOSS and not 0 <= number < count), None)
        if outside is not None:
            raise mistakes.tied_number_does_not_exist(
                file=model.file, stages=stages, kind=kind, number=outside, count=count
            )
        if len({number for number, _ in ends}) < 2 and count > 1:
            raise mistakes.tie_is_inside_one(model.file, stages, kind, ends)
        twice = next((end for number, end in enumerate(ends) if end in ends_before or end in ends[:number]), None)
        if twice is not None:
            raise mistakes.end_is_listed_twice(file=model.file, stages=stages, end=twice)
        ends_before.update(ends)
        yield tuple(
            (stages - 1, f"{LOSS}.{name}")
            if number == _LOSS
            else (number, name)
            if layers is None
            else (layers.stage_of(number, stages), f"{number}.{name}")
            for number, name in ends
        )


def unite(control_group: ControlGroup, job: Job, built: Modules, ties: Sequence[Tie], model: Model) -> None:
    """Makes each tied parameter one object on this rank, with the value of its first end; every rank calls it. Raises
    `Misuse` if an end is missing or unlike the others, or stages share an undeclared parameter.
    """
    refuse_undeclared(built, ties, model)
    place = control_group.place
    # Each rank describes its ends in the store, then compares: all ends of a parameter must agree.
    for ends in (ends for tie in ties for ends in tie.parameters):
        _describe(control_group, built, ends, model)
    for tie in ties:
        if place.rank in place.ranks_of(job.members(tie.stages)):
            for ends in tie.parameters:
                _require_equal(control_group, job, ends, model)
                _unite(built, ends)
    # Ranks that do not hold the first end of a parameter get its value by a message.
    for tie in ties:
        for ends in tie.parameters:
            _send_initial(control_group, job, built, tie=tie, ends=ends)


def parameter_of(module: torch.nn.Module, name: str) -> torch.nn.Parameter | None:
    """Returns the parameter with a name, even if the parameter has other names as well; None if there is none."""
    return dict(module.named_parameters(remove_duplicate=False)).get(name)


def described(parameter: torch.nn.Parameter) -> str:
    """Returns dtype and shape of a parameter, and whether it is frozen, as text."""
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{str(parameter.dtype).removeprefix('torch.')} of shape {tuple(parameter.shape)}{frozen}"


def replace(module: torch.nn.Module, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Replaces the parameter ``old`` by ``new`` wherever the module has it."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[name] = new


def _unite(built: Modules, ends: Sequence[End]) -> None:
    first = _held(built, ends)
    for stage, name in ends:
        parameter = parameter_of(built[stage], name) if stage in built else None
        if parameter is not None and parameter is not first:
            replace(built[stage], parameter, first)


def _describe(control_group: ControlGroup, built: Modules, ends: Sequence[End], model: Model) -> None:
    for stage, name in ends:
        if stage not in built:
            continue
        parameter = parameter_of(built[stage], name)
        if parameter is None:
            kind, number, inside = model.locate(stage, name)
            places = [model.locate(stage, other) for other, _ in built[stage].named_parameters(remove_duplicate=False)]
            names = [other for *elsewhere, other in places if elsewhere == [kind, number]]
            suggestion = next(iter([*get_close_matches(inside, names, n=1), *names]), None)
            place = model.place(stage, name)
            raise mistakes.tied_parameter_is_missing(model.file, inside, place, suggestion=suggestion)
        if is_spread(parameter):
            raise mistakes.tied_parameter_is_spread(file=model.file, parameter=model.words((stage, name)))
        control_group.store.set(f"tie/{stage}/{name}", described(parameter))


def _require_equal(control_group: ControlGroup, job: Job, ends: Sequence[End], model: Model) -> None:
    first = _described(control_group, job, ends[0])
    for end in ends[1:]:
        other = _described(control_group, job, end)
        if other != first:
            raise mistakes.ends_differ(
                file=model.file, first=model.words(ends[0]), traits=first, other=model.words(end), other_traits=other
            )


def _described(control_group: ControlGroup, job: Job, end: End) -> str:
    stage, name = end
    what = f"for what {name} of stage {stage} is like, which another stage shares"
    holder = control_group.place.ranks_of(job.members((stage,)))[0]
    return control_group.wait_for_key(f"tie/{stage}/{name}", holder, what).decode()


def _send_initial(control_group: ControlGroup, job: Job, built: Modules, *, tie: Tie, ends: Sequence[End]) -> None:
    first, name = ends[0]
    place = control_group.place
    holders = place.ranks_of(job.members((first,)))
    targets = [rank for rank in place.ranks_of(job.members(tie.stages)) if rank not in holders]
    what = f"for the initial value of {name} of stage {first}, which other stages share"
    if place.rank == holders[0]:
        for target in targets:
            control_group.send(_held(built, ends), target, what)
    elif place.rank in targets:
        parameter = _held(built, ends)
        room = torch.empty_like(parameter, device="cpu", memory_format=torch.contiguous_format)
        control_group.recv(room, holders[0], what)
        with torch.no_grad():
            parameter.copy_(room)


def by_group(built: Modules, ties: Sequence[Tie]) -> dict[Group, list[torch.nn.Parameter]]:
    """Returns the parameters of stages by weight group: those of ties, each once, then those of single stages."""
    groups = {
        tie.stages: [_held(built, ends) for ends in tie.parameters]
        for tie in ties
        if len(tie.stages) > 1 and any(stage in built for stage in tie.stages)
    }
    apart = {parameter for parameters in groups.values() for parameter in parameters}
    return groups | {(s,): [p for p in module.parameters() if p not in apart] for s, module in built.items()}


def named(built: Modules, ties: Sequence[Tie]) -> dict[End, torch.nn.Parameter]:
    """Returns the parameters of stages, each once, by (stage, name): a tied one by its first end, on all ranks."""
    first = {_held(built, ends): ends[0] for tie in ties for ends in tie.parameters if any(s in built for s, _ in ends)}
    return {first.get(p, (stage, name)): p for stage, module in built.items() for name, p in module.named_parameters()}


def _held(built: Modules, ends: Sequence[End]) -> torch.nn.Parameter:
    stage, name = next(end for end in ends if end[0] in built)
    parameter = parameter_of(built[stage], name)
    assert parameter is not None
    return parameter


def shared(built: Modules, model: Model) -> Iterator[tuple[End, End]]:
    """Yields pairs of ends in two stages, or in two layers, that are one object or, if one is trained, one memory."""
    owners: dict[int, tuple[End, torch.nn.Parameter]] = {}
    for stage, module in built.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            address = 0 if parameter.is_meta else local(parameter).data_ptr()
            owner, other = owners.setdefault(address or id(parameter), ((stage, name), parameter))
            is_one = parameter is other or parameter.requires_grad or other.requires_grad
            (kind, number, _), (other_kind, other_number, _) = model.locate(*owner), model.locate(stage, name)
            is_inside = owner[0] == stage and "loss" in (kind, other_kind)
            if is_one and (kind, number) != (other_kind, other_number) and not is_inside:
                yield owner, (stage, name)


def refuse_undeclared(built: Modules, ties: Sequence[Tie], model: Model) -> None:
    """Raises `Misuse` if stages, or layers of a stage, are known to share a parameter that is not tied.

    A rank knows of parameters that stages of its own share, and of those that a module lists in ``_tied_weights_keys``.
    The last stage and the loss may share one, like modules of a stage. The message has the line that declares the tie.
    """
    tied = {end for tie in ties for ends in tie.parameters for end in ends}
    for first, other in shared(built, model):
        if not any({first, other} <= {*ends} for tie in ties for ends in tie.parameters):
            (kind, number, _), (other_kind, last, inside) = model.locate(*first), model.locate(*other)
            of_stages = f"{kind}s {number} and {last}"
            places = of_stages if kind == other_kind else f"{model.place(*first)} and {model.place(*other)}"
            lines = declaration(model, [(first, other)])
            raise mistakes.tie_is_not_declared(model.file, kind, inside, places=places, declaration=lines)
    for stage, module in built.items():
        for name, partner in _tied_elsewhere(module):
            if (stage, name) not in tied:
                kind, number, inside = model.locate(stage, name)
                end = _end(model, (stage, name))
                raise mistakes.tied_weights_key_is_not_declared(
                    model.file, kind, number, parameter=inside, partner=partner, end=end, stage=stage
                )


def declaration(model: Model, ties: Sequence[Sequence[End]]) -> str:
    """Returns what a user writes to declare ties, each given by its ends, as a part of a message."""
    texts = [[_end(model, end) for end in ends] for ends in ties]
    return mistakes.declaration_of_ties(texts, [sorted({stage for stage, _ in ends}) for ends in ties])


def _end(model: Model, end: End) -> str:
    kind, number, inside = model.locate(*end)
    place = f'"{_LOSS}"' if kind == "loss" else number
    return f'({place}, "{inside}")'


def _tied_elsewhere(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yields name and partner of each parameter that a module lists as tied and does not share within itself."""
    names: dict[torch.nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    for prefix, part in module.named_modules():
        keys = getattr(part, "_tied_weights_keys", None)
        if not keys or not getattr(getattr(part, "config", None), "tie_word_embeddings", True):
            continue
        for name, parameter in part.named_parameters(remove_duplicate=False):
            key = next((key for key in keys if _matches(key, name)), None)
            if key is not None and len(names[parameter]) < 2:
                partner = keys[key] if isinstance(keys, Mapping) else "a parameter that it does not name"
                yield f"{prefix}.{name}" if prefix else name, partner


def _matches(key: str, name: str) -> bool:
    try:
        return key == name or re.fullmatch(key, name) is not None
    except re.error:
        return False
