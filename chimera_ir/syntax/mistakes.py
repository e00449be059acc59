"""Finds the mistake in a text, given where the parser stopped and which tokens could stand there."""

import re
from dataclasses import dataclass
from functools import cached_property

from lark import Token

from chimera_ir.diagnostics.catalogue import syntax as say
from chimera_ir.diagnostics.model import Diagnostic, closest
from chimera_ir.ir.kinds import KINDS
from chimera_ir.plural import listed
from chimera_ir.source import Span

OPENERS = {"(": ")", "[": "]", "{": "}"}
CLOSERS = {closer: opener for opener, closer in OPENERS.items()}

SCHEME_LINES = frozenset({"workers", "frozen", "feeds", "let", "fn", "require", "update", "memory", "pipe"})
PIPE_LINES = frozenset({"stages", "micros", "slices", "let", "reads", "recompute", "sync"})
"""The words that begin a line in a pipe; the other lines are operations."""

LETTERS = tuple(letter for letter in KINDS if letter not in PIPE_LINES)


@dataclass(frozen=True)
class Stop:
    """The place where the parser stopped: at ``tokens[position]``, or at the end of ``text``.

    ``accepted`` are the terminals of the grammar that could stand there.
    """

    text: str
    tokens: list[Token]
    position: int
    accepted: frozenset[str]

    @property
    def token(self) -> Token | None:
        """The token that the parser did not take; None at the end of the text."""
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    @property
    def before(self) -> Token:
        """The last token that the parser took."""
        return self.tokens[self.position - 1]

    @property
    def span(self) -> Span:
        """The span of the token; at the end of the text, the place after the last token."""
        return self.gap if self.token is None else span_of(self.token)

    @property
    def shown(self) -> str:
        """The token that the parser did not take, in words."""
        return "the end of the text" if self.token is None else f"`{short(self.token)}`"

    @property
    def on_next_line(self) -> bool:
        """Whether the parser stopped at the start of a line, or at the end of the text."""
        return self.token is None or first_on_line(self.tokens, self.position)

    @property
    def wants_value(self) -> bool:
        """Whether an expression could start here."""
        return "INTEGER" in self.accepted

    @property
    def after_value(self) -> bool:
        """Whether a complete expression ends here."""
        return "PLUS" in self.accepted

    @property
    def gap(self) -> Span:
        """The place after the last token taken, where something is missing."""
        end = span_of(self.before).end
        return Span(end, end + 1)

    @cached_property
    def open_brackets(self) -> list[Token]:
        """The open brackets, the outermost first."""
        opened: list[Token] = []
        for token in self.tokens[: self.position]:
            if token in OPENERS:
                opened.append(token)
            elif token in CLOSERS and opened:
                opened.pop()
        return opened

    def line_start(self) -> int:
        """The position of the token that starts the line of the scheme in which the parser stopped."""
        return statement_start(self.tokens, self.position - 1)

    def text_between(self, start: int, end: int) -> str:
        """The text from the token at position ``start`` to before the one at ``end``, as one line."""
        if start >= end:
            return ""
        text = self.text[span_of(self.tokens[start]).start : span_of(self.tokens[end - 1]).end]
        return " ".join(text.split())


def span_of(token: Token) -> Span:
    """The span of a token."""
    return Span(token.start_pos or 0, token.end_pos or 0)


def starts_statement(tokens: list[Token], position: int) -> bool:
    """Whether a line of the scheme starts at a token, so that parsing can resume there."""
    token = tokens[position]
    if token in SCHEME_LINES or token in PIPE_LINES or token in ("scheme", "}"):
        return True
    return token.type == "NAME" and first_on_line(tokens, position)


def statement_start(tokens: list[Token], position: int) -> int:
    """Returns the position of the first token of the scheme's line to which the token at ``position`` belongs."""
    while position > 0 and not starts_statement(tokens, position):
        position -= 1
    return position


