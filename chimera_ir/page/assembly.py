"""One HTML file from a document, the style sheet and the scripts of ``templates/page``.

The document is compressed data, which nothing evaluates. The scripts are compressed as well, with their comments: a
first short one unpacks them. The browser runs scripts and takes the style sheet that the content security policy names
by their hashes, and loads nothing.
"""

import gzip
import re
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from chimera_ir.page.packing import packed
from chimera_ir.page.tables import PageDocument
from chimera_ir.picture.chart import filled
from chimera_ir.resources import templates

_FIRST, _MAIN = "start.js", "main.js"
"""The module that a page begins with, and the one that it starts when all are unpacked."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|class|const|let)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Inlined:
    """A text that a template writes without escapes: a file of this project, or base64."""

    text: str

    def __html__(self) -> str:
        return self.text


def page(document: PageDocument) -> str:
    """The page of a document as HTML; every text of the document is in its compressed data, or escaped."""
    style, first, scripts = _style(_folder()), _script(_folder(), _FIRST), _script(_folder(), _MAIN)
    policy = {
        "default-src": "'none'",
        "script-src": f"{_source(first)} {_source(scripts)}",
        "style-src": _source(style),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return filled(
        "page/page.html.j2",
        title=document.title,
        policy="; ".join(f"{directive} {source}" for directive, source in policy.items()),
        style=Inlined(style),
        first=Inlined(first),
        scripts=_compressed(scripts),
        data=_in_base64(packed(document)),
    )


@cache
def _compressed(text: str) -> Inlined:
    """A text that is the same in all pages."""
    return _in_base64(gzip.compress(text.encode(), mtime=0))


def _in_base64(data: bytes) -> Inlined:
    return Inlined(b64encode(data).decode())


def _source(text: str) -> str:
    """The hash of an inline text, as a content security policy names it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _folder() -> Path:
    return templates() / "page"


@cache
def _style(folder: Path) -> str:
    return (folder / "page.css").read_text(encoding="utf-8")


@cache
def _script(folder: Path, main: str) -> str:
    """All modules that ``main`` imports, and it, as one module: each after those that it imports, in one scope."""
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        text = (folder / name).read_text(encoding="utf-8")
        for imported in _IMPORT.findall(text):
            if imported not in texts:
                add(imported)
        texts[name] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(main)
    return "".join(texts.values())
