"""Which mistake a text makes: told from where the parser stopped, and from what it would have taken there."""

from dataclasses import dataclass

from lark import Token

from chimera_ir.diagnostics.catalogue import syntax as say
from chimera_ir.diagnostics.catalogue import tokens
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.diagnostics.suggest import closest
from chimera_ir.source import Span
from chimera_ir.syntax.spelling import FOREIGN, KEYWORDS, expected_words

OPENERS = {"(": ")", "[": "]", "{": "}"}
"""Each opening bracket with its partner."""

CLOSERS = {closer: opener for opener, closer in OPENERS.items()}
"""Each closing bracket with its partner."""

_SCHEME_LINES = frozenset({"workers", "let", "fn", "require", "update", "memory", "pipe"})
_PIPE_LINES = frozenset({"stages", "micros", "reads", "recompute", "sync"})
_INFIX = frozenset({"+", "-", "*", "/", "%", "==", "!=", "<=", "<", ">=", ">", "and", "or"})


@dataclass(frozen=True, slots=True)
class Stop:
    """Where the parser stopped: at ``tokens[position]``, or at the end; ``accepted`` could have stood there."""

    text: str
    tokens: list[Token]
    position: int
    accepted: frozenset[str]

    @property
    def token(self) -> Token | None:
        """What the parser did not take; None at the end of the text."""
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    @property
    def before(self) -> Token:
        """The last token it took."""
        return self.tokens[self.position - 1]

    @property
    def span(self) -> Span:
        """Where it stopped; at the end of the text, just behind the last token."""
        if self.token is not None:
            return span_of(self.token)
        end = span_of(self.before).end
        return Span(end, end + 1)

    @property
    def found(self) -> str:
        """What it did not take, as one says it."""
        return "the end of the text" if self.token is None else f"`{_short(self.token)}`"

    @property
    def on_next_line(self) -> bool:
        """Whether what was expected is missing at the end of a line."""
        return self.token is None or _first_on_line(self.tokens, self.position)

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
        """Just behind the last token taken, where something is missing."""
        end = span_of(self.before).end
        return Span(end, end + 1)

    def open_brackets(self) -> list[Token]:
        """The brackets that are open here, the outermost first."""
        opened: list[Token] = []
        for token in self.tokens[: self.position]:
            if token in OPENERS:
                opened.append(token)
            elif token in CLOSERS and opened:
                opened.pop()
        return opened

    def line_start(self) -> int:
        """The position of the token that starts the line of the scheme in which the parser stopped."""
        at = self.position - 1
        while at > 0 and not starts_statement(self.tokens, at):
            at -= 1
        return at


def span_of(token: Token) -> Span:
    """Where a token is."""
    return Span(token.start_pos or 0, token.end_pos or 0)


def starts_statement(tokens: list[Token], position: int) -> bool:
    """Whether a line of the scheme starts at a token: the parser can be trusted again from there on."""
    token = tokens[position]
    if token in _SCHEME_LINES or token in _PIPE_LINES or token in ("scheme", "}"):
        return True
    return token.type == "NAME" and _first_on_line(tokens, position)


def lexical(token: Token) -> Diagnostic | None:
    """The mistake that a token is by itself, if it is one."""
    span, text = span_of(token), str(token)
    match token.type:
        case "FRACTION":
            return tokens.NotAnInteger(span, text)
        case "GLUED":
            number = text[: len(text) - len(text.lstrip("0123456789"))]
            return tokens.GluedNumber(span, text, number, text[len(number) :])
        case "FOREIGN":
            return tokens.ForeignSpelling(span, text, *FOREIGN[text])
        case "OPEN_STRING":
            return tokens.OpenString(span)
        case "STRAY":
            return tokens.StrayCharacter(span, f"`{_short(token)}`", _stray_hint(text))
        case _:
            return None


def syntactic(stop: Stop) -> Diagnostic:
    """The mistake at which the parser stopped.

    The questions are asked from the particular to the general; the first that says something decides.
    """
    if stop.position == 0:
        return _nothing_before(stop)
    for question in (
        _wrong_line,
        _brackets,
        _clock,
        _definition,
        _variable,
        _choice,
        _message,
        _missing_value,
        _name,
        _side_by_side,
        _unknown_line,
        _end,
    ):
        answer = question(stop)
        if answer is not None:
            return answer
    return say.Unexpected(stop.span, stop.found, expected_words(stop.accepted))


def _nothing_before(stop: Stop) -> Diagnostic:
    if stop.token is None:
        return say.NothingHere(Span(0, 1))
    return say.NoHeader(stop.span, stop.found)


