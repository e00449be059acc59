"""Escapes for texts of unknown origin, before they are shown on a terminal, in a picture, page or command line."""

import shlex
import unicodedata
from collections.abc import Iterable

_TAB = 4
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")


def visible(text: str) -> str:
    """The text with tabs as blanks, and with escapes for characters that a terminal would obey instead of show.

    Examples
    --------
    >>> print(visible("a\\tb\\x1b[31m"))
    a    b\\x1b[31m
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible_character, text))


def visible_lines(text: str) -> str:
    """Several lines with escapes as in `visible`; the line ends stay."""
    if text.isascii() and text.isprintable():
        return text
    return "\n".join(map(visible, text.split("\n")))


def _visible_character(character: str) -> str:
    if character == "\t":
        return " " * _TAB
    if character != " " and unicodedata.category(character) in _HIDDEN:
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


def as_argument(path: str) -> str:
    """A path, written so that no command takes it for an option."""
    return f"./{path}" if path.startswith("-") else path


def command_line(words: Iterable[str]) -> str:
    """The words as one line that a shell splits into the same words.

    Characters that cannot be shown are in the notation of bash, ksh and zsh.

    Examples
    --------
    >>> print(command_line(["torchrun", "it's/train.py", "a\\nb"]))
    torchrun 'it'"'"'s/train.py' $'a\\x0ab'
    """
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if visible(word) == word:
        return shlex.quote(word)
    return f"$'{''.join(map(_quoted_character, word))}'"


def _quoted_character(character: str) -> str:
    if character in "'\\":
        return f"\\{character}"
    if visible(character) == character:
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))
