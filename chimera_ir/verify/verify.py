"""Verification: the rules, level by level, and the type that says that all of them hold."""

from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass
from fractions import Fraction
from functools import cached_property

from chimera_ir.diagnostics.catalogue.program import MoreErrors
from chimera_ir.diagnostics.catalogue.schedule import LaneCount
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Header, Plan, Program, Schedule
from chimera_ir.ir.ops import NOWHERE, Compute
from chimera_ir.verify.acyclic import acyclic
from chimera_ir.verify.channels import Certificate, channels
from chimera_ir.verify.clocks import clocks
from chimera_ir.verify.complete import complete
from chimera_ir.verify.conflict_free import conflict_free
from chimera_ir.verify.copies import copies, surplus
from chimera_ir.verify.erase import schedule_of
from chimera_ir.verify.gradients import gradients
from chimera_ir.verify.groups import groups
from chimera_ir.verify.holdings import Holdings, holdings
from chimera_ir.verify.index import cells
from chimera_ir.verify.memory import memory, memory_of_versions, peaks
from chimera_ir.verify.messages import messages, places
from chimera_ir.verify.placed import placed
from chimera_ir.verify.repeats import repeats, state_repeats
from chimera_ir.verify.slots import slots
from chimera_ir.verify.versions import versions

_MOST = 20
"""How many errors of one rule are reported one by one."""

_SEAL = object()


@dataclass(frozen=True)
class Verified:
    """A program of which every rule holds, with the proofs. Only `verify_program` makes one.

    Attributes
    ----------
    program
        What was verified.
    schedule
        Its compute operations.
    certificates
        For each transport a global order in which the program finishes.
    live
        Per worker the peak of activations, in M_a.
    weights
        Per worker the weights it holds at most, in M_theta, older versions included.
    """

    program: Program
    schedule: Schedule
    certificates: tuple[Certificate, ...]
    live: tuple[Fraction, ...]
    weights: tuple[int, ...]
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("only verify_program makes a Verified")

    @cached_property
    def held(self) -> tuple[Holdings, ...]:
        """Per worker what it holds by stage, and what is alive at once."""
        return tuple(holdings(self.program))


def verify_plan(plan: Plan) -> tuple[Diagnostic, ...]:
    """What the clocks alone tell: the rules "conflict-free" and "clocks", the latter as warnings."""
    return (*_some("conflict-free", conflict_free(plan)), *_some("clocks", clocks(plan)))


def verify_schedule(schedule: Schedule, plan: Plan | None) -> tuple[Diagnostic, ...]:
    """Rules "placed", "complete", "acyclic", "repeats" and, but for versions of weights, "memory".

    Without errors the schedule can be lowered.

    Parameters
    ----------
    schedule
        Any.
    plan
        Where it comes from; none for a schedule that was written as such.
    """
    errors = _one_by_one(schedule, plan)
    return errors or (_some("repeats", repeats(schedule)) if schedule.header.asynchronous else ())


def _one_by_one(schedule: Schedule, plan: Plan | None) -> tuple[Diagnostic, ...]:
    """The rules on a schedule as it stands, whether it repeats or not."""
    if len(schedule.lanes) != schedule.header.workers:
        return (LaneCount(NOWHERE, len(schedule.lanes), schedule.header.workers),)
    errors = _operations(schedule.header, _by_worker(schedule))
    return errors or (*_some("acyclic", acyclic(schedule, plan)), *_some("memory", memory(schedule)))


def verify_program(program: Program, checked: Schedule | None = None) -> Verified:
    """All rules, on whatever program.

    Parameters
    ----------
    program
        Any.
    checked
        A schedule without errors by `verify_schedule`; if the program has the same operations, they are not looked at
        again.

    Raises
    ------
    Rejected
        With all errors; where the operations are not complete and placed, or the messages make no sense, with those
        alone.
    """
    schedule = schedule_of(program)
    if schedule != checked:
        _refuse(_one_by_one(schedule, None))
    in_lanes = cells(program)
    found = places(program, in_lanes)
    talk = _some("messages", messages(program, in_lanes, found))
    errors = (*talk, *_updates(program))
    _refuse(errors if talk else (*errors, *_some("messages", slots(program, in_lanes, found))))
    _refuse(_some("memory", memory_of_versions(program)))
    certificates = channels(program)
    _refuse(each for each in certificates if isinstance(each, Diagnostic))
    if program.header.asynchronous:
        _refuse(_some("repeats", repeats(program)))
        _refuse(_some("repeats", state_repeats(program)))
    return Verified(
        program=program,
        schedule=schedule,
        certificates=tuple(each for each in certificates if isinstance(each, Certificate)),
        live=tuple(peak.activations for peak in peaks(schedule)),
        weights=copies(program),
        seal=_SEAL,
    )


def _operations(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> tuple[Diagnostic, ...]:
    listed = list(operations)
    return (
        _some("placed", placed(header, listed))
        or _some("complete", complete(header, listed))
        or _some("complete", groups(header, listed))
    )


def _updates(program: Program) -> tuple[Diagnostic, ...]:
    """Rules "gradients" and "versions"; versions are told apart by steps that are in order."""
    sums = _some("gradients", gradients(program))
    if sums and program.header.asynchronous:
        return sums
    read = _some("versions", versions(program))
    return (*sums, *(read or (_some("versions", surplus(program)) if program.header.asynchronous else ())))


def _by_worker(schedule: Schedule) -> Iterator[tuple[Worker, Compute]]:
    for worker, lane in enumerate(schedule.lanes):
        for operation in lane:
            yield Worker(worker), operation


def _some(rule: str, diagnostics: Iterator[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The first diagnostics of a rule, and how many more there are."""
    found = list(diagnostics)
    rest = found[_MOST:]
    more = [MoreErrors(rest[0].span, len(rest), rule)] if rest else []
    return (*found[:_MOST], *more)


def _refuse(errors: Iterable[Diagnostic]) -> None:
    found = tuple(errors)
    if found:
        raise Rejected(found)
