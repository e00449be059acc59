"""The compiler: every level is made from the one before it, and verified before it is handed out.

    text -> scheme -> plan -> schedule -> program -> timeline -> report, prediction -> files
                                       -> evaluation                               -> files

Each property of a `Compilation` is one of these levels, made when it is first asked for. The code that makes a
level is also imported then: a program that looks at a schedule starts without the code generator.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from chimera_ir.diagnostics.catalogue.program import NothingTrained
from chimera_ir.diagnostics.model import Diagnostic, Rejected, raise_errors
from chimera_ir.diagnostics.render import blocks
from chimera_ir.errors import CompileError, NoSuchLevel, NotProven, TextError, WrongOption
from chimera_ir.garbage import uncollected
from chimera_ir.ir.levels import Header, Plan, Program, Quantity, Schedule
from chimera_ir.ir.ops import NOWHERE, Communicators
from chimera_ir.ir.rolled import RolledProgram
from chimera_ir.ir.streams import Level as Text
from chimera_ir.ir.streams import PlanStream, ProgramStream, ScheduleStream
from chimera_ir.ir.text.printer import kinds_line, show
from chimera_ir.request import Request, groups, parsed, with_lengths, with_shares
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme

if TYPE_CHECKING:
    from chimera_ir.cost.durations import Durations
    from chimera_ir.cost.host_plan import Moved
    from chimera_ir.cost.report import Report
    from chimera_ir.cost.simulate import Row, Timeline
    from chimera_ir.elaborate.elaborate import Outline
    from chimera_ir.flow.engine import IntGraph
    from chimera_ir.orders.ordering import OrderGraph
    from chimera_ir.orders.search import Improvement
    from chimera_ir.predict.prediction import Forecast, Prediction, Summary
    from chimera_ir.predict.replay import Replay
    from chimera_ir.repeated import Repeated
    from chimera_ir.verify.verify import Checked, ProvenScripts, Verified


T = TypeVar("T")


def _level(make: Callable[["Compilation"], T]) -> cached_property[T]:
    """Decorator: a property computed once, without the garbage collector; a `Rejected` becomes a `TextError`."""

    @wraps(make)
    def made(compilation: "Compilation") -> T:
        with uncollected():
            try:
                return make(compilation)
            except Rejected as rejected:
                codes = dict.fromkeys(diagnostic.code for diagnostic in rejected.diagnostics)
                vars(compilation)["_verdict"] = ", ".join(("refused", *codes))
                raise TextError([(compilation.request.source, rejected.diagnostics)]) from None

    return cached_property(made)


LARGE = 1 << 13
"""The fewest micro-batches times stages of a scheme that is compiled by turns."""


@dataclass(frozen=True)
class Shown:
    """Levels of a scheme that is compiled by turns, as its page shows them; ``left_out`` are the turns it does not."""

    request: Request
    verified: "Verified"
    program_text: str
    scripts: "ProvenScripts"
    report: "Report"
    summary: "Summary"
    left_out: str
    prediction: "Prediction | None" = None
    forecast: "Forecast | None" = None

    @property
    def opponent(self) -> "Shown":
        """None is compared with another schedule than the baseline."""
        raise AssertionError("only a scheme without --against is compiled by turns")


class Requesting(Protocol):
    """Options that turn a source and values of its parameters into a request, as `Options` do."""

    def request(self, source: Source, settings: Mapping[str, int]) -> Request:
        """The request to compile ``source`` with these ``settings`` of parameters."""


@dataclass(frozen=True, eq=False, repr=False)
class Compilation:
    """Levels of a text, from the scheme to the files: each a property, made when first asked for, and verified.

    A level that cannot be made raises a `CompileError`, and so does every level after it. ``warn`` gets each warning as
    soon as it is found, even if an error follows, ``tell`` a few words on each step before it begins.

    Examples
    --------
    >>> import chimera_ir
    >>> c = chimera_ir.compile("chimera", D=4, N=4)
    >>> c
    <Compilation of chimera.chim, D=4, N=4: not proven yet>
    >>> c.schedule.header.workers, c.report.makespan
    (4, Fraction(16, 1))
    >>> c
    <Compilation of chimera.chim, D=4, N=4: proven>
    """

    request: Request
    warn: Callable[[Diagnostic], None] = lambda _: None
    tell: Callable[[str], None] = lambda _: None

    left_out = ""
    """The turns that the page leaves out, in words: none."""

    _verdict = "not proven yet"

    @classmethod
    def of(cls, level: Text, options: Requesting | None = None) -> "Compilation":
        """The compilation of a level that a program has made, such as by `Schedule.from_lanes`.

        The level is printed, and that text is compiled: it is proven like any other, and diagnostics quote it.

        Examples
        --------
        >>> from chimera_ir import Schedule
        >>> c = Compilation.of(Schedule.from_lanes([["F m0 s0", "B m0 s0"], ["F m0 s1", "B m0 s1"]]))
        >>> c.timeline.makespan, c
        (Fraction(6, 1), <Compilation of by_hand.sir: proven>)
        """

        source = Source(f"{level.header.scheme}.sir", show(level))
        return cls(options.request(source, {}) if options else Request(source))

    @property
    def scheme(self) -> Scheme:
        """The parsed scheme with the changes of the request; raises `NoSuchLevel` for an IR text."""
        if not isinstance(self._entry, Scheme):
            raise NoSuchLevel(self.request.source.name, "ast")
        return self._entry

    @property
    def plan(self) -> Plan:
        """Every operation with its place and clock; raises `NoSuchLevel` for the text of a schedule or a program."""
        if not isinstance(self._entry, Scheme | Plan):
            raise NoSuchLevel(self.request.source.name, "plan")
        _ = self._checked
        level = self._top
        assert isinstance(level, Plan | PlanStream)
        return level if isinstance(level, Plan) else level.shown

    @property
    def header(self) -> Header:
        """The header of what is compiled: of a stream that of the updates shown, or of one turn for its IR text."""
        return self._outlined.header if isinstance(self._entry, Scheme) else self._entry.header

    @property
    def schedule(self) -> Schedule | ScheduleStream:
        """The compute operations of each worker, in the order in which it runs them; of a stream, those of one turn."""
        return self._checked.level

    @property
    def program(self) -> Program | ProgramStream:
        """Everything that each worker does: compute, messages, gradient sums, updates; `verified` has the proofs."""
        level = self.verified.level
        assert not isinstance(level, RolledProgram), "all of it is proven"
        return level

    @property
    def verified(self) -> "Verified":
        """The program with the proof of every rule; one that must fit is refused if a worker lacks the memory."""
        if self.request.require_fit and self.prediction:
            self.prediction.require_fit(self.request.source.name)
        return self._proven

    @_level
    def _proven(self) -> "Verified":
        from chimera_ir.cost.simulate import ticks
        from chimera_ir.lower.lower import lower
        from chimera_ir.verify.verify import verify_lowered, verify_program

        # The text of a program is proven as it is; any other text is lowered, and the result proven.
        checked = self._checked
        self.tell("adding messages and gradient sums, verifying the program")
        communicators = self.request.communicators
        if isinstance(self._entry, Program | ProgramStream):
            verified = verify_program(self._entry, checked)
            if communicators is not Communicators.DIRECTED and (blocked := verified.blocked(communicators)):
                remedy = "receives are posted as the text of a program says: compile its scheme instead"
                raise NotProven("communicators", f" {communicators.value}: {blocked}; {remedy}")
            return verified
        _, duration = ticks(checked.schedule.header, self._durations)
        program = lower(checked.level, duration=duration, net=checked.net, communicators=communicators)
        return verify_lowered(program, checked)

    @property
    def evaluation(self) -> Program:
        """The program of the forwards alone, on the same workers; `verified_evaluation` has the proofs."""
        return self.verified_evaluation.program

    @_level
    def verified_evaluation(self) -> "Verified":
        """The program of the forwards alone, with the proof of every rule."""
        from chimera_ir.lower.lower import forwards, lower
        from chimera_ir.verify.verify import verify_lowered, verify_schedule

        schedule = self._checked.level
        self.tell("ordering the forwards alone, verifying their program")
        checked = verify_schedule(forwards(schedule), None)
        raise_errors(checked.findings.diagnostics)
        return verify_lowered(lower(checked.level, net=checked.net, communicators=self._communicators), checked)

    @_level
    def torch_csv(self) -> str:
        """The schedule as torch.distributed.pipelining loads it; the program that torch makes of it is proven."""
        from chimera_ir.torch_text.csv_writer import compute_order

        return compute_order(self._checked)

    @_level
    def torch_csv_comms(self) -> str:
        """The program as torch.distributed.pipelining loads it, with its own order of messages."""
        from chimera_ir.torch_text.csv_writer import with_messages

        return with_messages(self.verified)

    @_level
    def dag(self) -> "IntGraph":
        """The operations and what each waits for, a `networkx.DiGraph`; of a stream, those of its view.

        A node is the number of an operation, with its ``operation`` as the text has it (``F m3 s1``), ``kind``,
        ``micro_batches``, ``stage``, ``worker`` and ``cost``; an edge says ``why`` its end waits: for ``data``, by the
        ``order`` of the worker, or for a ``sum`` of gradients.

        Examples
        --------
        >>> from chimera_ir import Schedule
        >>> dag = Compilation.of(Schedule.from_lanes([["F m0 s0", "B m0 s0"], ["F m0 s1", "B m0 s1"]])).dag
        >>> print(*dag.nodes(data="operation"))
        (0, 'F m0 s0') (1, 'B m0 s0') (2, 'F m0 s1') (3, 'B m0 s1')
        >>> print(*dag.edges(data="why"))
        (0, 1, 'data') (0, 2, 'data') (2, 3, 'data') (3, 1, 'data')
        """
        from chimera_ir.cost.simulate import dag

        net = self._checked.net
        assert net is not None, "a schedule without errors has a net"
        return dag(net, self._durations)

    @_level
    def dag_json(self) -> str:
        """The text of `dag` that `networkx.node_link_graph` reads."""
        from chimera_ir.flow.engine import node_link_text

        return node_link_text(self.dag)

    @_level
    def graph(self) -> "OrderGraph":
        """The problem of ordering the operations, for other programs to solve; of a stream, the problem of its view."""
        from chimera_ir.orders.ordering import graph_of

        return graph_of(self.schedule, self._durations)

    @_level
    def timeline(self) -> "Timeline":
        """Start and end of each operation with free communication, and the events between them (sums, steps)."""
        from chimera_ir.cost.host_plan import with_events
        from chimera_ir.cost.simulate import simulate

        verified = self.verified
        self.tell("simulating")
        return with_events(simulate(verified.schedule, self._durations, verified.checked.net), verified.program)

    def memory(self, worker: int) -> "list[Row]":
        """Memory of a worker over time: a row for each change, in M_a and, with a profile, in bytes."""
        from chimera_ir.cost.simulate import kept

        return kept(self.timeline, worker, self.prediction.bytes_of if self.prediction else None)

    @_level
    def report(self) -> "Report":
        """Costs of the schedule and of the baseline at the same size; a text with nothing but forwards is rejected."""
        from chimera_ir.cost.host_plan import launches
        from chimera_ir.cost.report import CommunicatorChoice, report
        from chimera_ir.verify.findings import names

        if self._repeated:
            return self._repeated.report
        header = self.schedule.header
        if not header.trains:
            raise Rejected([NothingTrained(NOWHERE, kinds_line(header))])
        # The baseline first: if there is none of this size, nothing has been made in vain.
        baseline, copies = self._baseline()
        verified, timeline = self.verified, self.timeline
        self.tell("comparing with the baseline")
        sums = verified.weights, launches(verified.program, timeline), names(verified.rules)
        unmoved = self._moved.before if self.request.offload else None
        made = report(verified.schedule, self._durations, baseline, *sums, timeline, copies, unmoved, verified.program)
        results = verified.with_evaluation(lambda: self.verified_evaluation)
        choices = (CommunicatorChoice(result.communicators.value, result.count, result.blocked) for result in results)
        return replace(made, communicators=tuple(choices))

    @_level
    def forecast(self) -> "Forecast | None":
        """Costs, cluster and split for a prediction, split so that bounds in bytes hold; None without a profile."""
        entry, forecast = self._entry, self.request.forecast
        if forecast is None:
            return None
        return forecast.within_bounds(entry if isinstance(entry, Program | ProgramStream) else self.schedule)

    @_level
    def prediction(self) -> "Prediction | None":
        """The time and the memory that the program takes on the cluster; None where no profile is given."""
        if (forecast := self.forecast) is None:
            return None
        program = self._proven.program
        self.tell("predicting time and memory")
        return forecast.of(program)

    @_level
    def summary(self) -> "Summary":
        """The answers to three questions: is it faster than the baseline, does it fit, what limits it."""
        from chimera_ir.predict.prediction import summary

        report, forecast = self.report, self.forecast
        rival = forecast.baseline(self.opponent.verified.program, self.schedule.header) if forecast else None
        return summary(report, self.prediction, rival)

    @_level
    def replay(self) -> "Replay":
        """The replay of the program, event by event: on the cluster or, if no profile is given, with free messages."""
        from chimera_ir.predict.replay import free_replay

        return self.prediction.replay if self.prediction else free_replay(self.verified.program, self._durations)

    @_level
    def trace(self) -> str:
        """The replay in the Trace Event Format, which Perfetto and chrome://tracing show."""
        from chimera_ir.trace.event_files import predicted_trace

        return predicted_trace(self.replay)

    @_level
    def scripts(self) -> "ProvenScripts":
        """Scripts that run the program, with the proof that every rank's script does what the program says."""
        return self._scripts_of(self._repeated or self)

    def _scripts_of(self, made: "Compilation | Repeated") -> "ProvenScripts":
        from chimera_ir.codegen.facts import scripts
        from chimera_ir.verify.verify import verify_scripts

        verified, evaluation = made.verified, made.verified_evaluation
        self.tell("writing the scripts, comparing them with the program")
        return verify_scripts(verified, evaluation, scripts(verified, evaluation))

    @_level
    def whole_report(self) -> "Report":
        """The report with all proven rules, those for the scripts included; makes the scripts."""
        from chimera_ir.verify.findings import names

        report = self.report  # before the scripts, for what a report is refused for
        return replace(report, verified=names(self.scripts.rules))

    @_level
    def report_json(self) -> str:
        """The text of report.json: the whole report, the prediction where there is one, and the summary."""
        prediction = {"prediction": self.prediction.as_json()} if self.prediction else {}
        content = {**self.whole_report.as_json(), **prediction, "summary": self.summary.as_json()}
        if self.improvement:
            content["search"] = self.improvement.as_json()
        return json.dumps(content, indent=2) + "\n"

    @_level
    def program_text(self) -> str:
        """The text of the program, which compiles to the program again, below the comments."""
        return f"{self.comments}{show(self._repeated.verified.level if self._repeated else self.program)}"

    @_level
    def evaluation_text(self) -> str:
        """The text of the program of the forwards alone."""
        return show(self._repeated.verified_evaluation.level if self._repeated else self.evaluation)

    @property
    def comments(self) -> str:
        """The comments above a text, which say how a search found its order; empty if none was searched."""
        return self.improvement.comments if self.improvement else ""

    @_level
    def page(self) -> str:
        """The page in which the schedule can be looked at and played with, an HTML file that needs no other."""
        from chimera_ir.page import contents

        return contents.page(contents.document(self._shown_of(self) if self._repeated else self))

    @_level
    def files(self) -> Mapping[str, str]:
        """The contents of the output files by relative path; each file relies only on files before it.

        Of a large schedule that repeats, the picture and the page show a window of its turns; `page` shows all of it.
        """
        from chimera_ir.picture import sheet

        before = self.opponent.timeline if self.improvement else None
        return {
            "report.json": self.report_json,
            "schedule.sir": self.program_text,
            "evaluate.sir": self.evaluation_text,
            "timeline.svg": sheet.of_order(self.drawn, before),
            "schedule.html": self._page_of_window or self.page,
            **self.scripts.files,
        }

    @property
    def drawn(self) -> "Timeline":
        """The timeline as pictures show it: of a large schedule that repeats, a window of its turns."""
        return self._repeated.timeline if self._repeated else self.timeline

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings about the text, each as chimera compile prints it."""
        outlined = self._outlined.warnings if self._is_scheme else ()
        checked = () if self._repeated else self._checked.findings.diagnostics
        return tuple(blocks((*outlined, *checked), self.request.source))

    def write(self, directory: str | PathLike[str], others: "Iterable[Compilation]" = ()) -> None:
        """Writes the files into a directory that is new or was written so; raises `OutputRefused` for any other.

        With ``others``, which are for fewer micro-batches, every update may have the number of any of the programs.
        Raises `ProgramsDiffer` if they differ in anything else.

        Examples
        --------
        >>> import chimera_ir, tempfile
        >>> *fewer, most = (chimera_ir.compile("chimera", D=2, N=n) for n in (2, 3, 4))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     most.write(directory, fewer)
        ...     print(*sorted(path.name for path in Path(directory).glob("n*")))
        n2 n3
        """
        from chimera_ir import output

        output.write(Path(directory), self.files_with(others), option="")

    def files_with(self, others: "Iterable[Compilation]") -> Mapping[str, str]:
        """The files of a directory with the program and ``others``; see `write`."""
        from chimera_ir.several import joined

        return joined(self, others)

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value}" for name, value in self.request.settings.items())
        verdict = "proven" if "_proven" in vars(self) or vars(self).get("_repeated") else self._verdict
        return f"<Compilation of {self.request.source.name}{settings}: {verdict}>"

    def _repr_html_(self) -> str:
        """HTML for a notebook: the page in a frame, also for a mistake in the text; of other errors the message."""
        from chimera_ir import notebook

        try:
            return notebook.frame(self.page, repr(self))
        except TextError as error:
            return notebook.frame(self.page_of_mistake(error), repr(self))
        except CompileError as error:
            return notebook.message(str(error))

    @_level
    def _entry(self) -> Scheme | Text:
        from chimera_ir.comparison import weighed

        text = parsed(self.request)
        if isinstance(text, Scheme):
            return text
        return replace(text, header=with_shares(self.request, weighed(text.header, self.request.like)))

    @_level
    def _outlined(self) -> "Outline":
        from chimera_ir.comparison import frozen_as, weighed
        from chimera_ir.elaborate.elaborate import outline

        scheme, settings = self.scheme, self.request.settings
        self.tell("placing and ordering the operations, verifying the schedule")
        outlined = outline(scheme, settings, self.request.max_operations)
        for warning in outlined.warnings:
            self.warn(warning)
        header = replace(outlined.header, ties=groups(self.request.ties, outlined.header.stages, outlined.header.named))
        header, like = with_lengths(self.request, header), self.request.like
        return replace(outlined, header=with_shares(self.request, frozen_as(weighed(header, like), like)))

    @_level
    def _repeated(self) -> "Repeated | None":
        """The scheme compiled by turns; None if it is small, does not repeat, or what is asked for needs all of it."""
        from chimera_ir import comparison

        request = self.request
        if request.forecast or request.search or request.offload or request.opposes or not self._is_scheme:
            return None
        header = self._outlined.header
        if header.micro_batches * header.stages < LARGE or header.frozen:
            return None
        from chimera_ir.repeated import repeated

        self.tell("compiling a window of the turns, verifying that all turns are like it")
        opponent = Compilation(comparison.opposing(request, header))
        baseline = None if self._is_baseline(opponent.request) else opponent._outlined
        return repeated(self._outlined, baseline, self._durations, request.communicators)

    @property
    def _page_of_window(self) -> str:
        """The page of a scheme that is compiled by turns; empty for any other."""
        from chimera_ir.page import contents

        return contents.page(contents.document(self._shown_of(self._repeated))) if self._repeated else ""

    def _shown_of(self, made: "Compilation | Repeated") -> "Shown":
        """The levels that the page shows of a scheme that is compiled by turns: of all of it, or of its window."""
        verified, is_whole = made.verified, made is self
        text, scripts = show(verified.program), self._scripts_of(made) if is_whole else self.scripts
        left_out = "" if is_whole else self.drawn.left_out
        return Shown(self.request, verified, text, scripts, self.report, self.summary, left_out)

    def _is_baseline(self, opponent: Request) -> bool:
        """Whether the request is that for the library's baseline, ``opponent``."""
        request = self.request
        unchanged = request.source.text == opponent.source.text and request.change == opponent.change
        return unchanged and not request.offload and dict(self.header.parameters) == opponent.settings

    @_level
    def _durations(self) -> "Durations":
        return (self.forecast or self.request.costs).durations(self.header)

    @property
    def _is_scheme(self) -> bool:
        return isinstance(self._entry, Scheme)

    @property
    def _is_program(self) -> bool:
        return isinstance(self._entry, Program | ProgramStream)

    @property
    def _communicators(self) -> Communicators:
        """How the evaluation shares communicators: for the text of a program, as few as let it end."""
        if self._is_program:
            blocked = self.verified.blocked(Communicators.PAIR)
            return Communicators.DIRECTED if blocked else Communicators.PAIR
        return self.request.communicators

    @_level
    def _top(self) -> Text | PlanStream:
        if not isinstance(self._entry, Scheme):
            return self._entry
        outlined = self._outlined
        level = outlined.level()
        if outlined.header.frozen and outlined.values.frozen is None and isinstance(level, Plan):
            from chimera_ir.comparison import of_frozen

            return of_frozen(level)
        return level

    @_level
    def improvement(self) -> "Improvement | None":
        """The order that a search found, if the request asks for one; the schedule is that order."""
        if (request := self.request).search is None:
            return None
        from chimera_ir import comparison
        from chimera_ir.orders.cp_sat import require_solver
        from chimera_ir.orders.search import improvement

        require_solver("a search")
        if self._is_program:
            raise WrongOption("search", ": the text of a program has its messages in place; search with its schedule")
        written = self._written.level
        if isinstance(written, ScheduleStream):
            raise WrongOption("search", ": it searches among the orders of one update, and the scheme has no flush")
        further = dict(comparison.same_placement(request, written))
        forecast, limits = request.forecast and request.forecast.within_bounds(written), dict(request.limits)
        durations = (forecast or request.costs).durations(self.header)
        if forecast and not limits:
            written = forecast.with_room(written)
        return improvement(written, durations, limits, further, request.search, self.tell)

    @_level
    def _checked(self) -> "Checked":
        from chimera_ir.verify.verify import verify_schedule

        if self.request.search is None or (improvement := self.improvement) is None:
            return self._written
        checked = verify_schedule(improvement.schedule, None, self._needs if self.request.forecast else None)
        raise_errors(checked.findings.diagnostics)
        return checked

    @_level
    def _written(self) -> "Checked":
        """The schedule in the text's own order, with the findings of its rules."""
        from chimera_ir.verify.verify import verify_schedule

        needs = self._needs if self.request.forecast else None
        if self.request.offload:
            checked = verify_schedule(self._moved.schedule, None, needs)
        else:
            checked = verify_schedule(self._ordered, self._checked_plan, needs, of_program=self._is_program)
        for warning in raise_errors(checked.findings.diagnostics):
            self.warn(warning)
        return checked

    @_level
    def _ordered(self) -> Schedule | ScheduleStream:
        from chimera_ir.lower.lower import order
        from chimera_ir.verify.verify import schedule_in

        # Costs are checked before operations are made of the text, which may take long.
        durations = self.request.cost_model.durations(self.header)
        level = self._top
        if not isinstance(level, Plan | PlanStream):
            return schedule_in(level)
        if level.is_clocked:
            return order(level)
        from chimera_ir.orders.ordering import scheduled

        return scheduled(level, durations)

    @property
    def _checked_plan(self) -> Plan | None:
        """The plan with which the schedule is checked; of a stream, as many updates of it as the schedule shows."""
        level, schedule = self._top, self._ordered
        if isinstance(level, PlanStream) and isinstance(schedule, ScheduleStream) and not level.is_clocked:
            level = replace(level, turns=schedule.updates_shown // level.header.per_turn)
        if isinstance(level, PlanStream):
            return level.shown
        return level if isinstance(level, Plan) else None

    @_level
    def _moved(self) -> "Moved":
        from chimera_ir.cost.host_plan import Moved, offload, require_movable
        from chimera_ir.cost.simulate import simulate
        from chimera_ir.verify.verify import verify_schedule

        schedule = self._ordered
        require_movable(schedule, is_program=self._is_program)
        # Declared bounds hold for the schedule with its moves.
        free = replace(schedule, header=replace(schedule.header, bounds=()))
        checked = verify_schedule(free, self._checked_plan)
        for warning in raise_errors(checked.findings.diagnostics):
            self.warn(warning)
        costs = self.request.cost_model.durations(replace(schedule.header, moves=True))
        return Moved(offload(schedule, costs, checked.net), simulate(checked.schedule, costs, checked.net))

    def _needs(self, program: Program) -> Mapping[Quantity, Sequence[int]]:
        assert self.forecast is not None
        return self.forecast.needs(program)

    def page_of_mistake(self, error: TextError) -> str:
        """The page of an ``error`` in the text, drawn on the lanes as far as the text has any."""
        from chimera_ir.page import contents, unproven

        try:
            level = self._top
        except TextError:
            level = None
        return contents.page(unproven.document(error, self.request.source, level))

    def _baseline(self) -> tuple[Schedule, tuple[int, ...] | None]:
        """The schedule that the report compares with, and its weights by worker unless they are each stage's once."""
        from chimera_ir import comparison

        request, header = self.request, self.schedule.header
        if not request.opposes:
            # The baseline's text needs no proof.
            plain = self._is_baseline(self.opponent.request)
            schedule = self._checked.schedule if plain else self.opponent._ordered
            assert isinstance(schedule, Schedule), "the baseline has a flush"
            return schedule, None
        name = (request.against or request.source).name
        with comparison.refusing(name, header):
            verified = self.opponent.verified
            comparison.require_same_size(verified.schedule.header, header, name)
        return verified.schedule, verified.weights

    @_level
    def opponent(self) -> "Compilation":
        """The compilation of the schedule that the report compares with."""
        from chimera_ir import comparison

        tell = self.tell if self.request.opposes else type(self).tell  # a plain baseline needs no words
        return Compilation(comparison.opposing(self.request, self.schedule.header), tell=tell)