def first_on_line(tokens: list[Token], position: int) -> bool:
    """Whether a token is the first on its line."""
    return position == 0 or (tokens[position].line or 0) > (tokens[position - 1].end_line or 0)


def short(token: Token) -> str:
    """The text of a token, shortened if it is very long."""
    text = str(token)
    return text if len(text) <= 40 else text[:37] + "..."


_KEYWORDS = """
scheme workers except frozen feeds let fn require update every memory pipe in stages micros slices on by as halves weigh
reads version recompute sync of prefer when if then else and or not
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""The words that cannot be names."""

FOREIGN_NAMES = {
    **dict.fromkeys(("mod", "modulo", "rem"), "a % b"),
    **dict.fromkeys(("div", "idiv", "floor", "int", "trunc"), "a / b"),
    "ceil": "(a + b - 1) / b",
    "pow": "n*n",
    "true": "0 == 0",
    "false": "0 != 0",
}
"""Maps names that other languages define to the formula that a scheme has in their place."""

_VALUE = frozenset({"INTEGER", "LPAR", "MINUS", "NAME", "NOT", "IF"})
_COMPARISON = frozenset({"LESSTHAN", "MORETHAN", "EQUALS", "DIFFERS", "ATMOST", "ATLEAST"})
OPERATORS = _COMPARISON | {"PLUS", "MINUS", "STAR", "SLASH", "PERCENT", "AND", "OR"}
_FIRST_WORDS = {"NAME", *(word.upper() for word in SCHEME_LINES | PIPE_LINES)}
_SYMBOLS = {
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "COMMA": "`,`",
    "EQUAL": "`=`",
    "AT": "`@`",
    "DOTS": "`..`",
    "JOIN": "`&`",
    "ARROW": "`->`",
    "ATMOST": "`<=`",
    "NAME": "a name",
    "STRING": 'a "message"',
    "INTEGER": "a number",
}


def expected_words(accepted: frozenset[str]) -> str:
    """The words for what could follow, from the names of the terminals that the parser accepts."""
    words: list[str] = []
    rest = accepted - {"$END", "SEMICOLON", "ENDLESS"}
    if rest >= _VALUE - {"NOT", "IF"}:
        words.append("a value")
        rest -= _VALUE
    if rest >= {"PLUS", "STAR"}:
        words.append("an operator")
        rest -= OPERATORS
    if rest >= {"LET", "PIPE"} or rest >= {"STAGES", "MICROS"}:
        words.append("the next line of the scheme" if "PIPE" in rest else "the next line of the pipe")
        rest -= _FIRST_WORDS
    words += sorted(_SYMBOLS.get(name, f"`{name.lower()}`") for name in rest)
    return listed(words, "or") if words else "nothing more"


_INFIX = frozenset({"+", "-", "*", "/", "%", "==", "!=", "<=", "<", ">=", ">", "and", "or"})
_BEFORE_VALUE = frozenset({"@", "=", "when", "as", "by", "weigh", "on", "if", "then", "else", "not", ".."})
_EXAMPLES = {"scheme": "scheme mine(D = 4, N = 8)", "pipe": "pipe down { .. }"}
_UNNAMED = {"memory": say.UnnamedQuantity, "on": say.UnnamedWorker, "sync": say.UnnamedStrategy, "[": say.UnnamedIndex}

_STRAY = {
    **dict.fromkeys("'`", say.StrayQuote),
    **dict.fromkeys("?!", say.StrayQuestion),
    ":": say.StrayColon,
    ".": say.StrayDot,
}


def lexical(token: Token) -> Diagnostic | None:
    """Returns the mistake in a single token, such as a decimal fraction, or None."""
    span, text = span_of(token), str(token)
    match token.type:
        case "FRACTION":
            return say.NotAnInteger(span, text)
        case "GLUED":
            number = text[: len(text) - len(text.lstrip("0123456789"))]
            known = re.fullmatch(r"0[xXoObB]\w+|[0-9][0-9_]*|[0-9]+[eE][0-9]*", text)
            return (say.ForeignNumber if known else say.GluedNumber)(span, text, number, text[len(number) :])
        case "FOREIGN":
            return say.ForeignSpelling(span, text)
        case "OPEN_STRING":
            return say.OpenString(span)
        case "STRAY":
            return _stray(text)(span, f"`{short(token)}`")
        case _:
            return None