def _wrong_line(stop: Stop) -> Diagnostic | None:
    """A line that starts where it does not belong, behind a complete one."""
    token, opened = stop.token, stop.open_brackets()
    if token is None or "(" in opened or "[" in opened or stop.wants_value:
        return None
    if token == "scheme":
        return _unclosed(stop, opened[-1]) if opened else say.SecondScheme(stop.span)
    if opened and token == "pipe" and "RBRACE" in stop.accepted:
        return _unclosed(stop, opened[-1])
    if opened and token in _SCHEME_LINES and "RBRACE" in stop.accepted:
        return say.InsidePipe(stop.span, f"`{token}`", span_of(opened[-1]))
    if not opened and "PIPE" in stop.accepted and (token in _PIPE_LINES or _is_operation(stop)):
        closed = stop.tokens[: stop.position]
        last = next((span_of(before) for before in reversed(closed) if before == "}"), None)
        found = f"`{token}`" if token in _PIPE_LINES else f"the operation `{token}`"
        return say.OutsidePipe(stop.span, found, last)
    return None


def _is_operation(stop: Stop) -> bool:
    following = stop.tokens[stop.position + 1 : stop.position + 2]
    return stop.token is not None and stop.token.type == "NAME" and following == ["("] and len(stop.token) == 1


def _brackets(stop: Stop) -> Diagnostic | None:
    token, opened = stop.token, stop.open_brackets()
    if token is not None and token in CLOSERS:
        if not opened:
            return say.StrayCloser(stop.span, str(token), CLOSERS[token])
        expected = OPENERS[opened[-1]]
        if token != expected and not stop.wants_value:
            return _mismatch(stop, token, opened)
        return None
    if opened and opened[-1] != "{" and _could_close(stop, opened[-1]) and _cannot_continue(stop):
        return _unclosed(stop, opened[-1])
    if opened and token is None and _could_close(stop, opened[-1]):
        return _unclosed(stop, opened[-1])
    return None


def _mismatch(stop: Stop, token: Token, opened: list[Token]) -> Diagnostic:
    if CLOSERS[token] == "{" and len(opened) > 1:
        return _unclosed(stop, opened[-1])
    if CLOSERS[token] == "(" and opened[-1] == "{":
        return say.StrayCloser(stop.span, str(token), "(")
    return say.WrongCloser(stop.span, str(opened[-1]), str(token), OPENERS[opened[-1]], span_of(opened[-1]))


def _could_close(stop: Stop, opener: Token) -> bool:
    return {"(": "RPAR", "[": "RSQB", "{": "RBRACE"}[opener] in stop.accepted


def _cannot_continue(stop: Stop) -> bool:
    """Whether what was found belongs behind the bracket, not into it."""
    token = stop.token
    if token is None or stop.on_next_line:
        return True
    return token in ("@", "=", "{", "on", "when", "as", "by", "halves", "then", "else", ";") or token.type == "STRING"


def _unclosed(stop: Stop, opener: Token) -> Diagnostic:
    where = f"before {stop.found}" if stop.token is not None and not stop.on_next_line else "at the end of the line"
    if opener == "{":
        where = "behind the last line of the pipe"
    return say.Unclosed(span_of(opener), str(opener), OPENERS[opener], where, stop.found, stop.span)


def _clock(stop: Stop) -> Diagnostic | None:
    start = stop.line_start()
    head = stop.tokens[start : stop.position]
    if stop.accepted == {"AT"}:
        operation = _slice(stop, start, stop.position)
        label = "did you mean `@`?" if stop.token == "=" else "expected `@` and a formula"
        return say.MissingClock(stop.gap if stop.on_next_line else stop.span, operation, label)
    if stop.token == "@" and head and _first_on_line(stop.tokens, start):
        call = max((i for i in range(start, stop.position) if _first_on_line(stop.tokens, i)), default=start)
        if call > 0 and stop.tokens[call - 1] in _INFIX | {"@", "=", "when"}:
            before = stop.tokens[call - 1]
            return say.MissingValue(span_of(before), f"`{before}`", f"`{stop.tokens[call]}` on the next line")
    return None


def _definition(stop: Stop) -> Diagnostic | None:
    if stop.token == "=" and stop.after_value:
        return say.SingleEquals(stop.span)
    if stop.accepted != {"EQUAL"}:
        return None
    start = stop.line_start()
    span = stop.gap if stop.on_next_line else stop.span
    name = _slice(stop, start + 1, stop.position)
    if stop.tokens[start] == "scheme":
        return say.MissingDefault(span, str(stop.before))
    return say.MissingEquals(span, name, f"{stop.tokens[start]} {name} = formula")


def _variable(stop: Stop) -> Diagnostic | None:
    span = stop.gap if stop.on_next_line else stop.span
    start = stop.line_start()
    if stop.accepted == {"IN"}:
        return say.MissingIn(span, str(stop.before))
    if stop.token is not None and stop.token.type == "ENDLESS":
        return say.EndlessIndex(stop.span)
    line = stop.tokens[start : stop.position]
    if "in" not in line:
        return None
    at = start + max(i for i, token in enumerate(line) if token == "in")
    variable = str(stop.tokens[at - 1])
    if stop.accepted >= {"DOTS"} and stop.after_value and not {"COMMA"} & stop.accepted:
        value = _slice(stop, at + 1, stop.position)
        return say.MissingRange(span, variable, value, stop.found)
    if "ON" in stop.accepted and stop.after_value:
        return say.MissingPlace(span, variable, stop.found)
    return None


