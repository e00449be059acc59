"""The compiler: one pass after another, each level verified before the next pass sees it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from chimera_ir import library
from chimera_ir.codegen.render import scripts
from chimera_ir.cost.launches import eventful, launches
from chimera_ir.cost.model import Costs
from chimera_ir.cost.report import report
from chimera_ir.cost.simulate import Timeline, simulate, ticks
from chimera_ir.diagnostics.model import Diagnostic, raise_errors
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.ir.levels import Plan, Program, Schedule
from chimera_ir.ir.text import parser as ir_parser
from chimera_ir.ir.text.printer import show
from chimera_ir.lower.lower import lower
from chimera_ir.lower.order import order
from chimera_ir.picture import svg
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme
from chimera_ir.syntax.change import Change
from chimera_ir.syntax.parser import parse
from chimera_ir.undisturbed import undisturbed
from chimera_ir.verify.erase import schedule_of
from chimera_ir.verify.verify import Verified, verify_plan, verify_program, verify_schedule

MAX_OPERATIONS = 1_000_000
"""How many compute operations a scheme may ask for, unless the user raises it."""


class Level(Enum):
    """The levels of a compilation, in the order in which they come about; the values are the names of ``--emit``."""

    AST = "ast"
    PLAN = "plan"
    SCHEDULE = "schedule"
    PROGRAM = "program"
    TIMELINE = "timeline"
    REPORT = "report"


@dataclass(frozen=True, slots=True)
class Request:
    """What to compile: a text, the parameters, costs and clauses that the user set, and a limit on its size."""

    source: Source
    settings: Mapping[str, int] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)
    max_operations: int = MAX_OPERATIONS
    change: Change = field(default_factory=Change)


class TooLarge(Exception):
    """An IR text, or the baseline of the report, has more operations than the request allows; the message says so."""


Result = tuple[Level, object]
Warn = Callable[[Diagnostic], None]


def _made(levels: Iterator[Result]) -> Iterator[Result]:
    """The levels, each made without the garbage collector; it may run while somebody looks at one."""
    while True:
        with undisturbed():
            result = next(levels, None)
        if result is None:
            return
        yield result


def compile_scheme(request: Request, warn: Warn) -> Iterator[Result]:
    """Every level of a scheme, as soon as it is verified; who wants no further level stops asking.

    Raises
    ------
    Rejected
        With all errors of the first level that has any.
    SettingError
        If a setting names a parameter that the scheme does not have.
    TooLarge
        If the baseline of the report has more operations than the request allows.
    """
    return _made(_from_scheme(request, warn))


def _from_scheme(request: Request, warn: Warn) -> Iterator[Result]:
    scheme: Scheme = request.change.of(parse(request.source))
    yield Level.AST, scheme
    plan, remarks = elaborate(scheme, request.settings, request.max_operations)
    _pass_on(remarks, warn)
    yield from _from_plan(plan, request, warn)


def compile_ir(request: Request, warn: Warn) -> Iterator[Result]:
    """Every level from the one that the text is at, a program's schedule included; errors as in `compile_scheme`."""
    return _made(_from_ir(request, warn))


def _from_ir(request: Request, warn: Warn) -> Iterator[Result]:
    level = ir_parser.parse(request.source)
    _limit("the text", _operations(level), request.max_operations)
    match level:
        case Plan() as plan:
            yield from _from_plan(plan, request, warn)
        case Schedule() as schedule:
            _pass_on(raise_errors(verify_schedule(schedule, None)), warn)
            yield Level.SCHEDULE, schedule
            yield from _from_program(_lowered(schedule, request), schedule, request)
        case Program() as program:
            schedule = schedule_of(program)
            _pass_on(raise_errors(verify_schedule(schedule, None)), warn)
            yield Level.SCHEDULE, schedule
            yield from _from_program(program, schedule, request)


def _operations(level: Plan | Schedule | Program) -> int:
    return len(level.operations) if isinstance(level, Plan) else sum(map(len, level.lanes))


def _from_plan(plan: Plan, request: Request, warn: Warn) -> Iterator[Result]:
    schedule = order(plan)
    _pass_on(raise_errors((*verify_plan(plan), *verify_schedule(schedule, plan))), warn)
    yield Level.PLAN, plan
    yield Level.SCHEDULE, schedule
    yield from _from_program(_lowered(schedule, request), schedule, request)


def _lowered(schedule: Schedule, request: Request) -> Program:
    _, duration = ticks(schedule.header, request.costs)
    return lower(schedule, duration=duration)


def _from_program(program: Program, schedule: Schedule, request: Request) -> Iterator[Result]:
    verified: Verified = verify_program(program, schedule)
    yield Level.PROGRAM, verified
    timeline = eventful(simulate(verified.schedule, request.costs), verified.program)
    yield Level.TIMELINE, timeline
    baseline = _baseline(verified.schedule, request)
    launched = launches(verified.program, timeline)
    yield (
        Level.REPORT,
        report(verified.schedule, request.costs, baseline, verified.weights, launched, timeline=timeline),
    )


def _baseline(schedule: Schedule, request: Request) -> Schedule:
    """The baseline scheme on as many workers, with as many micro-batches; the schedule at hand, if it is that."""
    workers, micro_batches = schedule.header.workers, schedule.header.whole_micro_batches
    what = f"the baseline of the report, on {workers:,} workers with {micro_batches:,} micro-batches,"
    _limit(what, 2 * workers * micro_batches, request.max_operations)
    source, settings = library.baseline(workers, micro_batches)
    plain = request.source.text == source.text and request.change == Change()
    if plain and dict(schedule.header.parameters) == settings:
        return schedule
    plan, _ = elaborate(parse(source), settings, request.max_operations)
    return order(plan)


def _limit(what: str, operations: int, most: int) -> None:
    if operations > most:
        raise TooLarge(
            f"{what} has {operations:,} operations, and the limit is {most:,}; --max-operations {operations} raises it"
        )


def _pass_on(warnings: tuple[Diagnostic, ...], warn: Warn) -> None:
    for warning in warnings:
        warn(warning)


def files(verified: Verified, timeline: Timeline, report_json: str) -> dict[str, str]:
    """The output directory: the scripts, the program, the report and the picture."""
    return {
        **scripts(verified),
        "schedule.sir": show(verified.program),
        "report.json": report_json,
        "timeline.svg": svg.draw(timeline),
    }
