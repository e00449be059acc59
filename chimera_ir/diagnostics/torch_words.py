"""Rewrites messages about a schedule of torch.distributed.pipelining: lines of IR become cells of the user's file."""

import re

_WORDS = (
    (r"([FBIW]) m(\d+) s(\d+) & ([FBIW]) m(\d+) s(\d+)", r"(\3\1\2;\6\4\5)OVERLAP_F_B"),
    (r"([FBIW]) m(\d+) s(\d+)", r"\3\1\2"),
)
_COMPUTED = [(re.compile(f"`{line}`"), f"`{cell}`") for line, cell in _WORDS]
_MESSAGE = re.compile(r"`(wait )?(send|recv) m(\d+) s(\d+)->s(\d+)[^`]*`")


def as_cells(text: str) -> str:
    """Returns the text with each line of IR in backquotes replaced by the cell for the same action.

    Examples
    --------
    >>> as_cells("rank 0 stands at `wait recv m1 s1->s0`, for `B m1 s0`")
    'rank 0 stands at the wait for `0RECV_B1`, for `0B1`'
    >>> as_cells("no `send m0 s0->s1 to w1`, after `F m0 s0`")
    'no `0SEND_F0`, after `0F0`'
    """
    for line, cell in _COMPUTED:
        text = line.sub(cell, text)
    return _MESSAGE.sub(_cell, text)


def _cell(message: re.Match[str]) -> str:
    wait, verb, micro, start, end = message.groups()
    stage, direction = start if verb == "send" else end, "F" if int(start) < int(end) else "B"
    cell = f"`{stage}{verb.upper()}_{direction}{micro}`"
    return f"the wait for {cell}" if wait else cell
