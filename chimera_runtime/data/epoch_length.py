"""What ranks that read nothing of a stream are told: how long it is, and its state."""

import pickle
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.ranks.messages import unrecorded
from chimera_runtime.ranks.world import World

_FIRST_TAG = 2**30
"""Of gloo's messages those of the schedule have smaller ones."""

_AHEAD = 256
"""Messages that a reader may be ahead of those that hear them."""

Messages = deque[tuple[dist.Work | None, torch.Tensor, int]]
"""Messages, and the ranks that they are for; gloo needs them until they have been heard."""


class EpochLength:
    """From a reader of each copy to the ranks of the copy that read nothing, and to all from the first copy's.

    Every rank makes one for the same loader, and all ranks of a copy then call `send_items` or `receive_items` equally
    often.

    Parameters
    ----------
    readers
        The workers that read, one at least.
    number
        Of the loader: messages of several do not mix.
    messages
        Those of this rank that have not been waited for; they outlive the loader.
    """

    def __init__(self, world: World, readers: frozenset[int], number: int, messages: Messages) -> None:
        place = world.place
        self._world = world
        self._number = number
        self._speaker = min(readers)
        self._listeners = [place.rank_of(place.copy, w) for w in range(place.workers) if w not in readers]
        self._messages = messages
        self._shared = 0

    def send_items(self, items: int) -> None:
        """The next mini-batch has so many items over all copies; none if the stream is at its end.

        Raises
        ------
        PeerLost
            If a rank that is to hear it is far behind, and does not catch up in time, or has ended.
        """
        place = self._world.place
        if place.worker != self._speaker:
            return
        for rank in self._listeners:
            message, what = torch.tensor([items]), "for a rank to hear the length of a mini-batch"
            with self._world.control_group.waiting(what, [rank]):
                work = unrecorded(
                    dist.isend,
                    message,
                    self._world.control_group.members[rank],
                    group=self._world.control_group.group,
                    tag=self._tag,
                )
            self._messages.append((work, message, rank))
            if len(self._messages) > _AHEAD:
                work, _, rank = self._messages.popleft()
                self._world.control_group.settle(work, what, [rank])

    def receive_items(self) -> int:
        """What the reader of this copy tells.

        Raises
        ------
        PeerLost
            If it does not, in time.
        """
        message, place = torch.zeros(1, dtype=torch.int64), self._world.place
        speaker = place.rank_of(place.copy, self._speaker)
        what = "for the length of a mini-batch"
        with self._world.control_group.waiting(what, [speaker]):
            work = dist.irecv(
                message,
                self._world.control_group.members[speaker],
                group=self._world.control_group.group,
                tag=self._tag,
            )
        self._world.control_group.settle(work, what, [speaker])
        return int(message)

    def share_state(self, state: Any) -> Any:
        """On every rank what the first copy's reader has; all ranks call it.

        Raises
        ------
        PeerLost
            If it does not say so in time.
        """
        world, place = self._world, self._world.place
        key, speaker = f"data/{self._number}/{self._shared}", place.rank_of(0, self._speaker)
        self._shared += 1
        if place.rank == speaker:
            world.control_group.store.set(key, pickle.dumps(state).hex())
            return state
        text = world.control_group.wait_for_key(key, speaker, "for the state of the dataset").decode()
        return pickle.loads(bytes.fromhex(text))

    @property
    def _tag(self) -> int:
        return _FIRST_TAG + self._number