def syntactic(stop: Stop) -> Diagnostic:
    """The mistake at which the parser stopped, by the first rule that applies, from the particular to the general."""
    if stop.position == 0:
        return say.NothingHere(Span(0, 1)) if stop.token is None else say.NoHeader(stop.span, stop.shown)
    for rule in (
        _arrow,
        _wrong_line,
        _unsayable,
        _brackets,
        _clock,
        _definition,
        _variable,
        _foreign,
        _choice,
        _bound,
        _message,
        _table,
        _missing_value,
        _name,
        _header,
        _arguments,
        _side_by_side,
        _second_value,
        _unknown_line,
        _end,
    ):
        mistake = rule(stop)
        if mistake is not None:
            return mistake
    return say.Unexpected(stop.span, stop.shown, expected_words(stop.accepted))


def _arrow(stop: Stop) -> Diagnostic | None:
    return say.ForeignSpelling(stop.span, "->") if stop.token == "->" else None


def _wrong_line(stop: Stop) -> Diagnostic | None:
    token, opened = stop.token, stop.open_brackets
    if token is None or "(" in opened or "[" in opened or stop.wants_value:
        return None
    if token == "scheme":
        return _unclosed(stop, opened[-1]) if opened else say.SecondScheme(stop.span)
    if opened and token in SCHEME_LINES - PIPE_LINES and "RBRACE" in stop.accepted:
        inside = say.FunctionInsidePipe if token == "fn" else say.InsidePipe
        unclosed = token == "pipe"
        return _unclosed(stop, opened[-1]) if unclosed else inside(stop.span, f"`{token}`", span_of(opened[-1]))
    if not opened and "PIPE" in stop.accepted and (token in PIPE_LINES or _is_operation(stop)):
        closed = stop.tokens[: stop.position]
        last = next((span_of(before) for before in reversed(closed) if before == "}"), None)
        line = f"`{token}`" if token in PIPE_LINES else f"the operation `{token}`"
        return say.OutsidePipe(stop.span, line, last)
    return None


def _is_operation(stop: Stop) -> bool:
    following = stop.tokens[stop.position + 1 : stop.position + 2]
    return stop.token is not None and stop.token.type == "NAME" and following == ["("] and len(stop.token) == 1


def _unsayable(stop: Stop) -> Diagnostic | None:
    tokens, start = stop.tokens, stop.line_start()
    if stop.token in ("by", "when") and tokens[start] == "stages":
        return say.CannotSay(stop.span, *say.UNSAYABLE["skip"])
    glued = _glued(stop)
    for at in (start, stop.position if glued is None else glued):
        word = tokens[at] if at < len(tokens) else None
        if word is None or word.type != "NAME" or word not in say.UNSAYABLE or word in tokens[:at]:
            continue
        if first_on_line(tokens, at) or stop.after_value or at == glued:
            return say.CannotSay(span_of(word), *say.UNSAYABLE[word])
    return None


def _brackets(stop: Stop) -> Diagnostic | None:
    token, opened = stop.token, stop.open_brackets
    if token is not None and token in CLOSERS:
        if not opened:
            return say.StrayCloser(stop.span, str(token), CLOSERS[token])
        wrong = token != OPENERS[opened[-1]] and not stop.wants_value
        return _mismatch(stop, token, opened) if wrong else None
    if not opened or {"(": "RPAR", "[": "RSQB", "{": "RBRACE"}[opened[-1]] not in stop.accepted:
        return None
    ends = token is None or (opened[-1] != "{" and _cannot_continue(stop))
    return _unclosed(stop, opened[-1]) if ends else None


