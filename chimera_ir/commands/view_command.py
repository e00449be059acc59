"""``chimera view``: the page of a compiled directory, or of a recorded run, in a browser."""

import os
import sys
import webbrowser
from pathlib import Path

import click

from chimera_ir.commands.common import GivenPath, SectionedCommand, WrongCommand, general, report, write
from chimera_ir.escapes import visible

PICTURES = ("trace.html", "view/trace.html", "schedule.html", "timeline.svg")
"""Files to open, of which the first that exists is taken: the page of a recorded run, or the picture of a schedule."""

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Environment variables of which one is set where a browser can show something."""


@click.command(cls=SectionedCommand, sections={})
@click.argument("directory", metavar="DIR", type=GivenPath(file_okay=False, path_type=Path))
@general
def view_command(directory: Path) -> None:
    """Open the picture of DIR in a browser: what a compilation drew, or the page of a recorded run.

    Where no browser can be opened, as on a remote machine, the path of the picture is printed.
    """
    picture = next((directory / name for name in PICTURES if (directory / name).is_file()), None)
    if picture is None:
        raise WrongCommand(f"{directory}: {_reason(directory)}")
    has_display = sys.platform in ("darwin", "win32") or any(map(os.environ.get, _DISPLAYS))
    if has_display and webbrowser.open(picture.resolve().as_uri()):
        report(f"opened {visible(str(picture))}\n")
    else:
        write(f"{visible(str(picture))}\n")


def _reason(directory: Path) -> str:
    output = Path(f"{directory}.out")
    if output.is_dir():
        return f"a directory is asked for, such as {output}"
    if not directory.is_dir():
        return "no such directory; chimera compile writes one, SCHEME.out by default"
    return f"there is no picture in it: neither {' nor '.join(PICTURES)}"
