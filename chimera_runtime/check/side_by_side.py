"""``--check`` of the stages, in one process: with the model that ``reference()`` returns, and of slices with sequences.

The check of the ranks compares them with the same stages, so it cannot find a stage that lacks a layer; the model of
``reference()`` does. Slices that are compared with whole sequences show a model that is not causal, and a stage whose
carry lacks something. All runs in evaluation mode: in training mode dropout would draw other numbers for each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import chain
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.check.compare import bound_of, share_of
from chimera_runtime.check.reference import Gradients, PassLoss, Reference, differences, items_of_slices, size
from chimera_runtime.errors import FAILED, MISUSED
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.errors.model import result_is_wrong
from chimera_runtime.model.model import ModelFile
from chimera_runtime.model.naming import names_in_model
from chimera_runtime.model.ties import End, parameter_of
from chimera_runtime.values.last_stage import LOSS
from chimera_runtime.values.nested import leaves


@dataclass(frozen=True)
class Agreement:
    """Errors of loss and gradients, both relative, the largest that is allowed, and the words for what was compared."""

    loss: float
    gradients: float
    bound: float
    subject: str

    def __str__(self) -> str:
        return (
            f"{self.subject} by {self.loss:.2e}, gradients by {self.gradients:.2e} of the largest of their stage, at "
            f"most {self.bound:.0e}"
        )


def _mean(losses: Sequence[PassLoss], divisor: float) -> float:
    return sum(loss.total + sum(loss.auxiliary.values()) for loss in losses) / divisor


# The user's own model.


def compare_with_model(reference: Reference) -> Agreement:
    """Compares loss and gradients of the first update, after the weights of the stages went into the user's model.

    Raises `CheckFailed` if they differ, or a parameter has no partner; `Misuse` if ``reference`` or ``name`` return
    something that they must not.
    """
    reference, model = unsliced(reference), reference.model
    tied = [ends for parameters in reference.ties.values() for ends in parameters]
    stages = [reference.build(stage).eval() for stage in range(reference.stages)]
    whole = _built(reference, model)
    bare = [*map(reference.alone, stages)]
    of_stages = [[end for end in ends if not end[1].startswith(LOSS)] for ends in tied]
    names = [names_in_model(model, stage, module) for stage, module in enumerate(bare)]
    partners = Partners(bare, whole, names, of_stages)
    if partners.wrong:
        raise mistakes.parameters_do_not_match(partners.wrong)
    ends = [
        reference.with_loss(whole, reference.names[-1] if reference.names else "").eval()
    ]  # with a loss of its own, which may change from call to call
    with torch.no_grad():
        for first, *others in tied:
            for place in others:
                _parameter(stages, place).copy_(_parameter(stages, first))
        for name, of_loss in stages[-1].named_parameters(remove_duplicate=False):
            if name.startswith(LOSS):
                _parameter(ends, (0, name)).copy_(of_loss)
    partners.copy()

    # Each micro-batch has the weight 1 / (micro-batches of all copies), even if its loss is a sum with a count: the
    # stages and the user's model count the same items, so they still compare.
    def loss(modules: Sequence[torch.nn.Module], batch: Any, number: int) -> float:
        divisor = reference.copies * reference.passes
        return _mean(reference.run(modules, [batch], (0, *divmod(number, reference.passes)), divisor), divisor)

    with UserCode("an update of the stages and of reference(), side by side", FAILED):
        batches = [next(reference.batches()) for _ in range(2)]  # a forward may change its input in place
        losses = [
            [loss(modules, batch, number) for modules, batch in zip((stages, ends), pair, strict=True)]
            for number, pair in enumerate(zip(*batches, strict=True))
        ]
    (mine, theirs), scale = map(sum, zip(*losses, strict=True)), sum(abs(loss) for _, loss in losses)
    bound = bound_of({p.dtype for p in whole.parameters()}, model.autocast, len(losses))
    off = share_of(abs(mine - theirs), scale)
    worst, parameter = _furthest([*partners.gradients()])
    if not off <= bound:
        raise mistakes.losses_differ(reference=theirs, stages=mine)
    if not worst <= bound:
        raise mistakes.gradients_differ(error=worst, parameter=parameter, bound=bound)
    count = len({id(p) for p in partners.pairs.values()})
    return Agreement(off, worst, bound, f"reference(): {count} parameters; loss off")


def _parameter(modules: Sequence[torch.nn.Module], end: End) -> torch.nn.Parameter:
    parameter = parameter_of(modules[end[0]], end[1])
    assert parameter is not None
    return parameter


def _built(reference: Reference, model: ModelFile) -> torch.nn.Module:
    assert model.reference is not None
    torch.manual_seed(0)
    with UserCode("reference()", MISUSED):
        whole = model.reference()
    if not isinstance(whole, torch.nn.Module):
        raise result_is_wrong(
            file=model.file, call="reference", kind=f"a {type(whole).__name__}", wanted="a torch.nn.Module"
        )
    return whole.to(reference.device).eval()


@dataclass(eq=False)
class Partners:
    """Pairs of parameters, one of a stage and one of the user's model ``whole``.

    ``names`` has for each stage the name in the user's model of each parameter and buffer. ``tied`` has groups of
    parameters that are declared to be one. ``wrong`` has messages about parameters that do not pair up.
    """

    stages: Sequence[torch.nn.Module]
    whole: torch.nn.Module
    names: Sequence[dict[str, str]]
    tied: Sequence[Sequence[End]]
    pairs: dict[End, torch.nn.Parameter] = field(default_factory=dict, init=False)
    wrong: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._theirs = dict(self.whole.named_parameters(remove_duplicate=False))
        complaints = self._without_partner(), self._left_out(), self._in_two_places(), self._apart(), self._unlike()
        self.wrong = [*chain(*complaints)]

    def mine(self, place: End) -> torch.nn.Parameter:
        """Returns a parameter of a stage."""
        return self.stages[place[0]].get_parameter(place[1])

    def _without_partner(self) -> Iterator[str]:
        """Finds the pairs; yields a complaint about each stage with parameters that have no partner."""
        for stage, module in enumerate(self.stages):
            absent = []
            for inside, _ in module.named_parameters():
                name = self.names[stage][inside]
                if name in self._theirs:
                    self.pairs[stage, inside] = self._theirs[name]
                else:
                    absent.append(name)
            if absent:
                nearest = get_close_matches(absent[0], self._theirs, 1, 0.0)
                yield mistakes.parameters_are_missing(absent, stage, nearest[0] if nearest else None)

    def _left_out(self) -> Iterator[str]:
        held = {id(parameter) for parameter in self.pairs.values()}
        if not held:
            return
        named_before: set[int] = set()
        for name, module in (*self.whole.named_modules(), ("", None)):
            parameters = dict(self.whole.named_parameters() if module is None else module.named_parameters())
            absent = {n: p for n, p in parameters.items() if id(p) not in held | named_before}
            if absent and (module is None or len(absent) == len(parameters)):
                named_before |= {id(parameter) for parameter in absent.values()}
                yield mistakes.parameters_are_on_no_stage(None if module is None else name, [*absent])

    def _in_two_places(self) -> Iterator[str]:
        places: dict[int, list[End]] = {}
        for place, theirs in self.pairs.items():
            places.setdefault(id(theirs), []).append(place)
        for several in places.values():
            if len(several) > 1 and not any({*several} <= {*group} for group in self.tied):
                yield mistakes.tie_is_not_declared(several, self._name(several[0]))

    def _apart(self) -> Iterator[str]:
        for group in self.tied:
            first_of: dict[int, End] = {}
            for place in group:
                if place in self.pairs:
                    first_of.setdefault(id(self.pairs[place]), place)
            if len(first_of) > 1:
                ends = [*first_of.values()]
                yield mistakes.tie_is_not_in_the_model(ends, map(self._name, ends))

    def _unlike(self) -> Iterator[str]:
        for place, theirs in self.pairs.items():
            mine = self.mine(place)
            here, there = (f"{tuple(p.shape)} {p.dtype}, trained: {p.requires_grad}" for p in (mine, theirs))
            if here != there:
                yield mistakes.parameters_are_unlike(
                    name=self._name(place), reference=there, stages=here, parameter=place[1], stage=place[0]
                )

    def _name(self, place: End) -> str:
        return self.names[place[0]][place[1]]

    @torch.no_grad()
    def copy(self) -> None:
        """Copies the weights of the stages to the user's model, and buffers if it has them."""
        for place, theirs in self.pairs.items():
            theirs.copy_(self.mine(place))
        buffers = dict(self.whole.named_buffers())
        for stage, module in enumerate(self.stages):
            for inside, buffer in module.named_buffers():
                partner = buffers.get(self.names[stage][inside])
                if partner is not None and partner.shape == buffer.shape:
                    partner.copy_(buffer)

    def gradients(self) -> Iterator[tuple[str, int, torch.Tensor | None, torch.Tensor | None]]:
        """Yields for each parameter its name, a stage that has it, and both gradients; those of stages are added up."""
        summed: dict[str, tuple[int, torch.Tensor | None, torch.Tensor | None]] = {}
        first: dict[int, str] = {}
        for place, theirs in self.pairs.items():
            name = first.setdefault(id(theirs), self._name(place))
            _, before, _ = summed.get(name, (0, None, None))
            gradient = self.mine(place).grad
            if gradient is not None and before is not None:
                gradient = gradient + before
            summed[name] = place[0], before if gradient is None else gradient, theirs.grad
        yield from ((name, *of_parameter) for name, of_parameter in summed.items())


