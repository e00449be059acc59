"""Texts inside a document: written without escapes, and named in its content security policy."""

from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class Inlined:
    """A text that a template writes without escapes: a file of this project, a picture, or base64."""

    text: str

    def __html__(self) -> str:
        return self.text


def policy_source(text: str) -> str:
    """The hash of an inline script or style sheet, as a content security policy names it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
