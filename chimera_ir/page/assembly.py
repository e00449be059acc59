"""One HTML file from a document, the style sheet and the scripts of ``templates/page``.

The document is compressed data, which nothing evaluates; the browser runs the script and takes the style sheet that the
content security policy names by their hashes, and loads nothing.
"""

import gzip
import re
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from chimera_ir.page.tables import PageDocument
from chimera_ir.picture.chart import filled
from chimera_ir.resources import templates

_MAIN = "main.js"
"""The module that a page begins with."""

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
    style, script = _style(_folder()), _script(_folder())
    policy = {
        "default-src": "'none'",
        "script-src": _source(script),
        "style-src": _source(style),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return filled(
        "page/page.html.j2",
        title=document.title,
        policy="; ".join(f"{directive} {source}" for directive, source in policy.items()),
        style=Inlined(style),
        script=Inlined(script),
        data=Inlined(b64encode(gzip.compress(document.as_json().encode(), mtime=0)).decode()),
    )


def _source(text: str) -> str:
    """The hash of an inline text, as a content security policy names it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _folder() -> Path:
    return templates() / "page"


@cache
def _style(folder: Path) -> str:
    return (folder / "page.css").read_text(encoding="utf-8")


@cache
def _script(folder: Path) -> str:
    """All modules that `_MAIN` imports, and it, as one module: each after those that it imports, in one scope."""
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        text = (folder / name).read_text(encoding="utf-8")
        for imported in _IMPORT.findall(text):
            if imported not in texts:
                add(imported)
        texts[name] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(_MAIN)
    return "".join(texts.values())
