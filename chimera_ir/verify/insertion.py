"""Shows that further turns may be put into the lanes of a proven program, its window, in any number.

The turn between two places of each lane, its cuts, comes again and again, each time on later micro-batches. By
induction the longer program obeys every rule that the window obeys, if four things hold:

- *The state repeats.* What the lane has done for micro-batches that it has not finished is the same at both cuts, one
  turn later: the same lines, with receives in the slots that come a turn later. All that the rules know of a lane
  follows from this: what is posted and not waited for, values kept, contents of slots, gradients added. So each further
  turn begins in the state in which the turn before it began, and so does what follows the last.
- *Micro-batches come in order.* Each lane has begun the first ones of each pipe, without gaps, and as many more at the
  second cut as a turn takes. So every micro-batch gets its lines once.
- *Links repeat.* Of the messages between two workers, those that only one of them has posted before its cut are the
  same at both cuts, one turn later. So the orders in which the two post messages agree if they do in the window.
- *Lanes move together.* Played up to the first cuts, and up to the second ones, all lanes come exactly one turn
  further. Posting never blocks and no event is undone, so the next turn does the same.

Sums and steps come after the turns.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import Instruction, Message, Micro, Recv, Send, Slot
from chimera_ir.ir.rolled import Insertion, SlotsLater, micros_of
from chimera_ir.ir.turns import Shelf, renumbered, shelf
from chimera_ir.verify.messages import replay

Cuts = Sequence[tuple[int, int]]

_Local = Mapping[Micro, tuple[int, int]]
"""The pipe of each micro-batch and its place in the pipe."""


def insertion(window: Program, header: Header, count: int, step: int, cuts: Cuts) -> Insertion | None:
    """Where ``count`` further turns go into a program, so that it becomes one for ``header`` if it is proven itself.

    ``cuts`` are the places in its lanes between which a turn lies that takes ``step`` micro-batches of each pipe. The
    result is None if it does not follow that the longer program obeys the rules.
    """
    local = {
        m: (number, place) for number, pipe in enumerate(window.header.pipes) for place, m in enumerate(pipe.micros)
    }
    slots: list[SlotsLater] = []
    for lane, parts, (start, end) in zip(window.lanes, window.parts, cuts, strict=True):
        of_lane = _slots([*parts.recvs], (start, end))
        if of_lane is None or any(place < end for place in parts.updates.places):
            return None
        if not _state_repeats(lane, (start, end), step, local, of_lane, len(window.header.pipes)):
            return None
        slots.append(of_lane)
    if not _links_repeat(window, cuts, step, local) or not _move_together(window, cuts):
        return None
    return Insertion(header, count, step, tuple(cuts), tuple(slots))


def _slots(receives: Sequence[tuple[int, Recv]], cuts: tuple[int, int]) -> SlotsLater | None:
    """For each shelf of a lane, the slot that takes the place of each slot one turn later; None if some have none.

    ``receives`` are those of the lane, with their places.
    """
    slots: dict[Shelf, list[tuple[int, Slot]]] = defaultdict(list)
    for place, receive in receives:
        slots[shelf(receive.message)].append((place, receive.slot))
    later: dict[Shelf, Mapping[Slot, Slot]] = {}
    for key, used in slots.items():
        of_turn = sum(1 for place, _ in used if cuts[0] <= place < cuts[1])
        every = {slot for _, slot in used}
        # Where the warm-up takes slots otherwise, those from the first cut on show how they are taken.
        for since in (0, cuts[0]):
            steady = [slot for place, slot in used if place >= since]
            pairs = {*zip(steady, steady[of_turn:], strict=False)}
            if len(pairs) == len(every) and dict(pairs).keys() == every == {*dict(pairs).values()}:
                later[key] = dict(pairs)
                break
        else:
            return None
    return later


def _state_repeats(
    lane: Sequence[Instruction],
    cuts: tuple[int, int],
    step: int,
    local: _Local,
    slots: SlotsLater,
    pipes: int,
) -> bool:
    totals = Counter(micro for line in lane for micro in micros_of(line))
    begun: list[list[int]] = []
    states: list[set[Hashable]] = []
    for turns, cut in enumerate(cuts):
        done = Counter(micro for line in lane[:cut] for micro in micros_of(line))
        unfinished = {micro for micro, count in done.items() if count < totals[micro]}
        of_pipe = Counter(local[micro][0] for micro in done)
        if any(local[micro][1] >= of_pipe[local[micro][0]] for micro in done):
            return False  # a micro-batch has begun before an earlier one of its pipe
        begun.append([of_pipe[pipe] for pipe in range(pipes)])
        open_lines = (line for line in lane[:cut] if not unfinished.isdisjoint(micros_of(line)))
        states.append({_moved_on(line, 1 - turns, step, local, slots) for line in open_lines})
    return [count + step for count in begun[0]] == begun[1] and states[0] == states[1]


def _moved_on(line: Instruction, turns: int, step: int, local: _Local, slots: SlotsLater) -> Hashable:
    """An instruction as it stands no turn, or one turn, later: with places in pipes instead of micro-batches."""
    places = tuple([(local[micro][0], local[micro][1] + turns * step) for micro in micros_of(line)])
    other = renumbered(line, lambda group: (Micro(0),) * len(group))
    if isinstance(other, Recv) and turns:
        return places, replace(other, slot=slots[shelf(other.message)][other.slot])
    return places, other


def _links_repeat(window: Program, cuts: Cuts, step: int, local: _Local) -> bool:
    """Whether the messages that only one of two workers has posted at its cut repeat, in each direction and in both."""
    posts: dict[tuple[int, int, bool | None], list[tuple[int, Message]]] = defaultdict(list)
    for worker, lane in enumerate(window.lanes):
        for place, line in enumerate(lane):
            if isinstance(line, Send | Recv):
                peer: int = line.to if isinstance(line, Send) else line.source
                for direction in (None, isinstance(line, Send)):
                    posts[worker, peer, direction].append((place, line.message))
    for (worker, peer, sends), mine in posts.items():
        theirs = posts[peer, worker, None if sends is None else not sends]
        ahead = []
        for turns in (0, 1):
            ours, others = (
                [message for place, message in listed if place < cuts[number][turns]]
                for listed, number in ((mine, worker), (theirs, peer))
            )
            longer, shorter = (ours, others) if len(ours) >= len(others) else (others, ours)
            rest = [
                (*message.edge, [(local[m][0], local[m][1] - turns * step) for m in message.micros])
                for message in longer[len(shorter) :]
            ]
            ahead.append((len(ours) - len(others), rest))
        if ahead[0] != ahead[1]:
            return False
    return True


def _move_together(window: Program, cuts: Cuts) -> bool:
    before, after = (replay(window, [ends[turn] for ends in cuts]).places for turn in (0, 1))
    return all(there - here == end - start for here, there, (start, end) in zip(before, after, cuts, strict=True))
