"""The document of a page, read as its scripts read it, by code that shares nothing with what wrote it."""

import gzip
import json
import re
import struct
from base64 import b64decode
from itertools import accumulate
from typing import Any


def unpacked(data: bytes) -> dict[str, Any]:
    """The content of compressed data: a document, or a part of one."""
    content = gzip.decompress(data)
    end = 4 + int.from_bytes(content[:4], "little")
    columns = content[-(-end // 8) * 8 :]

    def value(read: dict[str, Any]) -> object:
        if read.keys() != {"at", "length", "type", "sums"}:
            return read
        code = {"i1": "b", "i2": "h", "i4": "i", "f8": "d"}[read["type"]]
        numbers = struct.unpack_from(f"<{read['length']}{code}", columns, read["at"])
        return [*accumulate(numbers)] if read["sums"] else [*numbers]

    document: dict[str, Any] = json.loads(content[4:end], object_hook=value)
    return document


def document_in(page: str) -> dict[str, Any]:
    """The document of a page."""
    data = re.search(r'<script type="application/gzip" id="document">([^<]*)</script>', page)
    return unpacked(b64decode(data[1]))