def _choice(stop: Stop) -> Diagnostic | None:
    if stop.token == "if" and stop.wants_value:
        return say.BareChoice(stop.span)
    missing = next((word for word in ("then", "else") if word.upper() in stop.accepted), None)
    if missing is None or stop.wants_value:
        return None
    start = stop.line_start()
    opened = [token for token in stop.tokens[start : stop.position] if token == "if"]
    return say.IncompleteChoice(span_of(opened[-1]), missing, stop.found)


def _message(stop: Stop) -> Diagnostic | None:
    if stop.accepted == {"STRING"}:
        return say.MissingMessage(stop.gap)
    if stop.tokens[stop.line_start()] == "require" and "COMMA" in stop.accepted and stop.on_next_line:
        return say.MissingMessage(stop.gap)
    return None


def _missing_value(stop: Stop) -> Diagnostic | None:
    if not stop.wants_value:
        return None
    token = stop.token
    infix = token is not None and (token in _INFIX or token in CLOSERS or token in (",", "=", "@", "..", ";"))
    if stop.on_next_line or infix:
        return say.MissingValue(span_of(stop.before), f"`{stop.before}`", stop.found)
    return None


def _name(stop: Stop) -> Diagnostic | None:
    if stop.token is None or stop.token not in KEYWORDS or "NAME" not in stop.accepted:
        return None
    if stop.accepted == {"NAME"} or stop.wants_value:
        return say.KeywordAsName(stop.span, str(stop.token), " or a value" if stop.wants_value else "")
    return None


def _side_by_side(stop: Stop) -> Diagnostic | None:
    token = stop.token
    if token is None:
        return None
    glued = stop.accepted == {"LPAR"} and stop.before.type == "NAME"
    if glued and not _first_on_line(stop.tokens, stop.position - 1):
        earlier = stop.tokens[stop.position - 2]
        if earlier.type in ("NAME", "INTEGER"):
            return say.MissingOperator(span_of(stop.before), str(earlier), str(stop.before))
    if stop.on_next_line or not stop.after_value or (token.type not in ("NAME", "INTEGER") and token != "("):
        return None
    if "COMMA" in stop.accepted and stop.open_brackets():
        return say.MissingComma(stop.span, stop.found, str(stop.before), str(token))
    right = "(..)" if token == "(" else str(token)
    return say.MissingOperator(stop.span, str(stop.before) if stop.before != ")" else "(..)", right)


def _unknown_line(stop: Stop) -> Diagnostic | None:
    """A line whose first word is a mere name."""
    at = stop.position - 1 if stop.accepted == {"LPAR"} and stop.before.type == "NAME" else stop.position
    if at >= len(stop.tokens) or stop.tokens[at].type != "NAME" or stop.tokens[stop.line_start()] in ("let", "fn"):
        return None
    if not _first_on_line(stop.tokens, at) and at == stop.position:
        return None
    inside = bool(stop.open_brackets())
    word = stop.tokens[at]
    lines = _PIPE_LINES if inside else _SCHEME_LINES
    guess = closest(word, lines)
    here = "F, B, I, W, stages, micros, reads, recompute and sync" if inside else ", ".join(sorted(_SCHEME_LINES))
    where = "in a pipe" if inside else "outside a pipe"
    label = f"did you mean `{guess}`?" if guess else "not the beginning of a line"
    return say.UnknownStatement(span_of(word), str(word), label, f"{where}, lines begin with {here}")


def _end(stop: Stop) -> Diagnostic | None:
    if stop.token is not None:
        return None
    start = stop.tokens[stop.line_start()]
    return say.Unfinished(stop.gap, f"`{_short(start)}`", expected_words(stop.accepted))


def _first_on_line(tokens: list[Token], position: int) -> bool:
    return position == 0 or (tokens[position].line or 0) > (tokens[position - 1].end_line or 0)


def _slice(stop: Stop, start: int, end: int) -> str:
    """The text of some tokens, on one line."""
    if start >= end:
        return ""
    text = stop.text[span_of(stop.tokens[start]).start : span_of(stop.tokens[end - 1]).end]
    return " ".join(text.split())


def _short(token: Token) -> str:
    text = str(token)
    return text if len(text) <= 40 else text[:37] + "..."


def _stray_hint(text: str) -> str:
    if text in "'`":
        return 'messages stand between double quotes: "like this"'
    if text == ":":
        return "no colon is needed: a pipe's lines stand between `{` and `}`, a range is `a..b`"
    if text == ".":
        return "a range is written with two dots: `0..D`"
    if text in "?!":
        return "a choice is written `if condition then value else value`"
    return 'names are made of a-z, A-Z, 0-9 and _; other words belong into a `# comment` or a "message"'
