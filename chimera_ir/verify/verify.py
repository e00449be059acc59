"""Verification: applies the rules level by level, and defines the type of programs for which all rules hold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from typing import assert_never

from chimera_ir.diagnostics.catalogue.program import BoundExceeded
from chimera_ir.diagnostics.catalogue.schedule import LaneCount, NotLowered
from chimera_ir.diagnostics.model import Diagnostic, Rejected, raise_errors
from chimera_ir.flow import live
from chimera_ir.flow.net import Net, net_of, runnable_stream
from chimera_ir.ir.levels import Header, Plan, Program, Schedule
from chimera_ir.ir.ops import NOWHERE, Communicators, Worker, singles
from chimera_ir.ir.rolled import Insertion, LoopedLane, RolledProgram, is_in, with_turns
from chimera_ir.ir.streams import ProgramStream, ScheduleStream, stream_of
from chimera_ir.plural import counted
from chimera_ir.verify.complete import complete, groups, paired, placed
from chimera_ir.verify.cycle import acyclic, clocks
from chimera_ir.verify.findings import Findings, Rule, apply, check
from chimera_ir.verify.holdings import Holdings, Needs, holdings, memory, memory_of_program, memory_unknown
from chimera_ir.verify.messages import (
    Certificate,
    Communication,
    cells,
    channels,
    communications,
    conflict_free,
    messages,
    moves,
    places,
    slots,
)
from chimera_ir.verify.scripts import WorkerScript, repeats, scripts, state_repeats, worker_scripts
from chimera_ir.verify.versions import copies, differing, gradients, surplus, ties, versions

_SEAL = object()


@dataclass(frozen=True)
class Checked:
    """A ``schedule`` with the findings of the rules on it; without errors, it can be lowered to a program.

    ``level`` is what can be lowered: ``schedule`` itself, or the stream whose first updates it shows. ``net`` is None
    if an earlier rule failed. ``needs`` returns the bytes of a program, None if they are not known.
    """

    level: Schedule | ScheduleStream
    schedule: Schedule
    findings: Findings
    net: Net | None
    needs: Needs | None = None


@dataclass(frozen=True, repr=False)
class Verified:
    """A program for which every rule holds, with the proofs; only `verify_program` makes one.

    ``program`` is what was proven: ``level`` itself, as many updates of a stream as show all that ever happens, or the
    window into which a rolled program puts further turns.
    ``checked`` is its schedule. ``certificates`` has for each transport a global order in which the program finishes.
    ``live`` has the most activations that each worker keeps, in M_a, and ``weights`` the most weights, in M_theta.
    """

    level: Program | ProgramStream | RolledProgram
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

    def __repr__(self) -> str:
        return f"<Verified: {self.level!r}>"

    @property
    def header(self) -> Header:
        """The header of what runs: of a stream that of the updates in `program`."""
        return self.scripted.header

    @property
    def scripted(self) -> Program | RolledProgram:
        """The program that scripts run: the rolled one, else `program`."""
        return self.level if isinstance(self.level, RolledProgram) else self.program

    @property
    def schedule(self) -> Schedule:
        """The compute operations of `program`, in the order of the lanes."""
        return self.checked.schedule

    @cached_property
    def holdings(self) -> tuple[Holdings, ...]:
        """The holdings of each worker, stage by stage."""
        return tuple(holdings(self.program if isinstance(self.level, RolledProgram) else self.level))

    @cached_property
    def communications(self) -> tuple[Communication, ...]:
        """The results for each choice of communicators, from the choice with the most to the one with the fewest."""
        return tuple(communications(self.level, self.program, self.certificates[0].played))

    def blocked(self, communicators: Communicators) -> str:
        """The operations that block the program with these communicators, in words; empty if it is proven to finish."""
        return next(result.blocked for result in self.communications if result.communicators is communicators)

    def with_evaluation(self, evaluation: "Callable[[], Verified]") -> tuple[Communication, ...]:
        """Returns `communications`, with those marked as blocked with which the evaluation does not finish.

        ``evaluation`` returns the verified evaluation. It is called only if the program finishes with fewer
        communicators than one for each direction between two workers.
        """
        if not any(training.finishes for training in self.communications[1:]):
            return self.communications
        return tuple(
            replace(training, played=None, blocked=f"in evaluations {forwards.blocked}")
            if training.finishes and not forwards.finishes
            else training
            for training, forwards in zip(self.communications, evaluation().communications, strict=True)
        )


@dataclass(frozen=True, repr=False)
class ProvenScripts:
    """Files whose scripts do what a verified program says; only `verify_scripts` makes them.

    ``files`` run the program, by path relative to the output directory; ``by_worker`` are the scripts among them.
    ``lines[w]`` has the line of the script of worker w that runs each instruction in `Verified.program`. ``rules`` are
    those for the program, and "scripts".
    """

    files: Mapping[str, str]
    by_worker: tuple[WorkerScript, ...]
    lines: Sequence[Sequence[int]]
    rules: frozenset[Rule]
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("only verify_scripts makes ProvenScripts")

    def __repr__(self) -> str:
        return f"<ProvenScripts: {counted(len(self.files), 'file')}>"


def verify_schedule(
    level: Schedule | ScheduleStream, plan: Plan | None, needs: Needs | None = None, *, of_program: bool = False
) -> Checked:
    """Applies the rules "conflict-free", "complete", "placed" and "acyclic", and parts of "memory" and "repeats".

    Clocks of ``plan`` that do not increase along a dependency are warnings; without a plan, the place of an operation
    in its lane is its clock. Without ``needs``, the bytes of a program, each bound in bytes gives a warning.
    ``of_program``: if memory moves, the bounds are checked with the program, whose lines say how much is kept.
    """
    if isinstance(level, ScheduleStream):
        schedule = level.view(level.updates_shown if plan is None else plan.header.updates)
    else:
        schedule = level
    findings, net = _schedule_findings(schedule, plan, of_program=of_program)
    findings = _clocks(plan) + findings
    if needs is None:
        findings += check("memory", memory_unknown(schedule.header))
    if isinstance(level, Schedule) and schedule.header.asynchronous and not findings.errors:
        findings += check("repeats", repeats(schedule))
        level = schedule if findings.errors else stream_of(schedule)
    return Checked(level, schedule, findings, net, needs)


def _clocks(plan: Plan | None) -> Findings:
    if plan is None:
        return Findings(frozenset({Rule.CONFLICT_FREE}))
    return apply(Rule.CONFLICT_FREE, conflict_free(plan)) + check("clocks", clocks(plan))


def verify_operations(schedule: Schedule) -> Findings:
    """Returns the findings of the rules for which the order of operations in lanes does not matter."""
    if len(schedule.lanes) != schedule.header.workers:
        return Findings(diagnostics=(LaneCount(NOWHERE, len(schedule.lanes), schedule.header.workers),))
    operations = [
        (Worker(number), operation) for number, lane in enumerate(schedule.lanes) for operation in singles(lane)
    ]
    findings = apply(Rule.PLACED, placed(schedule.header, operations))
    if not findings.errors:
        rules = complete(schedule.header, operations), groups(schedule.header, operations)
        findings += apply(Rule.COMPLETE, *rules)
    return findings + check("complete", paired(schedule))


def _schedule_findings(schedule: Schedule, plan: Plan | None, *, of_program: bool) -> tuple[Findings, Net | None]:
    """Applies the rules but "repeats" to a schedule; the net is None if it is not placed and complete."""
    # The other rules need a micro-batch to meet every stage once, on the worker that holds the stage.
    findings = verify_operations(schedule)
    if findings.errors:
        return findings, None
    net = net_of(schedule)
    bounds = () if of_program and schedule.header.moves else memory(schedule)
    findings += apply(Rule.ACYCLIC, acyclic(net, plan)) + check("memory", bounds)
    if schedule.header.steps_inside:
        findings += check("versions", differing(schedule), ties(schedule))
    return findings, net


def verify_program(level: Program | ProgramStream, checked: Checked | None = None) -> Verified:
    """Applies all rules to any program.

    ``checked`` is the result of `verify_schedule`; if the program has the same operations, they are not checked again.
    In the result, the turns of a stream begin where workers can run them as updates are given to them one by one
    (`flow.lookahead`), so that its text and its scripts say the same.

    Raises `Rejected` with all errors. If the operations are not complete and placed, or the messages make no sense,
    only the errors of this kind are in it.
    """
    if isinstance(level, Program) and level.header.asynchronous:
        raise ValueError("some updates of a stream prove nothing about the others")
    if isinstance(level, Program):
        program = level
    else:
        program = level.view(max(level.updates_shown, checked.schedule.header.updates if checked else 0))
    checked, findings, proofs = proven(program, checked)
    if isinstance(level, ProgramStream):
        findings += apply(Rule.REPEATS, state_repeats(level, program))
        raise_errors(findings.diagnostics)
        # Its lanes are the same wherever its turns begin.
        level = runnable_stream(level)
    return Verified(
        level=level,
        program=program,
        checked=checked,
        rules=findings.rules,
        certificates=proofs,
        live=live.whole(program.header, live.activations(program if program.header.moves else checked.schedule)),
        weights=copies(program),
        seal=_SEAL,
    )


def proven(program: Program, checked: Checked | None = None) -> tuple[Checked, Findings, tuple[Certificate, ...]]:
    """Checks a program, which may be some updates of a stream, by all rules but "repeats" and "scripts".

    Returns the schedule of its operations with the findings on it, the findings of all rules, and the certificates of
    the rule "channels". A ``checked`` schedule with the same operations is not checked again. Raises the errors of
    `verify_program`.
    """
    # The schedule below the program, unless it is one that has passed its rules already.
    schedule = schedule_of(program)
    if checked is None or schedule != checked.schedule:
        findings, net = _schedule_findings(schedule, None, of_program=True)
        checked = Checked(schedule, schedule, _clocks(None) + findings, net)
    raise_errors(checked.findings.diagnostics)
    # What shows lane by lane: messages, their slots, sums, steps, versions.
    in_lanes = cells(program)
    where = places(program)
    findings = checked.findings
    findings += check("channels", messages(program, in_lanes, where), slots(program, in_lanes, where))
    sums = apply(Rule.GRADIENTS, gradients(program))
    findings += check("memory", moves(program)) + sums
    # Without a flush only correct steps tell which version exists when.
    steps_inside = program.header.steps_inside
    if not (steps_inside and sums.errors):
        findings += apply(Rule.VERSIONS, versions(program), surplus(program) if steps_inside else ())
    raise_errors(findings.diagnostics)
    findings += apply(Rule.MEMORY, memory_of_program(program, checked.needs))
    raise_errors(findings.diagnostics)
    # The lanes against each other: only lanes that are right by themselves can be replayed.
    proofs = channels(program)
    findings += apply(Rule.CHANNELS, (proof for proof in proofs if isinstance(proof, Diagnostic)))
    raise_errors(findings.diagnostics)
    return checked, findings, tuple(proof for proof in proofs if isinstance(proof, Certificate))


def verify_turns(window: Verified, insertion: Insertion, lanes: Sequence[LoopedLane]) -> Verified | None:
    """The proven program with the further turns of an insertion, which `verify.insertion` has shown to be right.

    ``lanes`` are the lanes of the window as pieces. The result is None if they are not, or do not go on as the window
    does, or if what blocks the program with fewer communicators is not at its beginning.
    """
    for looped, lane in zip(lanes, window.program.lanes, strict=True):
        ends = [*accumulate((piece.length for piece in looped.pieces), initial=0)]
        parts = [lane[start:end] for start, end in pairwise(ends)]
        if ends[-1] != len(lane) or not all(map(is_in, looped.pieces, parts)):
            return None
    rolled = with_turns(window.program, lanes, insertion)
    if rolled is None:
        return None
    verified = replace(window, level=rolled, seal=_SEAL)
    blocked = [[bool(result.blocked) for result in each.communications] for each in (window, verified)]
    return verified if blocked[0] == blocked[1] else None


def verify_scripts(verified: Verified, evaluation: Verified, files: Mapping[str, str]) -> ProvenScripts:
    """Applies the rule "scripts" to the files that are generated for a verified program and its evaluation.

    ``files`` run both, by path; among them are the scripts and program.json.

    Raises `Rejected` with the scripts that do not do what the programs say.
    """
    by_worker = worker_scripts(verified.header, files)
    lines = tuple([list[int]() for _ in by_worker])
    findings = apply(Rule.SCRIPTS, scripts(verified.scripted, evaluation.scripted, by_worker, lines))
    raise_errors(findings.diagnostics)
    return ProvenScripts(files, by_worker, lines, verified.rules | findings.rules, _SEAL)


def verify_lowered(program: Program | ProgramStream, checked: Checked) -> Verified:
    """Applies all rules to a program that was made from ``checked``, a schedule without errors.

    Raises `Rejected` with the bounds that it exceeds. Any other error is reported as an error of the schedule, because
    the user did not write the program.
    """
    try:
        return verify_program(program, checked)
    except Rejected as rejected:
        if any(isinstance(diagnostic, BoundExceeded) for diagnostic in rejected.diagnostics):
            raise
        worst = rejected.diagnostics[0]
        raise Rejected([NotLowered(worst.span, worst.fill(worst.title), worst.fill(worst.label))]) from rejected


def schedule_of(program: Program) -> Schedule:
    """The compute operations of a program, in their order; ``schedule_of(lower(schedule)) == schedule``."""
    return Schedule(program.header, tuple(tuple(parts.computes.lines) for parts in program.parts))


def schedule_in(level: Schedule | ScheduleStream | Program | ProgramStream) -> Schedule | ScheduleStream:
    """Returns the schedule of a program, or the schedule stream of a program stream; returns a schedule unchanged."""
    match level:
        case Program():
            return schedule_of(level)
        case ProgramStream():
            return level.schedule
        case Schedule() | ScheduleStream():
            return level
        case _:
            assert_never(level)