def _furthest(gradients: Sequence[tuple[str, int, torch.Tensor | None, torch.Tensor | None]]) -> tuple[float, str]:
    """The largest error of a gradient, relative to the largest gradient of its stage, and the parameter's name."""
    largest: dict[int, float] = {}
    for _, stage, _, theirs in gradients:
        largest[stage] = max(largest.get(stage, 0.0), size([theirs]))
    shares = [
        (share_of(next(differences([mine], [theirs])), largest[stage]), name) for name, stage, mine, theirs in gradients
    ]
    return max(shares, default=(0.0, ""))


# Slices of sequences.


MakeStages = Callable[[Reference], Sequence[torch.nn.Module]]
"""Function that makes the stages of a reference, for one process."""


class _CheckedStages:
    """Runs the stages on the first micro-batch, in slices or as a whole; keeps loss, gradients and outputs."""

    def __init__(self, reference: Reference, make: MakeStages) -> None:
        self.stages = [stage.eval() for stage in make(reference)]
        self.dtypes = {p.dtype for module in self.stages for p in module.parameters()}
        self._outputs: dict[int, list[Any]] = {}
        losses = reference.run(self.stages, next(reference.batches())[: reference.slices], note=self._note)
        self.loss = _mean(losses, sum(loss.items for loss in losses) or 1.0)

    def _note(self, _micro: int, stage: int, output: Any) -> None:
        tensors = [leaf.detach() for leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
        self._outputs.setdefault(stage, []).append(tensors)

    def outputs(self, stage: int) -> list[torch.Tensor]:
        return [torch.cat(tensors, 1) for tensors in zip(*self._outputs[stage], strict=True)]

    def gradients(self, stage: int) -> Gradients:
        return [p.grad for p in self.stages[stage].parameters()]


def compare_slices(reference: Reference, make: MakeStages = lambda of: [*map(of.build, range(of.stages))]) -> Agreement:
    """Compares loss and gradients of slices, which ``reference`` runs, with those of whole sequences.

    ``make`` makes the stages of a reference. Raises `CheckFailed` if they differ.
    """
    with UserCode("the stages on slices and on whole sequences, side by side", FAILED):
        sliced, whole = (_CheckedStages(of_kind, make) for of_kind in (reference, unsliced(reference)))
    bound = bound_of(whole.dtypes, reference.model.autocast, reference.slices)
    off = share_of(abs(sliced.loss - whole.loss), abs(whole.loss))
    errors = [_error(sliced.gradients(s), whole.gradients(s), whole.gradients(s)) for s in range(reference.stages)]
    if off <= bound and max(errors) <= bound:
        subject = f"{reference.slices} slices: loss off from that of whole sequences"
        return Agreement(off, max(errors), bound, subject)
    # The first stage whose outputs differ is the one to mend; if none does, a carry has lost its gradients.
    lengths = reference.lengths or (1,) * reference.slices
    for stage in range(reference.stages - 1):
        outputs = sliced.outputs(stage), whole.outputs(stage)
        for place in range(len(lengths)):
            here, there = (
                [torch.split(tensor, items_of_slices(tensor.shape[1], lengths), 1)[place] for tensor in tensors]
                for tensors in outputs
            )
            if (error := _error(here, there, outputs[1])) > bound:
                raise mistakes.slice_differs(stage, place, error)
    if off > bound:
        raise mistakes.slice_differs(reference.stages - 1, None, off)
    raise mistakes.carry_loses_gradients(stage=errors.index(max(errors)), error=max(errors))


def _error(mine: Gradients, theirs: Gradients, scale: Gradients) -> float:
    """The largest difference of two lists of tensors, relative to the largest number in ``scale``."""
    return share_of(max(differences(mine, theirs), default=0.0), size(scale))


def unsliced(reference: Reference) -> Reference:
    """Returns a reference that runs whole sequences."""
    return replace(reference, parts=reference.parts // reference.slices, slices=1, lengths=())