def _mismatch(stop: Stop, token: Token, opened: list[Token]) -> Diagnostic:
    if CLOSERS[token] == "{" and len(opened) > 1:
        return _unclosed(stop, opened[-1])
    if CLOSERS[token] == "(" and opened[-1] == "{":
        return say.StrayCloser(stop.span, str(token), "(")
    return say.WrongCloser(stop.span, str(opened[-1]), str(token), OPENERS[opened[-1]], span_of(opened[-1]))


def _cannot_continue(stop: Stop) -> bool:
    token = stop.token
    if token is None or stop.on_next_line:
        return True
    if stop.before in OPENERS or stop.before == ",":
        return False
    return (
        token in ("@", "=", "{", "on", "when", "as", "by", "weigh", "halves", "then", "else", ";")
        or token.type == "STRING"
    )


def _unclosed(stop: Stop, opener: Token) -> Diagnostic:
    at_end = say.UnclosedLine if stop.token is None or stop.on_next_line else say.Unclosed
    message = say.UnclosedPipe if opener == "{" else at_end
    return message(span_of(opener), str(opener), OPENERS[opener], stop.shown, stop.span)


def _clock(stop: Stop) -> Diagnostic | None:
    start = stop.line_start()
    head = stop.tokens[start : stop.position]
    # A clock without its sign may begin with a name, which the parser takes for the letter of the next operation.
    at = stop.position if "AT" in stop.accepted else _glued(stop)
    operation = stop.tokens[start:at]
    subject = operation[1:2] == ["("] and operation[-1] == ")" and not {"@", "when", "prefer"} & {*operation}
    if at is not None and subject:
        for token in [] if first_on_line(stop.tokens, at) else stop.tokens[at : at + 1]:
            if token.type in ("NAME", "INTEGER") or token in ("(", "-", "=", "if"):
                message = say.ClockBehindEquals if token == "=" else say.MissingClock
                return message(span_of(token), stop.text_between(start, at))
    if stop.token in ("@", "prefer") and {"@", "prefer"} & {*head}:
        return say.ClockAndPreference(stop.span)
    if stop.token == "@" and head and first_on_line(stop.tokens, start):
        call = max((i for i in range(start, stop.position) if first_on_line(stop.tokens, i)), default=start)
        if call > 0 and stop.tokens[call - 1] in _INFIX | _BEFORE_VALUE:
            before = stop.tokens[call - 1]
            return say.ValueOnNextLine(span_of(before), f"`{before}`", f"`{stop.tokens[call]}`")
    return None


def _definition(stop: Stop) -> Diagnostic | None:
    if stop.token == "=" and stop.after_value:
        return say.SingleEquals(stop.span)
    if stop.accepted != {"EQUAL"}:
        return None
    start = stop.line_start()
    span = stop.gap if stop.on_next_line else stop.span
    name = stop.text_between(start + 1, stop.position)
    if stop.tokens[start] == "scheme":
        return say.MissingDefault(span, str(stop.before))
    message = say.DefinedByComparison if stop.token == "==" else say.MissingEquals
    return message(span, str(stop.tokens[start]), name)


def _variable(stop: Stop) -> Diagnostic | None:
    span = stop.gap if stop.on_next_line else stop.span
    start = stop.line_start()
    if "IN" in stop.accepted <= {"IN", "LSQB"}:
        return say.MissingIn(span, str(stop.before))
    if stop.token is not None and stop.token.type == "ENDLESS":
        return say.EndlessRange(stop.span)
    line = stop.tokens[start : stop.position]
    if "in" not in line:
        return None
    at = start + max(i for i, token in enumerate(line) if token == "in")
    variable = str(stop.tokens[at - 1])
    if stop.accepted >= {"DOTS"} and stop.after_value and not {"COMMA"} & stop.accepted:
        value = stop.text_between(at + 1, stop.position)
        return say.MissingRange(span, variable, value, stop.shown)
    if "ON" in stop.accepted and stop.after_value:
        return say.MissingPlace(span, variable, stop.shown)
    return None


