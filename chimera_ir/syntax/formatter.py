"""The canonical text of a scheme: it parses to the same tree, and formatting it again changes nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple, assert_never

from chimera_ir.ir.levels import Strategy
from chimera_ir.syntax import ast
from chimera_ir.syntax.ast import Clause, Operation, PipeBlock, Recompute, Scheme, Sync


class Change(NamedTuple):
    """Clauses for every pipe: all stages recompute, or all use one strategy of sums; by default nothing changes.

    A pipe that has lines for recomputations, or for moves of memory, recomputes only as its lines say.
    """

    recompute: bool = False
    sync: Strategy | None = None

    def of(self, scheme: Scheme) -> Scheme:
        """Returns a scheme with the clauses in every pipe; the span of a new clause is the pipe's name."""
        if self == Change():
            return scheme
        items = (
            replace(item, clauses=tuple(self._clauses(item))) if isinstance(item, PipeBlock) else item
            for item in scheme.items
        )
        return replace(scheme, items=tuple(items))

    def unmet_by(self, scheme: Scheme) -> bool:
        """Whether a pipe cannot recompute as asked, because it moves memory and has no lines for recomputations."""
        pipes = ([line.subjects[0].kind for line in pipe.lines(Operation)] for pipe in scheme.pipes)
        return self.recompute and any(
            any(kind.moves for kind in kinds) and not any(kind.recomputes for kind in kinds) for kinds in pipes
        )

    def _clauses(self, pipe: PipeBlock) -> Iterator[Clause]:
        kinds = [line.subjects[0].kind for line in pipe.lines(Operation)]
        clocked = any(kind.recomputes or kind.moves for kind in kinds)
        for clause in pipe.clauses:
            replaced = (self.recompute and isinstance(clause, Recompute)) or (self.sync and isinstance(clause, Sync))
            if not replaced:
                yield clause
        if self.recompute and not clocked:
            yield Recompute(None, span=pipe.name.span)
        if self.sync:
            yield Sync(self.sync, None, span=pipe.name.span)


# Tightness: how strongly an expression binds, the loosest first. An operand that is looser than its place needs
# brackets.
_CHOICE, _OR, _AND, _NOT, _COMPARISON, _SUM, _PRODUCT, _MINUS, _ATOM = range(9)

_LEVELS = {
    ast.Arithmetic.ADD: _SUM,
    ast.Arithmetic.SUBTRACT: _SUM,
    ast.Arithmetic.MULTIPLY: _PRODUCT,
    ast.Arithmetic.DIVIDE: _PRODUCT,
    ast.Arithmetic.REMAINDER: _PRODUCT,
    ast.Logic.OR: _OR,
    ast.Logic.AND: _AND,
}
_TIGHT = (ast.Arithmetic.MULTIPLY, ast.Arithmetic.DIVIDE)


def show(scheme: ast.Scheme) -> str:
    """The text of a scheme, with one line for each item and clause.

    Examples
    --------
    >>> from chimera_ir.source import Source
    >>> from chimera_ir.syntax.parser import parse
    >>> print(show(parse(Source("", "scheme a(D=4) let u=(D-1)*2 pipe p{stages s in 0..D on s%u}"))), end="")
    scheme a(D = 4)
    <BLANKLINE>
    let u = (D - 1)*2
    <BLANKLINE>
    pipe p {
      stages s in 0..D on s % u
    }
    """
    parameters = ", ".join(f"{p.name.text} = {show_expression(p.default)}" for p in scheme.parameters)
    blocks = [f"scheme {scheme.name.text}" + (f"({parameters})" if parameters else "")]
    for are_pipes, items in groupby(scheme.items, lambda item: isinstance(item, ast.PipeBlock)):
        texts = map(_item, items)
        blocks += texts if are_pipes else ["\n".join(texts)]
    return "\n\n".join(blocks) + "\n"


def _item(item: ast.Item) -> str:
    match item:
        case ast.Workers(count, left_out):
            return f"workers {show_expression(count)}" + (f" except {_numbers(left_out)}" if left_out else "")
        case ast.Frozen(stages):
            return f"frozen {_numbers(stages)}"
        case ast.Feeds(source, target, keyword):
            return f"feeds {_numbers([source])} -> {_numbers([target])}" + (f" as {keyword.text}" if keyword else "")
        case ast.Let():
            return _let(item)
        case ast.Function(name, parameters, body):
            return f"fn {name.text}({', '.join(word.text for word in parameters)}) = {show_expression(body)}"
        case ast.Require(condition, message):
            return f'require {show_expression(condition)}, "{message}"'
        case ast.Update(count):
            return f"update every {show_expression(count)}"
        case ast.Memory(quantity, worker, limit):
            named = f" on {worker.text}" if worker else ""
            return f"memory {quantity.value}{named} <= {show_expression(limit)}"
        case ast.PipeBlock(name, index, clauses):
            indexed = "" if index is None else _index(index)
            lines = "".join(f"  {_clause(clause)}\n" for clause in clauses)
            return f"pipe {name.text}{indexed} {{\n{lines}}}"
        case _:
            assert_never(item)


