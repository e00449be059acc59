"""The setting of CUDA that decides whether messages, sums and computation can proceed side by side."""

import os

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT = 8
"""Hardware queues of a device, to which CUDA gives its streams."""


def few_queues(backend: str, device_type: str) -> list[str]:
    """What the user should know of the hardware queues, if there are fewer than by default and messages need them.

    With gloo nothing on the device waits for another rank. With other backends a receive that is posted ahead may hold
    up what is behind it in its queue, and with it the send that it waits for.
    """
    text = os.environ.get(VARIABLE, "")
    if backend == "gloo" or device_type != "cuda" or not text.isdecimal() or int(text) >= DEFAULT:
        return []
    return [
        f"{VARIABLE} is {text}: with fewer than {DEFAULT} queues a message that is received ahead may hold up the "
        f"computation that it waits for, and programs may hang until the timeout; unset {VARIABLE}, or set it to "
        f"{DEFAULT} or more"
    ]
