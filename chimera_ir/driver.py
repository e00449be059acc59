"""The compiler: one pass after another, each level verified before the next pass sees it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from chimera_ir import library
from chimera_ir.codegen.render import scripts
from chimera_ir.cost.launches import eventful, launches
from chimera_ir.cost.model import CostModel, Costs, Durations
from chimera_ir.cost.report import report
from chimera_ir.cost.simulate import Timeline, simulate, ticks
from chimera_ir.diagnostics.model import Diagnostic, raise_errors
from chimera_ir.elaborate.elaborate import elaborate, outline
from chimera_ir.ir.levels import MAX_PIPES, MAX_WORKERS, Header, Plan, Program, Schedule
from chimera_ir.ir.text import parser as ir_parser
from chimera_ir.ir.text.printer import show
from chimera_ir.lower.lower import lower
from chimera_ir.lower.order import order
from chimera_ir.picture import svg
from chimera_ir.plural import counted
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme
from chimera_ir.syntax.change import Change
from chimera_ir.syntax.parser import parse
from chimera_ir.undisturbed import undisturbed
from chimera_ir.verify.erase import schedule_of
from chimera_ir.verify.findings import Rule
from chimera_ir.verify.verify import Checked, Verified, verify_lowered, verify_program, verify_schedule

MAX_OPERATIONS = 1_000_000
"""How many compute operations a scheme may ask for, unless the user raises it."""


MAX_HEADERS = MAX_WORKERS + MAX_PIPES + 1_000
"""Headings and lines of a header that an IR text may have."""


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
    """What to compile: a text, the parameters and clauses that the user set, durations, and a limit on its size.

    Levels beyond ``until`` may be had, though what they lack is told only when they are asked for.
    """

    source: Source
    settings: Mapping[str, int] = field(default_factory=dict)
    costs: CostModel = field(default_factory=Costs)
    max_operations: int = MAX_OPERATIONS
    change: Change = field(default_factory=Change)
    until: Level = Level.REPORT


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

    And what the request's costs raise if they are of other stages than the scheme's: before operations are made.
    """
    return _made(_from_scheme(request, warn))


def _from_scheme(request: Request, warn: Warn) -> Iterator[Result]:
    scheme: Scheme = request.change.of(parse(request.source))
    yield Level.AST, scheme
    outlined = outline(scheme, request.settings, request.max_operations)
    _pass_on(outlined.warnings, warn)
    costs = request.costs.durations(outlined.header)
    yield from _from_plan(outlined.plan(), costs, request, warn)


def compile_ir(request: Request, warn: Warn) -> Iterator[Result]:
    """Every level from the one that the text is at, a program's schedule included; errors as in `compile_scheme`."""
    return _made(_from_ir(request, warn))


def _from_ir(request: Request, warn: Warn) -> Iterator[Result]:
    operations, headers = ir_parser.count_lines(request.source.text)
    _limit("the text", operations, request.max_operations)
    if headers > MAX_HEADERS:
        raise TooLarge(f"the text has {headers:,} headings and lines of a header, and the limit is {MAX_HEADERS:,}")
    level = ir_parser.parse(request.source)
    costs = request.costs.durations(level.header)
    match level:
        case Plan() as plan:
            yield from _from_plan(plan, costs, request, warn)
        case Schedule() as schedule:
            checked = _checked(schedule, None, warn)
            yield Level.SCHEDULE, schedule
            yield from _from_schedule(checked, costs, request)
        case Program() as program:
            checked = _checked(schedule_of(program), None, warn)
            yield Level.SCHEDULE, checked.schedule
            if request.until is Level.REPORT:
                _limit_baseline(checked.schedule.header, request)
            yield from _from_program(verify_program(program, checked), costs, request)


def _from_plan(plan: Plan, costs: Durations, request: Request, warn: Warn) -> Iterator[Result]:
    schedule = order(plan)
    checked = _checked(schedule, plan, warn)
    yield Level.PLAN, plan
    yield Level.SCHEDULE, schedule
    yield from _from_schedule(checked, costs, request)


def _checked(schedule: Schedule, plan: Plan | None, warn: Warn) -> Checked:
    checked = verify_schedule(schedule, plan)
    _pass_on(raise_errors(checked.findings.diagnostics), warn)
    return checked


def _from_schedule(checked: Checked, costs: Durations, request: Request) -> Iterator[Result]:
    if request.until is Level.REPORT:
        _limit_baseline(checked.schedule.header, request)
    _, duration = ticks(checked.schedule.header, costs)
    yield from _from_program(
        verify_lowered(lower(checked.schedule, duration=duration, net=checked.net), checked), costs, request
    )


def _from_program(verified: Verified, costs: Durations, request: Request) -> Iterator[Result]:
    yield Level.PROGRAM, verified
    timeline = eventful(simulate(verified.schedule, costs, verified.checked.net), verified.program)
    yield Level.TIMELINE, timeline
    baseline = _baseline(verified.schedule, request)
    launched = launches(verified.program, timeline)
    rules = tuple(rule.value for rule in Rule if rule in verified.rules)
    yield (
        Level.REPORT,
        report(verified.schedule, costs, baseline, verified.weights, launched, rules, timeline),
    )


def _baseline(schedule: Schedule, request: Request) -> Schedule:
    """The baseline scheme on as many workers, with as many micro-batches; the schedule at hand, if it is that."""
    _limit_baseline(schedule.header, request)
    source, settings = library.baseline(schedule.header.workers, schedule.header.whole_micro_batches)
    plain = request.source.text == source.text and request.change == Change()
    if plain and dict(schedule.header.parameters) == settings:
        return schedule
    plan, _ = elaborate(parse(source), settings, request.max_operations)
    return order(plan)


def _limit_baseline(header: Header, request: Request) -> None:
    workers, micro_batches = header.workers, header.whole_micro_batches
    what = f"the baseline of the report, on {counted(workers, 'worker')} with {counted(micro_batches, 'micro-batch')},"
    _limit(what, 2 * workers * micro_batches, request.max_operations)


def _limit(what: str, operations: int, most: int) -> None:
    if operations > most:
        has = f"{what} has {counted(operations, 'operation')}"
        raise TooLarge(f"{has}, and the limit is {most:,}; --max-operations {operations} raises it")


def _pass_on(warnings: tuple[Diagnostic, ...], warn: Warn) -> None:
    for warning in warnings:
        warn(warning)


def files(verified: Verified, timeline: Timeline, report_json: str) -> dict[str, str]:
    """The output directory: the program, the report, the picture and the scripts, each after those it relies on."""
    return {
        "schedule.sir": show(verified.program),
        "report.json": report_json,
        "timeline.svg": svg.draw(timeline),
        **scripts(verified),
    }
