"""Verification: the rules, level by level, and the type of programs for which all of them hold."""

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass
from fractions import Fraction
from functools import cached_property

from chimera_ir.diagnostics.catalogue.program import BoundExceeded
from chimera_ir.diagnostics.catalogue.schedule import LaneCount, NotLowered
from chimera_ir.diagnostics.model import Diagnostic, Rejected, raise_errors
from chimera_ir.flow import live
from chimera_ir.flow.net import Net, Reads, net_of, reads_of
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
from chimera_ir.verify.findings import Findings, Rule, apply, check
from chimera_ir.verify.gradients import gradients
from chimera_ir.verify.groups import groups
from chimera_ir.verify.holdings import Holdings, holdings
from chimera_ir.verify.index import cells
from chimera_ir.verify.memory import memory, memory_of_versions
from chimera_ir.verify.messages import messages, places
from chimera_ir.verify.placed import placed
from chimera_ir.verify.repeats import repeats, state_repeats
from chimera_ir.verify.slots import slots
from chimera_ir.verify.versions import versions

_SEAL = object()


@dataclass(frozen=True)
class Checked:
    """A schedule with the findings of the rules on it and on its clocks; without errors, it can be lowered.

    ``reads`` are the reads of its operations, empty if an earlier rule failed.
    """

    schedule: Schedule
    findings: Findings
    reads: Reads

    @cached_property
    def net(self) -> Net:
        """The net of the schedule, if there are no errors."""
        return net_of(self.schedule, self.reads)


@dataclass(frozen=True)
class Verified:
    """A program for which every rule holds, with the proofs; only `verify_program` makes one.

    Attributes
    ----------
    program
        The verified program.
    checked
        The schedule of its compute operations, with the findings on it.
    rules
        The rules that were applied in full to it, to its schedule and, if it has clocks, to its plan.
    certificates
        For each transport a global order in which the program finishes.
    live
        Per worker the peak of activations, in M_a.
    weights
        Per worker the most weights that it holds, in M_theta, older versions included.
    """

    program: Program
    checked: Checked
    rules: frozenset[Rule]
    certificates: tuple[Certificate, ...]
    live: tuple[Fraction, ...]
    weights: tuple[int, ...]
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("only verify_program makes a Verified")

    @property
    def schedule(self) -> Schedule:
        """Its compute operations."""
        return self.checked.schedule

    @cached_property
    def held(self) -> tuple[Holdings, ...]:
        """Per worker its holdings by stage, and the activations alive at once."""
        return tuple(holdings(self.program))


def verify_schedule(schedule: Schedule, plan: Plan | None) -> Checked:
    """Rules "conflict-free", "complete", "placed", "acyclic", and the parts of "memory" and "repeats" for schedules.

    Clocks that do not increase are warnings.

    Parameters
    ----------
    schedule
        Any.
    plan
        The plan that the schedule comes from; None for a schedule that was written as such. There the place in the lane
        is the clock, so no two operations of a worker share a clock.
    """
    findings, reads = _schedule_findings(schedule, plan)
    findings = _clocks(plan) + findings
    if schedule.header.asynchronous and not findings.errors:
        findings += check("repeats", repeats(schedule))
    return Checked(schedule, findings, reads)


def _clocks(plan: Plan | None) -> Findings:
    if plan is None:
        return Findings(frozenset({Rule.CONFLICT_FREE}))
    return apply(Rule.CONFLICT_FREE, conflict_free(plan)) + check("clocks", clocks(plan))


def _schedule_findings(schedule: Schedule, plan: Plan | None) -> tuple[Findings, Reads]:
    """The findings of the rules on a schedule, without the rule "repeats", and its reads if placed and complete."""
    if len(schedule.lanes) != schedule.header.workers:
        return Findings(diagnostics=(LaneCount(NOWHERE, len(schedule.lanes), schedule.header.workers),)), ()
    findings = _operations(schedule.header, tuple(_by_worker(schedule)))
    if findings.errors:
        return findings, ()
    reads = reads_of(schedule)
    return findings + apply(Rule.ACYCLIC, acyclic(schedule, plan, reads)) + check("memory", memory(schedule)), reads


def _operations(header: Header, operations: Sequence[tuple[Worker, Compute]]) -> Findings:
    findings = apply(Rule.PLACED, placed(header, operations))
    if findings.errors:
        return findings
    return findings + apply(Rule.COMPLETE, complete(header, operations), groups(header, operations))


def verify_program(program: Program, checked: Checked | None = None) -> Verified:
    """Applies all rules to any program.

    Parameters
    ----------
    program
        Any.
    checked
        The result of `verify_schedule`; if the program has the same operations, they are not checked again.

    Raises
    ------
    Rejected
        With all errors. If the operations are not complete and placed, or the messages make no sense, with these errors
        alone.
    """
    schedule = schedule_of(program)
    if checked is None or schedule != checked.schedule:
        findings, reads = _schedule_findings(schedule, None)
        checked = Checked(schedule, _clocks(None) + findings, reads)
    raise_errors(checked.findings.diagnostics)
    in_lanes = cells(program)
    where = places(program, in_lanes)
    talk = check("channels", messages(program, in_lanes, where), slots(program, in_lanes, where))
    findings = checked.findings + talk + _updates(program)
    raise_errors(findings.diagnostics)
    findings += apply(Rule.MEMORY, memory_of_versions(program))
    raise_errors(findings.diagnostics)
    proofs = channels(program)
    findings += apply(Rule.CHANNELS, (proof for proof in proofs if isinstance(proof, Diagnostic)))
    raise_errors(findings.diagnostics)
    if program.header.asynchronous:
        findings += apply(Rule.REPEATS, repeats(program), state_repeats(program))
        raise_errors(findings.diagnostics)
    return Verified(
        program=program,
        checked=checked,
        rules=findings.rules,
        certificates=tuple(proof for proof in proofs if isinstance(proof, Certificate)),
        live=live.whole(schedule.header, live.activations(schedule)),
        weights=copies(program),
        seal=_SEAL,
    )


def verify_lowered(program: Program, checked: Checked) -> Verified:
    """Applies all rules to a program that was made from a schedule without errors.

    Raises
    ------
    Rejected
        With the bounds that it exceeds. Any other error is reported as an error of the schedule, because the user did
        not write the program.
    """
    try:
        return verify_program(program, checked)
    except Rejected as rejected:
        if any(isinstance(diagnostic, BoundExceeded) for diagnostic in rejected.diagnostics):
            raise
        worst = rejected.diagnostics[0]
        raise Rejected([NotLowered(worst.span, worst.fill(worst.title), worst.fill(worst.label))]) from rejected


def _updates(program: Program) -> Findings:
    """Rules "gradients" and "versions"; the second needs steps in order, to know which version exists when."""
    streams = program.header.asynchronous
    sums = apply(Rule.GRADIENTS, gradients(program))
    if streams and sums.errors:
        return sums
    return sums + apply(Rule.VERSIONS, versions(program), surplus(program) if streams else ())


def _by_worker(schedule: Schedule) -> Iterator[tuple[Worker, Compute]]:
    for worker, lane in enumerate(schedule.lanes):
        for operation in lane:
            yield Worker(worker), operation
