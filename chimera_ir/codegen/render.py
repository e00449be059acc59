"""The files of an output directory, as text: templates filled with what `view` computed."""

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

    Each relies on those before it: the runtime comes first, ``train.py`` last. ``train.py`` and the ranks' scripts hold
    one digest of everything that they and the runtime are made from, by which ranks know that they run one program.
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
    """The runtime and what surrounds it, which is the same for every program."""
    folder = templates()
    paths = [folder / "runtime.py", *sorted((folder / "support").glob("*.py"))]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}