def _choice(stop: Stop) -> Diagnostic | None:
    if stop.token == "if" and stop.wants_value:
        return say.BareChoice(stop.span)
    missing = next((word for word in ("then", "else") if word.upper() in stop.accepted), None)
    if missing is None or stop.wants_value:
        return None
    opened = next(token for token in reversed(stop.tokens[: stop.position]) if token == "if")
    return say.IncompleteChoice(span_of(opened), missing, stop.shown)


def _bound(stop: Stop) -> Diagnostic | None:
    start = stop.line_start()
    if stop.token != "on" or stop.tokens[start] != "memory" or not stop.after_value:
        return None
    at = next(place for place in range(start, stop.position) if stop.tokens[place] == "<=")
    bounded, limit = stop.text_between(start, at), stop.text_between(at, stop.position)
    following = stop.tokens[stop.position + 1 : stop.position + 2]
    worker = following[0] if following and following[0].type == "NAME" else "w"
    named = bounded if "on" in stop.tokens[start:at] else f"{bounded} on {worker}"
    return say.WorkerBehindLimit(stop.span, stop.shown, f"`{named} {limit}`")


def _message(stop: Stop) -> Diagnostic | None:
    unfinished = stop.tokens[stop.line_start()] == "require" and "COMMA" in stop.accepted and stop.on_next_line
    return say.MissingMessage(stop.gap) if unfinished or stop.accepted == {"STRING"} else None


def _table(stop: Stop) -> Diagnostic | None:
    return say.UnnamedTable(stop.span) if stop.token == "[" and stop.wants_value else None


def _missing_value(stop: Stop) -> Diagnostic | None:
    if not stop.wants_value:
        return None
    token = stop.token
    if token == "=":
        return say.NeedlessEquals(stop.span, str(stop.before))
    follows_value = token is None or token.type == "STRING" or token in _INFIX | {*CLOSERS, ",", "@", "..", ";"}
    if stop.on_next_line or follows_value:
        return say.MissingValue(span_of(stop.before), f"`{stop.before}`", stop.shown)
    return None


def _name(stop: Stop) -> Diagnostic | None:
    if stop.token is None or stop.token not in KEYWORDS or "NAME" not in stop.accepted:
        return None
    if stop.accepted <= {"NAME", "RPAR"} or stop.wants_value:
        return (say.KeywordAsValue if stop.wants_value else say.KeywordAsName)(stop.span, str(stop.token))
    return None


def _header(stop: Stop) -> Diagnostic | None:
    span = stop.gap if stop.on_next_line else stop.span
    before = str(stop.before)
    if stop.accepted == {"NAME"} and stop.token is not None:
        if before in _EXAMPLES:
            return say.UnnamedPart(span, before, stop.shown, _EXAMPLES[before])
        return _UNNAMED.get(before, say.MissingName)(span, before, stop.shown)
    earlier = stop.tokens[stop.position - 2] if stop.position > 1 else stop.before
    if earlier == "fn" and stop.accepted == {"LPAR"}:
        return say.MissingBrackets(span, before, stop.shown)
    named = stop.token is not None and stop.token.type == "NAME" and not stop.on_next_line
    if earlier == "scheme" and "LPAR" in stop.accepted and named:
        return say.SchemeWithoutBrackets(span, before, stop.shown, str(stop.token))
    return None


def _arguments(stop: Stop) -> Diagnostic | None:
    if "{" not in stop.open_brackets:
        return None
    at = stop.position - 1 if stop.accepted == {"LPAR"} else _opening(stop) - 1
    letter = stop.tokens[at]
    inside = not first_on_line(stop.tokens, at) and stop.tokens[at - 1] in _INFIX | _BEFORE_VALUE | {"(", ","}
    if letter not in KINDS or inside:
        return None
    if stop.accepted == {"LPAR"}:
        return say.WrongBrackets(stop.span, str(letter), stop.shown)
    if stop.token == ")" and "COMMA" in stop.accepted and "RPAR" not in stop.accepted:
        message = say.WithoutWhen if letter == "recompute" else say.WrongArguments
        return message(stop.span, str(letter))
    if stop.token == "," and "RPAR" in stop.accepted:
        return say.FourthArgument(stop.span, str(letter))
    return None


