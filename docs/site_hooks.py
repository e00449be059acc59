"""Hooks of MkDocs: docs/README.md is the navigation, and a link to a file leads to a page that shows it.

The second makes ``[the model](../../examples/gpt.py)`` work in the repository and in the site alike, also offline.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pygments.lexers import find_lexer_class_for_filename

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SHOWN = "files"
"""Folder of the site with a page for each file that is linked and is not a page itself."""

_ENTRY = re.compile(r"^## (?P<group>.+)|^- \[(?P<title>[^]]+)\]\((?P<page>[^)#:]+\.md)\)", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()[^()#\s:]+(?=[)#])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Makes the index the navigation."""
    config.nav = navigation((DOCS / "README.md").read_text(encoding="utf-8"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file that is linked from a page, and for those linked from these."""
    waiting = [_origin(file.src_uri) for file in files.documentation_pages()]
    known = set(waiting)
    for path in waiting:  # grows
        for target in _linked(path):
            if target not in known:
                known.add(target)
                waiting.append(target)
                content = "---\nsearch:\n  exclude: true\n---\n\n" + _shown(target)
                uri = _uri(target)
                files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page, with its links to files as links to the pages that show them."""
    path = _origin(page.file.src_uri)
    page.meta["hide"] = ["navigation"] if page.is_homepage else []
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = _target(path, match[0])
        return posixpath.relpath(_uri(target), folder) if target.exists() else match[0]

    return _LINK.sub(link, markdown)


def navigation(index: str) -> list[dict[str, object]]:
    """The navigation of MkDocs: a heading is a group, a line that begins with a link is a page.

    The README of a folder stands for all pages of the folder.
    """
    groups: list[dict[str, object]] = [{"Home": "README.md"}]
    for entry in _ENTRY.finditer(index):
        title = (entry["title"] or "").replace("`", "")
        if entry["group"]:
            pages: list[dict[str, object]] = []
            groups.append({entry["group"]: pages})
        elif entry["page"].endswith("/README.md"):
            folder = (DOCS / entry["page"]).parent
            others = [path for path in sorted(folder.glob("*.md")) if path.name != "README.md"]
            names = [{path.stem: path.relative_to(DOCS).as_posix()} for path in others]
            pages.append({title: [entry["page"], *names]})
        else:
            pages.append({title: entry["page"]})
    return [group for group in groups if all(group.values())]


def _linked(path: Path) -> Iterator[Path]:
    """The files that are linked from a page, or lie in a folder, and are neither pages nor pictures of the site."""
    if path.is_dir():
        targets = _files_in(path)
    elif path.suffix == ".md":
        targets = [_target(path, link) for link in _LINK.findall(path.read_text(encoding="utf-8"))]
    else:
        return
    yield from (target for target in targets if target.exists() and not _is_in_docs(target))


def _files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]


def _shown(path: Path) -> str:
    """A file or folder as a page."""
    title = f"# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        return title + "\n".join(f"- [{file.name}]({file.name})" for file in _files_in(path))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    lexer = find_lexer_class_for_filename(path.name)
    return f"{title}`````{lexer.aliases[0] if lexer else 'text'}\n{text}\n`````\n"


def _is_in_docs(path: Path) -> bool:
    return path.is_relative_to(DOCS) and path.suffix in (".md", ".svg")


def _uri(path: Path) -> str:
    """The name by which MkDocs knows a page."""
    if _is_in_docs(path):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"{SHOWN}/{name}" if path.suffix == ".md" else f"{SHOWN}/{name}/README.md"


def _origin(uri: str) -> Path:
    """The file or folder that a page shows."""
    if not uri.startswith(f"{SHOWN}/"):
        return DOCS / uri
    return ROOT / uri.removeprefix(f"{SHOWN}/").removesuffix("/README.md")


def _target(path: Path, link: str) -> Path:
    """What a link in a file or folder leads to."""
    return ((path if path.is_dir() else path.parent) / link).resolve()
