"""Messages of the ranks that read an iterable dataset to the others: lengths of mini-batches, the dataset's state."""

import pickle
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.ranks.control_group import ControlGroup
from chimera_runtime.ranks.messages import unrecorded

_FIRST_TAG = 2**30
"""The tag of the first loader's messages; messages of the schedule have smaller tags."""

_AHEAD = 256
"""Messages that may be under way before the reader waits for their receivers."""

Messages = deque[tuple[dist.Work | None, torch.Tensor, int]]
"""Messages under way, each with its memory and its receiver: gloo needs the memory until the message is received."""


class ReaderMessages:
    """Tells all ranks how long an iterable dataset is, which only the ranks that read it know.

    In each copy of the pipelines one of the ``readers``, the workers that read the dataset, sends the length of each
    mini-batch to the ranks that do not read. Every rank makes an object of this class for the loader with the same
    ``number``, and for each mini-batch ranks that read call `send_items`, the others `receive_items`. ``messages`` are
    those of this rank that have not been waited for; they outlive the loader.
    """

    def __init__(self, control_group: ControlGroup, readers: frozenset[int], number: int, messages: Messages) -> None:
        place = control_group.place
        self._control_group = control_group
        self._number = number
        self._tag = _FIRST_TAG + number
        self._sender = min(readers)
        self._receivers = [place.rank_of(place.copy, w) for w in range(place.workers) if w not in readers]
        self._messages = messages
        self._shared = 0

    def send_items(self, items: int) -> None:
        """Sends the number of items of the next mini-batch over all copies; 0 at the end of an epoch.

        Raises `PeerLost` if a receiver is far behind and does not catch up in time, or has ended.
        """
        control = self._control_group
        if control.place.worker != self._sender:
            return
        for rank in self._receivers:
            message, purpose = torch.tensor([items]), "for a rank to hear the length of a mini-batch"
            with control.waiting(purpose, [rank]):
                work = unrecorded(dist.isend, message, control.members[rank], group=control.group, tag=self._tag)
            self._messages.append((work, message, rank))
            if len(self._messages) > _AHEAD:
                work, _, rank = self._messages.popleft()
                control.settle(work, purpose, [rank])

    def receive_items(self) -> int:
        """Returns the number of items that the reader of this copy has sent with `send_items`.

        Raises `PeerLost` if the message does not come in time.
        """
        message, place = torch.zeros(1, dtype=torch.int64), self._control_group.place
        sender = place.rank_of(place.copy, self._sender)
        self._control_group.recv(message, sender, "for the length of a mini-batch", tag=self._tag)
        return int(message)

    def share_state(self, state: Any) -> Any:
        """Returns the state that the dataset has on the reader of the first copy. All ranks must call it.

        Raises `PeerLost` if the state does not come in time.
        """
        control, place = self._control_group, self._control_group.place
        key, sender = f"data/{self._number}/{self._shared}", place.rank_of(0, self._sender)
        self._shared += 1
        if place.rank == sender:
            control.store.set(key, pickle.dumps(state).hex())
            return state
        text = control.wait_for_key(key, sender, "for the state of the dataset").decode()
        return pickle.loads(bytes.fromhex(text))
