"""File in which a rank writes for torchrun why it ended; torchrun shows the text in its summary."""

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path


def claim_to_speak() -> bool:
    """Returns True on the first rank of a torchrun that calls this: that rank is to print the message.

    The first rank makes a file next to the directories of the ranks. If it cannot, local rank 0 gets True.
    """
    rank = os.environ.get("LOCAL_RANK", "0")
    place = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent
    if place.name == rank:
        try:
            os.close(os.open(place.with_name("spoken"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:
            return rank == "0"
        return True
    return rank == "0"


def record(message: str, is_cause: bool) -> None:
    """Writes a message as ``torch.distributed.elastic.multiprocessing.errors.record`` writes an exception.

    torchrun calls the oldest failure the cause, and its times are whole seconds. So the time of a failure that follows
    from another one (not ``is_cause``) is rounded up. If the file cannot be written, nothing happens.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = time.time()
    details = {"py_callstack": message, "timestamp": str(math.floor(now) if is_cause else math.ceil(now))}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message.split("\n", 1)[0], "extraInfo": details}}, file)
