"""The file in which a rank tells torchrun why it ended; torchrun shows it in its summary."""

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path


def claim_to_speak() -> bool:
    """Whether this rank is the first of its torchrun that asks, by a file beside the directories of the ranks.

    The file stays. Where there are no such directories, or it cannot be made, the first is the rank with the number 0.
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

    torchrun calls the oldest failure the cause, by the second. So the time of what is no cause, but follows from a
    failure elsewhere, is rounded up. A file that cannot be written is no reason to end otherwise.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = time.time()
    details = {"py_callstack": message, "timestamp": str(math.floor(now) if is_cause else math.ceil(now))}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message.split("\n", 1)[0], "extraInfo": details}}, file)
