"""Texts as an attacker, a broken disk or a tired person writes them: right ones, damaged by chance.

A seed gives the same damage always. What is damaged is whatever the project has: the library, the schemes and IR texts
of tests and docs, and every level of small compilations.
"""

import random
import re
from functools import cache
from pathlib import Path

import chimera_ir
from chimera_ir import library
from chimera_ir.ir.text.printer import show
from chimera_ir.source import ENDINGS, schemes
from chimera_ir.torch_text.csv_writer import unfit
from tests.sizes import on_workers

ROOT = Path(__file__).resolve().parents[2]
SIZES = 2, 2
"""Workers, and micro-batches at least."""

NUMBERS = (
    *("-1", "0", "1", "2", "3", "7", "007", "63", "65536", "65537", "1048577", "99999999", str(2**31)),
    *(str(2**63 - 1), str(2**63), "9" * 30, "9" * 5000, "0x10", "1e9", "1.5", "-0", "1_000", "٣", "²"),
)
ODD = (
    *("\0", "\x07", "\x1b[31m", "\x7f", "\x85", "\ufeff", "\u202e", "\u2028", "\u00a0", "\u0301", "é", "中", "𝔽"),
    *("\r", "\r\n", "\t", "\f", "\v", "#", ";", '"', "'", "{", "}", "(", ")", "[", "]", "..", "@", "\\", "%s"),
    *("{0}", "{count}", "[red]"),
)
BYTES = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xfe\xff", b"\x80" * 9)
WORDS = re.compile(r"[A-Za-z_]\w*|-?\d+|[^\w\s]|\s+")


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """All texts with the suffixes of their files."""
    folders = [schemes(), ROOT / "docs" / "examples", ROOT / "examples", *(ROOT / "tests" / each for each in FOLDERS)]
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in ENDINGS]
    known = {(path.suffix, path.read_text(encoding="utf-8", errors="replace")) for path in paths}
    return (*sorted(known), *(level for name in library.names() for level in _levels(name)))


FOLDERS = ("errors/front", "errors/middle", "errors/torch", "e2e/schemes", "golden")


def _levels(name: str) -> list[tuple[str, str]]:
    """A plan, a schedule and a program of a library scheme, and both of the forms that torch can run."""
    compilation = chimera_ir.compile(name, **on_workers(name, *SIZES))
    levels = [(".sir", show(level)) for level in (compilation.plan, compilation.schedule, compilation.program)]
    if not unfit(compilation.schedule):
        levels += [(".csv", compilation.torch_csv), (".csv", compilation.torch_csv_comms)]
    return levels


def damaged(seed: int) -> tuple[str, bytes]:
    """A damaged text, as the bytes of a file, and the suffix of that."""
    rng = random.Random(seed)
    suffix, text = rng.choice(texts())
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        text = rng.choice(DAMAGES)(text, rng)
    data = text.encode("utf-8", errors="surrogatepass")
    if rng.random() < 0.1:
        at = rng.randint(0, len(data))
        data = data[:at] + rng.choice(BYTES) + data[at:]
    return suffix, data


def _lines(text: str, rng: random.Random) -> str:
    """Leaves a line out, writes one twice, swaps two, or takes one from another text."""
    lines = text.split("\n")
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[one]
        case 1:
            lines[other:other] = [lines[one]] * rng.choice((1, 1, 2, 200))
        case 2:
            lines[one], lines[other] = lines[other], lines[one]
        case _:
            lines.insert(one, rng.choice(rng.choice(texts())[1].split("\n")))
    return "\n".join(lines)


def _words(text: str, rng: random.Random) -> str:
    """The same with a word or a sign."""
    words = WORDS.findall(text) or [""]
    one, other = rng.randrange(len(words)), rng.randrange(len(words))
    match rng.randrange(4):
        case 0:
            del words[one]
        case 1:
            words[other:other] = [words[one]] * rng.choice((1, 1, 2, 200))
        case 2:
            words[one], words[other] = words[other], words[one]
        case _:
            words[one] = rng.choice(WORDS.findall(rng.choice(texts())[1]) or [""])
    return "".join(words)


def _number(text: str, rng: random.Random) -> str:
    """Writes another number for one, or for all that are like it."""
    numbers = list(re.finditer(r"\d+", text))
    if not numbers:
        return text
    one, number = rng.choice(numbers), rng.choice(NUMBERS)
    if rng.random() < 0.2:
        return re.sub(rf"\b{one[0]}\b", lambda _: number, text)
    return text[: one.start()] + number + text[one.end() :]


def _odd(text: str, rng: random.Random) -> str:
    """Puts something odd anywhere."""
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(ODD) * rng.choice((1, 1, 1, 3, 300)) + text[at + rng.choice((0, 0, 1, 4)) :]


def _surrogate(text: str, rng: random.Random) -> str:
    at = rng.randint(0, len(text))
    return text[:at] + chr(rng.randrange(0xD800, 0xE000)) + text[at:]


def _cut(text: str, rng: random.Random) -> str:
    """Ends the text early, or begins it late."""
    at = rng.randint(0, len(text))
    return text[:at] if rng.random() < 0.7 else text[at:]


def _ends(text: str, rng: random.Random) -> str:
    """Writes line ends of other systems, or none."""
    return text.replace("\n", rng.choice(("\r\n", "\r", " ", "\n\n", "\u2028")))


DAMAGES = (_lines, _lines, _words, _words, _words, _number, _number, _number, _odd, _odd, _surrogate, _cut, _ends)
