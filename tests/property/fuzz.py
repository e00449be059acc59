"""Damages what the commands read, and counts what they make of it: accepted, refused in words, or anything else.

How to run, with torch: python -m tests.property.fuzz KIND COUNT [FIRST], where KIND is one of `KINDS`. Exit status 1 if
anything else was found. A seed gives the same damage always; `FIRST` is the first one.
"""

import contextlib
import io
import os
import random
import re
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import click

from chimera_ir.answer import produce
from chimera_ir.commands.common import OUR_FAULT, _status
from chimera_ir.commands.group import group
from chimera_ir.commands.trace_command import trace_command
from chimera_ir.compilation import Compilation
from chimera_ir.errors import CompileError
from chimera_ir.options import read_inputs
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.syntax.formatter import show
from chimera_ir.syntax.parser import _tokens, parse
from tests.property.damaged import DAMAGES, ROOT, damaged

SECONDS = 20
"""Longest time for one input."""

LIMIT = 3_000
"""Operations that a text may have."""


class Changed(Exception):
    """Raised if a text is accepted and means something else than it says."""


class _Late(BaseException):
    pass


def _written(name: str, data: bytes) -> Path:
    Path(name).write_bytes(data)
    return Path(name)


def _bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes of a file in which some are changed, left out, repeated or added."""
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 4, 64, 4096))
        new = rng.choice((b"", rng.randbytes(length), data[at : at + length] * 2, b"\0" * 9))
        data = data[:at] + new + data[at + rng.choice((0, length)) :]
    return data if rng.random() < 0.9 else data[: rng.randrange(len(data) + 1)]


def _text(path: Path, rng: random.Random) -> bytes:
    text = path.read_text(encoding="utf-8")
    for _ in range(rng.choice((1, 1, 2, 4))):
        text = rng.choice(DAMAGES)(text, rng)
    return text.encode(errors="surrogatepass")


def _plain(word: str) -> str:
    """A word without the zeros with which numbers in it begin."""
    return re.sub(r"(?<![0-9])0+(?=[0-9])", "", word.upper())


def _compiled(suffix: str) -> Callable[[int], None]:

    def one(seed: int) -> None:
        kind, data = damaged(seed)
        for more in range(1, 100):
            if kind == suffix:
                break
            kind, data = damaged(seed + more * 10**9)
        source = Source(f"a{kind}", data.decode(errors="replace").removeprefix("\ufeff"))
        compilation = Compilation(Request(source, max_operations=LIMIT), warn=lambda _: None)
        produce(compilation, None)
        if suffix == ".chim":
            # No word of the text is passed over: as printed, it has the same words, but for brackets and signs.
            words = [
                Counter(_plain(t) for t in _tokens(text) if t[0].isalnum())
                for text in (source.text, show(parse(source)))
            ]
            if words[0] != words[1]:
                raise Changed(str((words[0] - words[1]) + (words[1] - words[0])))
        elif suffix == ".csv":
            given = sorted(cell.strip() for cell in source.text.replace("\n", ",").split(",") if cell.strip())
            given = [cell for cell in given if "SHARD" not in cell and "REDUCE" not in cell]  # without effect
            if not any("SEND" in cell or "RECV" in cell for cell in given):
                again = sorted(cell for cell in compilation.torch_csv.replace("\n", ",").split(",") if cell)
                if {_plain(cell) for cell in given} ^ {_plain(cell) for cell in again}:
                    raise Changed(f"{given[:9]} {again[:9]}")

    return one


def _toml(seed: int) -> None:
    rng = random.Random(seed)
    profiles, clusters = (sorted(ROOT.glob(f"docs/examples/*.{kind}.toml")) for kind in ("profile", "cluster"))
    is_profile = rng.random() < 0.6
    profile, cluster = rng.choice(profiles), rng.choice(clusters)
    wrong = _written("wrong.toml", _text(profile if is_profile else cluster, rng))
    read_inputs(wrong if is_profile else profile, cluster if is_profile else wrong, "--{}".format)


_WORDS = (
    *("compile", "compare", "plan", "search", "trace", "view", "explain", "new", "dapple", "chimera", "zb_h1"),
    *("D=2", "N=2", "--set", "--cost", "F=1", "B=2,3", "--emit", "report", "plan", "--out", "o", "--profile"),
    *("p.toml", "--cluster", "c", "--micro-batch-size", "-1", "0", "3", "1e9", "nan", "", "--", "-h", "--help"),
    *("--list", "--json", "-q", "x" * 300, "D", "=", "D=", "=2", "D=99999999999999999999", "D=2=3"),
    *("--max-operations", "--seed", "--tie", "first,last", "0..3", "--slice-lengths", "1,2", "--stage-cost"),
    *("F=1,2", "--recompute", "--offload", "auto", "--sync", "lazy", "CH101", "\x1b[31m", "a\nb", "\udcff"),
    *("\u202e", "../x", "/dev/null", "fifo", ".", "~", "*", "--html", "a.html", "--memory", "activations=2"),
    *("--against", "--library", "--layout", "pipeline", "--split", "0,1", "--copies"),
)


def _command(seed: int) -> None:
    rng = random.Random(seed)
    words = [rng.choice(("compile", "compile", "compare", "plan", "explain", "view", "trace", "new"))]
    words += rng.choices(_WORDS, k=rng.randrange(8))
    if rng.random() < 0.5:
        words[1:1] = ["dapple", "D=2", "N=2", "--emit", "plan"]
    if "--search" not in words:
        _run(group, words)


def _run(command: click.Command, words: list[str]) -> None:
    """Runs a command; raises `CompileError` if it refuses, and `RuntimeError` if it does anything else."""
    out, err, sys.argv = io.StringIO(), io.StringIO(), ["chimera", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = _status(command, "chimera") or 0
    said = err.getvalue()
    if status == OUR_FAULT or "Traceback" in said or not set(said).isdisjoint("\x1b\x07\u202e"):
        raise RuntimeError(f"{status} {words} {said[-400:]}")
    if status:
        raise CompileError(said)


@cache
def _recorded() -> Path:
    """A trace and a bundle of a run of two ranks."""
    from subprocess import run

    folder = Path(tempfile.mkdtemp())
    model = ROOT / "docs" / "examples" / "tiny.py"
    command = [sys.executable, "-m", "chimera_ir.commands", "run", "dapple", "D=2", "N=2", "--model", str(model)]
    command[1:3] = ["-c", "from chimera_ir.commands.group import main; main()"]
    more = ["--steps", "3", "--trace", "tr", "--save", "saved", "--export", "model.pt"]
    run([*command, *more], cwd=folder, check=True, capture_output=True)
    run([*command, "--steps", "2", "--export", "m.safetensors"], cwd=folder, check=True, capture_output=True)
    return folder


def _trace(seed: int) -> None:
    rng, whole = random.Random(seed), _recorded() / "tr"
    folder = Path("tr")
    folder.mkdir(exist_ok=True)
    names = sorted(path.name for path in whole.iterdir() if path.is_file())
    wrong = rng.choice([name for name in names if not name.startswith(".")])
    for name in names:
        data = (whole / name).read_bytes()
        (folder / name).write_bytes(_bytes(data, rng) if name == wrong else data)
    _run(trace_command, ["tr", "--out", "view", "-q"])


def _bundle(seed: int) -> None:
    rng = random.Random(seed)
    record = (
        '{"format": "chimera stop", "version": 1, "rank": %d, "worker": %d, "copies": 1, "layout": "pipeline", '
        '"update": 3, "line": null, "counters": {}, "text": "", "waits_for": [1], "seconds": 3, "message": "late"}'
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("schedule.sir", (_recorded() / "tr" / "schedule.sir").read_bytes())
        for rank in range(2):
            text = (record % (rank, rank)).encode()
            archive.writestr(f"rank_{rank}.json", _bytes(text, rng) if rng.random() < 0.3 else text)
    data = packed.getvalue()
    _run(
        trace_command,
        [str(_written("b.zip", _bytes(data, rng) if rng.random() < 0.7 else data)), "--out", "view", "-q"],
    )


def _checkpoint(seed: int) -> None:
    """A checkpoint of which one file is damaged: no damage is passed over."""
    from chimera_runtime.checkpoint.storage import damage

    rng, folder = random.Random(seed), Path("saved")
    (whole,) = (_recorded() / "saved").glob("update-*3")
    folder.mkdir(exist_ok=True)
    files = sorted(path.name for path in whole.iterdir())
    wrong = rng.choice(files)
    is_same = True
    for name in files:
        data = (whole / name).read_bytes()
        spoilt = _bytes(data, rng) if name == wrong else data
        is_same &= spoilt == data
        (folder / name).write_bytes(spoilt)
    complaint = damage(folder, 0, 1)
    if complaint is not None:
        raise CompileError(complaint)
    if not is_same and wrong != ".hashes.json":
        raise Changed(wrong)


def _weights(seed: int) -> None:
    """A file for ``--load``, of either kind."""
    from chimera_runtime.errors import BadCheckpoint, Misuse
    from chimera_runtime.state.exporting import _opened

    rng = random.Random(seed)
    name = rng.choice(("model.pt", "m.safetensors"))
    wrong = _written(f"wrong{Path(name).suffix}", _bytes((_recorded() / name).read_bytes(), rng))
    try:
        with _opened(wrong, set()) as values:
            for value in values.values():
                value.clone()
    except (BadCheckpoint, Misuse) as error:
        raise CompileError(str(error)) from error


KINDS: dict[str, Callable[[int], None]] = {
    "chim": _compiled(".chim"),
    "sir": _compiled(".sir"),
    "csv": _compiled(".csv"),
    "toml": _toml,
    "commands": _command,
    "trace": _trace,
    "bundle": _bundle,
    "checkpoint": _checkpoint,
    "weights": _weights,
}


def _late(_number: int, _frame: object) -> None:
    raise _Late


def main(kind: str, count: int, first: int = 0) -> int:
    """Tries ``count`` seeds from ``first`` on; prints the counts, and the first of anything else."""
    os.chdir(tempfile.mkdtemp())
    signal.signal(signal.SIGALRM, _late)
    _ = kind in ("trace", "bundle", "checkpoint", "weights") and _recorded()
    counts, started = Counter[str](), time.monotonic()
    for seed in range(first, first + count):
        signal.alarm(SECONDS)
        try:
            KINDS[kind](seed)
            outcome = "accepted"
        except CompileError:
            outcome = "refused"
        except BaseException as error:  # what the fuzz is for
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = "anything else"
            if counts[outcome] < 20:
                print(f"{kind} {seed}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        signal.alarm(0)
        counts[outcome] += 1
    print(f"{kind}: {count} from {first}: {dict(counts)}, {time.monotonic() - started:.0f} s", flush=True)
    return min(counts["anything else"], 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
