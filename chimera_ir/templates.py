"""Templates of the files that are written. The code that Jinja makes of them is kept in ``__pycache__``."""

from functools import cache
from io import BytesIO
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket

from chimera_ir.escapes import visible_lines
from chimera_ir.source import keep, kept


class _KeptCode(jinja2.BytecodeCache):
    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        return filename or name

    def load_bytecode(self, bucket: Bucket) -> None:
        if (code := kept(Path(bucket.key), _facts(bucket))) is not None:
            bucket.load_bytecode(BytesIO(code))

    def dump_bytecode(self, bucket: Bucket) -> None:
        keep(Path(bucket.key), _facts(bucket), bucket.bytecode_to_string())


def _facts(bucket: Bucket) -> str:
    """Everything on which the code of a template depends: the checksum is that of its text."""
    return f"jinja2 {jinja2.__version__}, markup: {bucket.environment.autoescape}, {bucket.checksum}"


@cache
def text(folder: Path) -> jinja2.Environment:
    """The templates of a folder that write texts, such as scripts, from values as they are."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
        bytecode_cache=_KeptCode(),
    )


@cache
def markup(folder: Path) -> jinja2.Environment:
    """The templates of a folder that write SVG or HTML: values are escaped, also characters that XML does not allow."""
    return text(folder).overlay(
        autoescape=True,
        finalize=lambda value: visible_lines(value) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
