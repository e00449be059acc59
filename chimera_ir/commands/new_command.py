"""``chimera new``: a model file, a training loop or a scheme to begin with."""

import re
from pathlib import Path

import click

from chimera_ir import source
from chimera_ir.commands.common import FILE, SectionedCommand, WrongCommand, general, report
from chimera_ir.escapes import as_argument, command_line, visible
from chimera_ir.syntax.mistakes import KEYWORDS

_LOOP, _MODEL, _SCHEME = "loop.py", "model.py", "mine.chim"


@click.command(cls=SectionedCommand, sections={})
@click.argument("file", type=FILE, metavar="FILE")
@general
def new_command(file: Path) -> None:
    """Write a file to begin with, commented and ready to run.

    FILE ends in .py for a model, as in model.py, or in .chim for a scheme, as in mine.chim. The name loop.py gives a
    training loop of your own, for the model file beside it. A file that exists is never overwritten.
    """
    template = _template(file)
    text = (source.templates() / "new" / template).read_text(encoding="utf-8")
    if re.fullmatch(r"[\w.-]+", file.name):
        text = text.replace(template, file.name)
    if template == _SCHEME:
        text = text.replace("scheme mine(", f"scheme {_identifier(file.stem)}(")
    try:
        with file.open("x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise WrongCommand(f"{file} exists already, and is not overwritten; choose another name") from error
    except OSError as error:
        raise WrongCommand(f"{file}: {error.strerror}") from error
    report(f"wrote {visible(str(file))}; try it with\n  {_trial(template, file)}\n")


def _template(file: Path) -> str:
    match file.suffix:
        case ".chim":
            return _SCHEME
        case ".py":
            return _LOOP if file.name == _LOOP else _MODEL
        case _:
            raise WrongCommand(f"{file}: a model ends in .py, a scheme in .chim; loop.py is a training loop")


def _identifier(stem: str) -> str:
    name = re.sub(r"\W", "_", stem, flags=re.ASCII)
    return f"{name}_" if name in KEYWORDS else name if re.match(r"[A-Za-z_]", name) else f"_{name}"


def _trial(template: str, file: Path) -> str:
    path = command_line((as_argument(str(file)),))
    lines = {
        _SCHEME: f"chimera compile {path}",
        _LOOP: f"chimera compile chimera && torchrun --nproc-per-node=4 {path}",
        _MODEL: f"chimera run chimera --micro-batch-size 8 --model {path}",
    }
    return lines[template]