def _opening(stop: Stop) -> int:
    return next(i for i in range(stop.position - 1, -1, -1) if stop.tokens[i] is stop.open_brackets[-1])


def _foreign(stop: Stop) -> Diagnostic | None:
    glued = _glued(stop)
    places = [stop.position, stop.position - 1] if glued is None else [glued, glued - 1]
    for at in places if stop.after_value or glued is not None else ():
        word = str(stop.tokens[at]) if at < len(stop.tokens) and not first_on_line(stop.tokens, at) else ""
        if word != word.lower() and word.lower() in KEYWORDS:
            return say.UpperCase(span_of(stop.tokens[at]), word)
        if word.lower() in say.FOREIGN:
            return say.ForeignSpelling(span_of(stop.tokens[at]), word)
    return None


def _glued(stop: Stop) -> int | None:
    """Returns the position of a name right after a value, which the parser took for an operation; None without one."""
    if stop.accepted == {"LPAR"}:
        at = stop.position - 1
    elif stop.open_brackets and stop.open_brackets[-1] == "(":
        at = _opening(stop) - 1
    else:
        return None
    name, earlier = stop.tokens[at], stop.tokens[at - 1]
    operation = name.type != "NAME" or name in KINDS or first_on_line(stop.tokens, at)
    return None if operation or not (earlier.type in ("NAME", "INTEGER") or earlier == ")") else at


def _side_by_side(stop: Stop) -> Diagnostic | None:
    token, glued = stop.token, _glued(stop)
    if glued is not None:
        earlier, name = stop.tokens[glued - 1], stop.tokens[glued]
        return say.MissingOperator(span_of(name), _operand(earlier), str(name))
    if token is None or stop.on_next_line or not stop.after_value:
        return None
    if token.type not in ("NAME", "INTEGER") and token != "(":
        return None
    if "COMMA" in stop.accepted and stop.open_brackets:
        return say.MissingComma(stop.span, stop.shown, str(stop.before), str(token))
    return say.MissingOperator(stop.span, _operand(stop.before), _operand(token))


def _operand(token: Token) -> str:
    return "(..)" if token in ("(", ")") else str(token)


def _second_value(stop: Stop) -> Diagnostic | None:
    return say.SeveralValues(stop.span) if stop.token == "," and stop.after_value else None


def _unknown_line(stop: Stop) -> Diagnostic | None:
    at = stop.position - 1 if stop.accepted == {"LPAR"} and stop.before.type == "NAME" else stop.position
    if at >= len(stop.tokens) or stop.tokens[at].type != "NAME":
        return None
    if at == stop.position and not first_on_line(stop.tokens, at):
        return None
    inside = bool(stop.open_brackets)
    word, lines = stop.tokens[at], PIPE_LINES if inside else SCHEME_LINES
    guess = closest(word, lines)
    if guess is None and stop.tokens[stop.line_start()] in ("let", "fn"):
        return None
    words = listed([*(LETTERS if inside else ()), *sorted(lines)])
    return (say.UnknownClause if inside else say.UnknownStatement)(span_of(word), str(word), guess, words)


def _end(stop: Stop) -> Diagnostic | None:
    if stop.token is not None:
        return None
    start = stop.tokens[stop.line_start()]
    return say.Unfinished(stop.gap, f"`{short(start)}`", expected_words(stop.accepted))


def _stray(text: str) -> type[say.StrayCharacter]:
    if text.isspace():
        return say.StrayBlank
    return _STRAY.get(text[0] if text[0] in "'`" else text, say.StrayCharacter)
