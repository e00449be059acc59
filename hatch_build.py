"""The metadata of the package that depend on the repository's address: its links, and those of README.md."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(
    r"""
    (?P<code> ```.*?``` | `[^`\n]+` )
    | (?P<picture> !? ) \[ (?P<text> (?: [^][] | \[ [^][]* \] (?: \([^()]*\) )? )* ) \] \( (?P<path> [^()\s]+ ) \)
    """,
    re.DOTALL | re.VERBOSE,
)


class RepositoryHook(MetadataHookInterface):
    """Fills ``readme`` and ``urls`` in from ``repository`` in pyproject.toml, which is empty while there is none."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds both fields."""
        address = self.config["repository"].rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text, address)}
        places = {"Repository": "", "Documentation": "/tree/main/docs", "Issues": "/issues"}
        metadata["urls"] = {name: f"{address}{place}" for name, place in places.items() if address}


def without_relative_links(text: str, address: str) -> str:
    """A page for a place where the files of the repository are not: links are absolute, or only their text is left."""

    def link(match: re.Match[str]) -> str:
        if match["code"] or re.match(r"[a-z]+:|#", match["path"]):
            return match[0]
        words = without_relative_links(match["text"], address)
        if not address:
            return "" if match["picture"] else words
        return f"{match['picture']}[{words}]({address}/{'raw' if match['picture'] else 'blob'}/main/{match['path']})"

    return _LINK.sub(link, text)
