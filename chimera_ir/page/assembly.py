"""Writes one HTML file from a document, the style sheet and the scripts of ``templates/page``.

The document is compressed data, which is never run as code. The scripts are compressed as well, comments included; a
short first script, which is not, unpacks them. The content security policy of the page has the hashes of its scripts
and its style sheet, so the browser accepts no others. The page loads nothing from elsewhere.
"""

import re
from base64 import b64encode
from functools import cache
from pathlib import Path

from chimera_ir.page.packing import gzipped, packed
from chimera_ir.page.tables import PageDocument
from chimera_ir.picture.chart import filled
from chimera_ir.picture.inlined import Inlined, policy_source
from chimera_ir.resources import templates

_FIRST, _MAIN = "start.js", "main.js"
"""The module that a page begins with, and the one that it starts when all are unpacked."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|class|const|let)", re.MULTILINE)


def page(document: PageDocument) -> str:
    """The page of a document as HTML; every text of the document is in its compressed data, or escaped."""
    style, first, scripts = _style(_folder()), _script(_folder(), _FIRST), _script(_folder(), _MAIN)
    policy = {
        "default-src": "'none'",
        "script-src": f"{policy_source(first)} {policy_source(scripts)}",
        "style-src": policy_source(style),
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
    """Compresses a text that all pages share, only once, and writes it in base64."""
    return _in_base64(gzipped(text.encode()))


def _in_base64(data: bytes) -> Inlined:
    return Inlined(b64encode(data).decode())


def _folder() -> Path:
    return templates() / "page"


@cache
def _style(folder: Path) -> str:
    return (folder / "page.css").read_text(encoding="utf-8")


@cache
def _script(folder: Path, main: str) -> str:
    """Joins ``main`` and all modules that it imports into one text, which is one scope.

    Each module stands after those that it imports.
    """
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        text = (folder / name).read_text(encoding="utf-8")
        for imported in _IMPORT.findall(text):
            if imported not in texts:
                add(imported)
        texts[name] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(main)
    return "".join(texts.values())
