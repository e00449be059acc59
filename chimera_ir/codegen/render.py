"""The files of an output directory as text: templates filled with the values from `view`."""

from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from chimera_ir.codegen.view import job_view, rank_view
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Program
from chimera_ir.resources import templates
from chimera_ir.verify.verify import Verified


def scripts(verified: Verified) -> dict[str, str]:
    """The Python files that run a verified program, by path relative to the output directory.

    Each file needs only files before it: the runtime comes first, ``train.py`` last. A digest of the whole program and
    the runtime is in ``train.py`` and in every rank's script; by it ranks check that they all run the same program.
    """
    program: Program = verified.program
    environment = Environment(
        loader=FileSystemLoader(templates()), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    train = environment.get_template("train.py.j2")
    script = environment.get_template("stream.py.j2" if program.header.asynchronous else "rank.py.j2")
    job, ranks = job_view(program), [rank_view(verified, Worker(worker)) for worker in range(program.header.workers)]
    runtime = _verbatim()
    made_from = (
        job,
        ranks,
        runtime,
        [Path(str(template.filename)).read_text(encoding="utf-8") for template in (train, script)],
    )
    digest = sha256(repr(made_from).encode()).hexdigest()[:16]
    return {
        **runtime,
        **{f"rank_{rank.worker}.py": script.render(rank=rank, digest=digest) for rank in ranks},
        "train.py": train.render(job=job, digest=digest),
    }


def _verbatim() -> dict[str, str]:
    """The runtime and its support files, which are the same for every program."""
    folder = templates()
    paths = [folder / "runtime.py", *sorted((folder / "support").glob("*.py"))]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}
