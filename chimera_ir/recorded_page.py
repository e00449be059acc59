"""Makes the page of a recorded run: its program with measured lanes and, if it ended early, where ranks stopped.

A run that ended early without a trace has a page without measured lanes.
"""

import sys
from collections.abc import Sequence

from chimera_ir.compilation import Compilation
from chimera_ir.cost.report import report
from chimera_ir.diagnostics.model import titles
from chimera_ir.errors import CompileError, TextError
from chimera_ir.page import contents
from chimera_ir.page.contents import ShownSchedule
from chimera_ir.page.tables import MemoryInBytes, PageDocument, name_of, program_text, script_texts
from chimera_ir.predict.events import events_of
from chimera_ir.predict.memory_need import memory
from chimera_ir.predict.setting import Charges, Measured, Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.trace.bundles import Bundle, StoppedRank, stopped, stopped_ranks
from chimera_ir.trace.compare import TraceComparison, is_barriered
from chimera_ir.trace.presentation import RunTables, TraceTable, run_stages
from chimera_ir.trace.trace_files import PROGRAM, BadTrace, Lane, Trace, UpdateWindow


def recorded_page(trace: Trace, lanes: Sequence[Lane], comparison: TraceComparison | None) -> str:
    """The page of a run; ``lanes`` are those of all ranks.

    Operations take the times of the prediction in ``comparison`` or those measured. Without a comparison the run ended
    before any update was complete.
    """
    compilation = Compilation(Request(Source(PROGRAM, trace.text), max_operations=sys.maxsize))
    schedule = _schedule(compilation, trace, lanes, comparison)
    operations = ((row.worker, row.operation) for row in schedule.rows)
    tables = RunTables(schedule.header, operations, is_barriered(trace.about, trace.header))
    recorded = tables.table(comparison, stopped(trace, lanes, schedule.events) if trace.ended_early else None)
    return _page("a recorded run", trace.text, compilation, schedule, recorded)


def stopped_page(bundle: Bundle) -> tuple[str, Sequence[StoppedRank]]:
    """The page of a run that ended early, from what ranks recorded then, and the places at which they stopped.

    Raises `BadTrace` if what they recorded is damaged.
    """
    compilation = Compilation(Request(Source(PROGRAM, bundle.text), max_operations=sys.maxsize))
    try:
        verified, scripts = compilation.verified, compilation.scripts
        schedule = ShownSchedule.of(compilation)
    except CompileError as error:
        reason = titles(error.diagnostics) if isinstance(error, TextError) else error
        raise BadTrace(f"{bundle.path}: {PROGRAM} is not a program that chimera compile wrote ({reason})") from error
    stops = stopped_ranks(bundle, verified, scripts, schedule.events)
    notes = [_NOT_MEASURED, *([_OTHER_TURNS] if schedule.header.asynchronous else [])]
    recorded = TraceTable([], 0, 0.0, [], [], notes, [], None, stops)
    return _page("where its ranks stopped", bundle.text, compilation, schedule, recorded), stops


_NOT_MEASURED = "times are those of the schedule: the run recorded only where it ended"
_OTHER_TURNS = "marks on the lanes are in turns of the steady state, which stand for those in which the ranks stopped"


def _page(what: str, text: str, compilation: Compilation, schedule: ShownSchedule, recorded: TraceTable) -> str:
    document = PageDocument(
        title=f"{name_of(schedule.header)}: {what}",
        notes=recorded.notes,
        schedules=[schedule.tables()],
        texts=[
            program_text(text, compilation.verified, schedule.rows),
            *script_texts(compilation.scripts, schedule.program, schedule.rows),
        ],
        trace=recorded,
    )
    return contents.page(document)


def _schedule(
    compilation: Compilation, trace: Trace, lanes: Sequence[Lane], comparison: TraceComparison | None
) -> ShownSchedule:
    """The schedule that the page shows, with durations of the prediction or, without it, as measured."""
    verified, source = compilation.verified, comparison.source if comparison else None
    setting = source.setting if source else _measured_setting(trace, lanes, comparison)
    events = events_of(verified.program, Charges(verified.program.header, setting))
    figures = report(verified.schedule, Measured.of(setting), verified.schedule, verified.weights)
    if source is None:
        return ShownSchedule(verified, events, figures, setting, None)
    available = setting.cluster.memory - setting.cluster.reserved
    needs = memory(verified.program, setting)
    return ShownSchedule(verified, events, figures, setting, MemoryInBytes(setting, needs, available))


def _measured_setting(trace: Trace, lanes: Sequence[Lane], comparison: TraceComparison | None) -> Setting:
    about, ranks = trace.about, trace.about.copies * trace.header.workers
    if comparison is not None:
        windows = [comparison.windows[update] for update in comparison.chosen]
    else:
        windows = [[UpdateWindow(lane[0].start, lane[-1].end) if lane else UpdateWindow(0, 0) for lane in lanes]]
    cluster = Cluster("the run itself, with free messages", ranks, ranks, 0, 0, FREE, FREE, FREE)
    stages = run_stages(trace, lanes, windows)
    return Setting(stages, cluster, about.copies, about.micro_batch_size, about.layout == "replica")