def _numbers(parts: Iterable[ast.Expression | ast.Range | ast.Several]) -> str:
    return ", ".join(map(_stages, parts))


def _stages(part: ast.Expression | ast.Range | ast.Several) -> str:
    match part:
        case ast.Range():
            return _range(part)
        case ast.Several(group, index):
            return f"{group.text}{_index(index)}"
        case _:
            return show_expression(part)


def _index(index: ast.Index) -> str:
    variable = f"{index.variable.text} in " if index.variable.text else ""
    return f"[{variable}{_range(index.range)}]"


def _let(let: ast.Let) -> str:
    formulas = ", ".join(map(show_expression, let.formulas))
    return f"let {let.name.text} = " + (f"[{formulas}]" if isinstance(let.value, ast.NumberTable) else formulas)


def _clause(clause: ast.Clause) -> str:
    match clause:
        case ast.Stages(group, variable, stages, worker, place):
            on = f"on {f'{worker.text} = ' if worker else ''}{show_expression(place)}"
            numbers = f"{variable.text} in {_range(stages)}"
            return f"stages {f'{group.text}[{numbers}]' if group else numbers} {on}"
        case ast.Micros(variable, micros, halves, step, number, weight):
            rest = _phrase("by", step) + _phrase("as", number) + _phrase("weigh", weight)
            return f"micros {variable.text} in {_range(micros)}{' halves' if halves else ''}{rest}"
        case ast.Slices(variable, slices):
            return f"slices {variable.text} in {_range(slices)}"
        case ast.Let():
            return _let(clause)
        case ast.Operation():
            head = " & ".join(map(_subject, clause.subjects))
            order = _phrase("@", clause.clock) + _phrase("prefer", clause.preference)
            return f"{head}{order}{_phrase('when', clause.guard)}"
        case ast.Reads(version):
            return f"reads version {show_expression(version)}"
        case ast.Recompute(guard):
            return f"recompute{_phrase('when', guard)}"
        case ast.Sync(mode, guard):
            return f"sync {mode.value}{_phrase('when', guard)}"
        case _:
            assert_never(clause)


def _subject(subject: ast.Subject) -> str:
    micro = _range(subject.micro) if isinstance(subject.micro, ast.Range) else show_expression(subject.micro)
    place = "" if subject.slice is None else f", {show_expression(subject.slice)}"
    text = f"{subject.kind.letter}({micro}, {show_expression(subject.stage)}{place})"
    if subject.pipe is None:
        return text
    index = "" if subject.pipe.index is None else f"[{show_expression(subject.pipe.index)}]"
    return f"{text} of {subject.pipe.name.text}{index}"


def _phrase(word: str, expression: ast.Expression | None) -> str:
    return "" if expression is None else f" {word} {show_expression(expression)}"


def _range(range_: ast.Range | ast.Endless) -> str:
    match range_:
        case ast.Range(start, stop):
            return f"{show_expression(start)}..{show_expression(stop)}"
        case ast.Endless(start):
            return f"{show_expression(start)}.."
        case _:
            assert_never(range_)


def show_expression(expression: ast.Expression) -> str:
    """The text of an expression with only the brackets it needs."""
    return _show(expression, _CHOICE)


def _show(expression: ast.Expression, place: int) -> str:
    tightness, text = _parts(expression)
    return text if tightness >= place else f"({text})"


def _parts(expression: ast.Expression) -> tuple[int, str]:
    """Returns how tightly an expression binds, as a number, and its text without brackets around it."""
    match expression:
        case ast.Integer(value):
            return _ATOM, str(value)
        case ast.Name(text):
            return _ATOM, text
        case ast.Call(function, arguments):
            return _ATOM, f"{function.text}({', '.join(map(show_expression, arguments))})"
        case ast.Lookup(table, position):
            return _ATOM, f"{table.text}[{show_expression(position)}]"
        case ast.Minus(operand):
            return _MINUS, f"-{_show(operand, _MINUS)}"
        case ast.Binary(operator, left, right) | ast.Logical(operator, left, right):
            level = _LEVELS[operator]
            sign = operator.value if operator in _TIGHT else f" {operator.value} "
            return level, f"{_show(left, level)}{sign}{_show(right, level + 1)}"
        case ast.Comparison(operands, comparators):
            signs = ["", *(f" {comparator.value} " for comparator in comparators)]
            return _COMPARISON, "".join(f"{s}{_show(o, _SUM)}" for s, o in zip(signs, operands, strict=True))
        case ast.Not(operand):
            return _NOT, f"not {_show(operand, _NOT)}"
        case ast.Choice(condition, then, otherwise):
            text = f"if {_show(condition, _OR)} then {_show(then, _OR)} else {_show(otherwise, _CHOICE)}"
            return _CHOICE, text
        case _:
            assert_never(expression)
