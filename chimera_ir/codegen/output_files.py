"""Makes the files of an output directory as text: templates filled from `view`, and program.json from `facts`."""

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from chimera_ir.codegen.facts import INTERFACE, facts, show
from chimera_ir.codegen.view import rank_view
from chimera_ir.ir.ids import Worker
from chimera_ir.plural import counted
from chimera_ir.resources import runtime, templates
from chimera_ir.verify.verify import Verified


def scripts(verified: Verified, evaluation: Verified) -> dict[str, str]:
    """The files that run a verified program and its evaluation, by path relative to the output directory.

    Each file needs only files before it: the runtime comes first, ``train.py`` last. ``program.json``, ``train.py`` and
    every rank's script have a digest of the program and the runtime, with which ranks check that all run the same.
    """
    header = verified.program.header
    environment = _environment(templates())
    train = environment.get_template("train.py.j2")
    script = environment.get_template("stream.py.j2" if header.period else "rank.py.j2")
    evaluate = environment.get_template("evaluate.py.j2")
    ranks = [rank_view(verified, evaluation, Worker(worker)) for worker in range(header.workers)]
    content, package = facts(verified, evaluation), _package(runtime())
    # Whatever decides the files decides the digest, which therefore cannot be computed from the files themselves.
    made_from = (
        content,
        ranks,
        package.digest,
        [Path(str(template.filename)).read_text(encoding="utf-8") for template in (train, script, evaluate)],
    )
    digest = sha256(repr(made_from).encode()).hexdigest()[:16]
    return {
        **package.files,
        "program.json": show({"interface": content.pop("interface"), "program": digest, **content}),
        **{
            f"rank_{rank.worker}.py": script.render(rank=rank, interface=INTERFACE, digest=digest)
            + evaluate.render(rank=rank)
            for rank in ranks
        },
        "train.py": train.render(header=header, workers=counted(header.workers, "worker"), digest=digest),
    }


@cache
def _environment(folder: Path) -> Environment:
    """The Jinja environment of a folder of templates, each compiled at its first use and after its file has changed."""
    return Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )


class _Package(NamedTuple):
    """The files of chimera_runtime by their path in an output directory, and the digest of all of them."""

    files: Mapping[str, str]
    digest: str


@cache
def _package(folder: Path) -> _Package:
    """Returns the package in a folder as the process first read it; ``__init__.py`` files come first."""
    paths = sorted(folder.rglob("*.py"), key=lambda path: (path.name != "__init__.py", path))
    files = {path.relative_to(folder.parent).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return _Package(files, sha256(repr(files).encode()).hexdigest())
