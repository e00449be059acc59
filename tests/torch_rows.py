"""An independent reading of torch's text for a schedule: it shares no code with `chimera_ir`.

Messages carry no tag: they are matched first in, first out, for each directed pair of ranks. Posting never blocks; an
operation waits for its receives, and a wait for a send until it is received. A file is right if every micro-batch meets
every stage once in each direction, if every message is made, sent, received and read once, and if every rank reaches
the end of its row.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import product

Action = tuple[int, str, int]
"""A stage, a kind, a micro-batch; -1 for none."""

Row = Sequence[str | None]


def _actions(cell: str) -> list[Action]:
    """The actions of a cell; a pair has two."""
    found = [re.fullmatch(r"(\d+)([A-Z_]+?)(\d*)", part) for part in re.sub(r"[()]|OVERLAP_F_B", "", cell).split(";")]
    return [(int(match[1]), match[2], int(match[3] or -1)) for match in found if match]


class Reading:
    """A file, read once: ``wrong`` says what is wrong with it, empty if nothing is."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [[_actions(cell) for cell in row if cell] for row in rows]
        every = [(rank, action) for rank, row in enumerate(self.rows) for cell in row for action in cell]
        computed = [(rank, action) for rank, action in every if action[1] in ("F", "B", "I", "W")]
        self.messages = [(rank, action) for rank, action in every if action[1][:5] in ("SEND_", "RECV_")]
        self.ranks = {stage: rank for rank, (stage, _, _) in computed}
        self.stages, self.micros = 1 + max(self.ranks), 1 + max(micro for _, (_, _, micro) in computed)
        self.done = {action for _, action in computed}
        self.wrong = self._incomplete(computed) or (self._stray() if self.messages else "") or self._stuck()

    def _incomplete(self, computed: Sequence[tuple[int, Action]]) -> str:
        if {rank for rank, _ in computed} != {*range(len(self.rows))}:
            return "a rank without a stage"
        if any(self.ranks[stage] != rank for rank, (stage, _, _) in computed):
            return "a stage on two ranks"
        kinds: dict[tuple[int, int], list[str]] = defaultdict(list)
        for _, (stage, kind, micro) in computed:
            kinds[stage, micro].append(kind)
        for cell in product(range(self.stages), range(self.micros)):
            if sorted(kinds[cell]) not in (["B", "F"], ["F", "I", "W"]):
                return f"stage and micro-batch {cell} have {kinds[cell]}"
        return ""

    def _stray(self) -> str:
        """A message too many, or one that is missing."""
        wanted: set[tuple[int, Action]] = set()
        for stage, micro in product(range(self.stages - 1), range(self.micros)):
            if self.ranks[stage] != self.ranks[stage + 1]:
                for near, far, letter in ((stage, stage + 1, "F"), (stage + 1, stage, "B")):
                    wanted |= {(self.ranks[near], (near, f"SEND_{letter}", micro))}
                    wanted |= {(self.ranks[far], (far, f"RECV_{letter}", micro))}
        for row in self.rows:
            actions = [action for cell in row for action in cell]
            waits = Counter((stage, kind[5:], micro) for stage, kind, micro in actions if kind.startswith("WAIT_SEND"))
            if waits and waits != Counter(action for action in actions if action[1].startswith("SEND")):
                return "a send without its wait, or a wait without its send"
            turns = [(stage, kind) for stage, kind, _ in actions if kind.endswith("REDUCE_GRAD")]
            pairs = [(stage, word) for stage, _ in turns[::2] for word in ("REDUCE_GRAD", "WAIT_REDUCE_GRAD")]
            if any(kind == "WAIT_REDUCE_GRAD" for _, kind in turns) and turns != pairs:
                return "reductions that are not in turn"
        odd = Counter(self.messages)
        odd.subtract(wanted)
        return "".join(f"{number:+} {action} on rank {rank} " for (rank, action), number in odd.items() if number)

    def _stuck(self) -> str:
        """Runs the rows for as long as any of them can go on."""
        places, ran = [0] * len(self.rows), set[Action]()
        queues: dict[tuple[int, int], tuple[deque[Action], deque[Action]]] = defaultdict(lambda: (deque(), deque()))
        arrived: set[Action] = set()
        going = True
        while going:
            going = False
            for rank, row in enumerate(self.rows):
                while places[rank] < len(row):
                    cell = row[places[rank]]
                    if not all(self._ready(action, ran, arrived) for action in cell):
                        break
                    for stage, kind, micro in cell:
                        if kind[:5] in ("SEND_", "RECV_"):
                            towards = 1 if kind.endswith("F") == kind.startswith("SEND") else -1
                            peer = self.ranks[stage + towards]
                            sends = kind.startswith("SEND")
                            queues[(rank, peer) if sends else (peer, rank)][not sends].append((stage, kind, micro))
                    ran |= {*cell}
                    places[rank] += 1
                    going = True
            for sent, posted in queues.values():
                while sent and posted:
                    (stage, kind, micro), receive = sent.popleft(), posted.popleft()
                    if receive != (stage + (1 if kind.endswith("F") else -1), kind.replace("SEND", "RECV"), micro):
                        return f"{receive} gets {(stage, kind, micro)}"
                    arrived.add(receive)
                    going = True
        stopped = [rank for rank, place in enumerate(places) if place < len(self.rows[rank])]
        return f"ranks {stopped} stop" if stopped else ""

    def _ready(self, action: Action, ran: set[Action], arrived: set[Action]) -> bool:
        stage, kind, micro = action
        backward = ("B", "I")
        match kind:
            case "F" if stage == 0:
                return True
            case "F":
                return (stage - 1, "F", micro) in ran and self._arrived((stage, "RECV_F", micro), stage - 1, arrived)
            case "B" | "I" if stage == self.stages - 1:
                return (stage, "F", micro) in ran
            case "B" | "I":
                made = any((stage + 1, letter, micro) in ran for letter in backward)
                here = (stage, "F", micro) in ran
                return made and here and self._arrived((stage, "RECV_B", micro), stage + 1, arrived)
            case "W":
                return (stage, "I", micro) in ran
            case "WAIT_SEND_F":
                return (stage + 1, "RECV_F", micro) in arrived
            case "WAIT_SEND_B":
                return (stage - 1, "RECV_B", micro) in arrived
            case "SEND_F":
                return (stage, "F", micro) in ran
            case "SEND_B":
                return any((stage, letter, micro) in ran for letter in backward)
            case _:
                return True

    def _arrived(self, receive: Action, maker: int, arrived: set[Action]) -> bool:
        """Whether a value of another stage is on the rank; without messages it is wherever it was made."""
        return not self.messages or self.ranks[maker] == self.ranks[receive[0]] or receive in arrived
