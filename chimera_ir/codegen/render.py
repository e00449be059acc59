"""The files of an output directory, as text: templates filled with what `view` computed."""

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from chimera_ir.codegen.view import job_view, rank_view
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Program
from chimera_ir.resources import templates
from chimera_ir.verify.verify import Verified


def scripts(verified: Verified) -> dict[str, str]:
    """The Python files that run a verified program, by path relative to the output directory."""
    program: Program = verified.program
    environment = Environment(
        loader=FileSystemLoader(templates()), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    files = {"train.py": environment.get_template("train.py.j2").render(job=job_view(program))}
    rank = environment.get_template("stream.py.j2" if program.header.asynchronous else "rank.py.j2")
    for worker in range(program.header.workers):
        files[f"rank_{worker}.py"] = rank.render(rank=rank_view(verified, Worker(worker)))
    return files | _verbatim()


def _verbatim() -> dict[str, str]:
    """The runtime and what surrounds it, which is the same for every program."""
    folder = templates()
    found = [folder / "runtime.py", *sorted((folder / "support").glob("*.py"))]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in found}
