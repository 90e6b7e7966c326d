"""Who runs next: admission by slots, pages and predicted lateness; prompts in bounded blocks; frames by who needs them first.

Plain Python, no torch; used by one thread. It decides and keeps the books; the engine computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

from duetts.engine.pace import Pace
from duetts.engine.pages import PAGE, Block, PagePool, cut_blocks, pages_for
from duetts.engine.playout import COMFORT_S, NEED_S
from duetts.engine.sequence import Sequence
from duetts.types import Utterance

BRISK = 0.5  # of a frame's duration: with turns no longer than that every listener gains
OPENING_FRAMES = 4  # a new stream goes first until it has so many frames
MAX_DISPLACED = 2  # how often a complete answer may lose its place to a listener
PATIENCE_S = 10.0  # a complete answer lets those listeners in first who come no more than so long after it


def urgency(sequence: Sequence, now: float) -> tuple[int, float]:
    """Smaller is sooner: new listeners in order of arrival, then everybody by seconds in hand.

    Nobody listens to a complete answer yet: it counts as comfortable, and as less so the longer it has not been served.
    """
    if not sequence.streaming:
        return 1, COMFORT_S - (now - sequence.served)
    if sequence.playout.began is None and sequence.launched < OPENING_FRAMES:
        return 0, sequence.arrival
    return 1, sequence.playout.ahead_s(sequence.launched, now)


def stands_back(sequence: Sequence, now: float) -> bool:
    """Whether it can do without the device while somebody else is short of audio."""
    if not sequence.streaming:
        return now - sequence.served < COMFORT_S
    return sequence.playout.ahead_s(sequence.launched, now) > COMFORT_S


def comes_first(complete: Sequence, listener: Sequence) -> bool:
    """Whether a complete answer has waited so long that this listener comes after it."""
    return complete.submitted + PATIENCE_S < listener.submitted


Ranked = tuple[tuple[int, float], Sequence]


@dataclass(frozen=True, slots=True)
class Room:
    """What there is to give: sequences that may have pages at the same time, rows of a step, prompt positions of a turn, and
    positions of one sequence (`length`).

    `rereads`: frames of a preempted sequence are read like a prompt (a GPU); otherwise they are stepped through again, which
    gives the same numbers to the last bit (a CPU).
    """

    slots: int
    rows: int
    block: int
    length: int
    frame_s: float
    rereads: bool = False
    shared_thread: bool = False  # the codec takes its time out of the steps', it does not run beside them
    padded: bool = False  # a step takes the time of all rows however few it has (a CPU)


class Scheduler:
    """The books of all sequences between their arrival and their last frame.

    `order` says who is served first. Without `watch_lateness` listeners are let in as long as there are slots and pages;
    without `stand_back` streams far ahead do not yield. Simulations compare these.
    """

    def __init__(
        self, room: Room, pool: PagePool, pace: Pace,
        order: Callable[[Sequence, float], tuple[int, float]] = urgency,
        *, watch_lateness: bool = True, stand_back: bool = True,
    ) -> None:  # fmt: skip
        self.room = room
        self.pool = pool
        self.pace = pace
        self._order = order
        self._watch_lateness = watch_lateness
        self._stand_back = stand_back
        self._free_slots = list(range(room.slots))[::-1]
        self._lines: tuple[deque[Sequence], deque[Sequence]] = (deque(), deque())  # complete answers, listeners
        self.running: dict[Sequence, None] = {}
        self._listeners = 0  # running ones
        self._promised = 0  # pages that running listeners may come to need
        self.preemptions = 0
        self.reused_positions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._lines[0]) + len(self._lines[1])

    @property
    def idle(self) -> bool:
        return not self.running and not self.num_waiting

    @property
    def line_s(self) -> float:
        """How long one listener more would wait to be let in: behind those in line, at the rate at which listeners leave."""
        return len(self._lines[1]) * self.pace.stay_s / max(1, self._listeners)

    def everyone(self) -> list[Sequence]:
        return [*self.running, *self._lines[1], *self._lines[0]]

    def prepare(self, utterance: Utterance) -> list[Block]:
        """The blocks of a prompt without its last position. Touches no books: any thread may call it."""
        return cut_blocks(utterance.prompt, utterance.prompt.shape[1] - 1, self.room.block, utterance.shared_positions)

    def add(self, sequence: Sequence) -> None:
        assert sequence.most_pages <= self.pool.num_pages, f"{sequence.most_pages} pages are needed"
        line = self._lines[sequence.streaming]
        ahead = len(line)
        if sequence.utterance.continues:  # after others that go on, and after answers that have lost their place
            ahead = next((place for place, one in enumerate(line) if not one.utterance.continues and not one.run), ahead)
        line.insert(ahead, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives its slot and pages back."""
        if sequence.slot is None:
            self._lines[sequence.streaming].remove(sequence)
        else:
            self._leave(sequence)

    def has_read(self, sequence: Sequence, block: Block) -> None:
        """A block of a plan is in the cache."""
        sequence.num_blocks += 1
        if block.key is not None:
            self.pool.publish(block.key, [sequence.pages[place] for place in block.pages])

    def has_launched(self, sequence: Sequence, now: float) -> None:
        """A row of a plan is on its way."""
        sequence.launched += 1
        sequence.served = now

    # -- coming in -----------------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Listeners first, in order of arrival, but after answers that have waited long: a line of listeners that never ends
        must not keep them out for ever. A listener who lacks pages or a slot also keeps other complete answers out."""
        complete, listening = self._lines
        while complete and listening and comes_first(complete[0], listening[0]) and self._place(complete[0], now):
            complete.popleft()
        while listening:
            if not listening[0].utterance.continues and self._would_be_late():
                break
            if not self._place(listening[0], now):
                return
            listening.popleft()
        while complete and self._place(complete[0], now):
            complete.popleft()

    def _would_be_late(self) -> bool:
        """Whether one listener more would make some wait who would not without."""
        room = self.room
        most = self.pace.streams(room.rows, room.frame_s, shared_thread=room.shared_thread)
        return self._watch_lateness and most < self._listeners + 1

    def _place(self, sequence: Sequence, now: float) -> bool:
        """Slot and pages for a waiting sequence, if need be at the cost of complete answers. False if it must wait."""
        if sequence.streaming and self._promised + sequence.most_pages > self.pool.num_pages:
            return False
        known = self._known_blocks(sequence)
        while not self._fits(sequence, known):
            victim = self._displaceable(sequence) if sequence.streaming else None
            if victim is None:
                return False
            victim.displaced += 1
            self._preempt(victim)
            known = self._known_blocks(sequence)
        for block in known:
            assert block.key is not None
            sequence.pages += self.pool.hold(block.key)
            sequence.num_blocks += 1
            self.reused_positions += block.end - block.start
        sequence.pages += self.pool.take(self._pages_now(sequence) - len(sequence.pages))
        sequence.slot = self._free_slots.pop()
        sequence.served = now
        if sequence.admitted_at is None:
            sequence.admitted_at = now
        self.running[sequence] = None
        if sequence.streaming:
            self._listeners += 1
            self._promised += sequence.most_pages
        return True

    def _fits(self, sequence: Sequence, known: list[Block]) -> bool:
        held = sum(len(block.pages) for block in known)
        idle = sum(self.pool.idle_pages(block.key) for block in known if block.key is not None)
        # Listeners have been promised all they may need. Others must leave a page for everybody to go on with.
        spare = 0 if sequence.streaming else len(self.running)
        return bool(self._free_slots) and self._pages_now(sequence) - held + idle + spare <= self.pool.available

    def _known_blocks(self, sequence: Sequence) -> list[Block]:
        known: list[Block] = []
        for block in sequence.blocks:
            if not self.pool.knows(block.key):
                break
            known.append(block)
        return known

    def _pages_now(self, sequence: Sequence) -> int:
        """Pages of what is to be read, of the position stepped from, and of all that is said again after a preemption."""
        return pages_for(sequence.prompt_length + sequence.num_frames)

    # -- going out -----------------------------------------------------------------------------------------------------

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.pool.release(sequence.pages)
        sequence.pages = []
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        del self.running[sequence]
        if sequence.streaming:
            self._listeners -= 1
            self._promised -= sequence.most_pages

    def _displaceable(self, listener: Sequence) -> Sequence | None:
        """Who gives way to a listener: the youngest complete answer that has not given way too often nor waited long."""
        return self._youngest(lambda one: one.displaced < MAX_DISPLACED and not comes_first(one, listener))

    def _youngest(self, fit: Callable[[Sequence], bool]) -> Sequence | None:
        candidates = (sequence for sequence in self.running if not sequence.streaming and fit(sequence))
        return max(candidates, key=lambda sequence: sequence.arrival, default=None)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the line, to be computed again; what it has said stays said."""
        self._leave(sequence)
        self.preemptions += 1
        sequence.run += 1
        sequence.num_blocks = 0
        if self.room.rereads:
            sequence.blocks = self._blocks_with_frames(sequence)
            sequence.launched = sequence.settled = sequence.num_frames
        else:
            sequence.launched = sequence.settled = 0
        self._lines[0].appendleft(sequence)

    def _blocks_with_frames(self, sequence: Sequence) -> list[Block]:
        end = sequence.prompt_length - 1 + sequence.num_frames
        return cut_blocks(sequence.columns(), end, self.room.block, sequence.utterance.shared_positions)

    # -- one turn: blocks, then rows; the caller computes what it is given, or takes the sequences out ------------------

    def choose_blocks(self, now: float) -> list[tuple[Sequence, Block]]:
        """Lets in who can come in, then says what to read in this turn, listeners' prompts first.

        What another sequence has read meanwhile is shared instead, and what another reads in this turn waits for it.
        """
        self._admit(now)
        reading = [sequence for sequence in self.running if not sequence.is_read]
        reading.sort(key=lambda sequence: (not sequence.streaming, sequence.arrival))
        chosen: list[tuple[Sequence, Block]] = []
        budget = self.room.block
        keys: set[bytes] = set()
        for sequence in reading:
            self._share_known(sequence)
            if sequence.is_read or budget <= 0:
                continue
            block = sequence.blocks[sequence.num_blocks]
            if block.end - block.start > budget or block.key in keys:
                continue
            chosen.append((sequence, block))
            budget -= block.end - block.start
            if block.key is not None:
                keys.add(block.key)
        return chosen

    def _share_known(self, sequence: Sequence) -> None:
        """Puts known pages in place of own ones for as many of the next blocks as possible."""
        while not sequence.is_read:
            block = sequence.blocks[sequence.num_blocks]
            if block.key is None or not self.pool.knows(block.key):
                return
            places = slice(block.pages.start, block.pages.stop)
            own = sequence.pages[places]
            sequence.pages[places] = self.pool.hold(block.key)
            self.pool.release(own)
            sequence.num_blocks += 1
            self.reused_positions += block.end - block.start

    def choose_rows(self, now: float) -> list[Sequence]:
        """Who draws a frame. When somebody is short of audio, those with plenty stand back, if that makes a step shorter."""
        ready = [
            (self._order(sequence, now), sequence)
            for sequence in self.running
            if sequence.launched < sequence.utterance.max_frames and sequence.is_read
        ]
        ready.sort(key=itemgetter(0))
        first = next((key for key, sequence in ready if sequence.streaming), None)
        if self._stand_back and not self.room.padded and first is not None and first < (1, NEED_S):
            ready = self._in_need(ready, now)
        chosen: dict[Sequence, None] = {}
        for _, sequence in ready:
            if len(chosen) == self.room.rows:
                break
            if sequence in self.running and self._has_page(sequence, chosen):
                chosen[sequence] = None
        return list(chosen)

    def _in_need(self, ready: list[Ranked], now: float) -> list[Ranked]:
        """Those who do not stand back; and complete answers in as many of the other rows as leave the turn brisk, because there
        a row costs little more than its own computation."""
        needing: list[Ranked] = []
        complete: list[Ranked] = []
        for pair in ready:
            if not stands_back(pair[1], now):
                needing.append(pair)
            elif not pair[1].streaming:
                complete.append(pair)
        room = self.room
        brisk = self.pace.rows_within(BRISK * room.frame_s, shared_thread=room.shared_thread)
        return needing + complete[: max(0, brisk - len(needing))]

    def _has_page(self, sequence: Sequence, chosen: dict[Sequence, None]) -> bool:
        """Makes sure of the page that the next frame goes to; the youngest complete answers pay for it."""
        if sequence.position // PAGE < len(sequence.pages):
            return True
        while self.pool.available == 0:
            victim = self._youngest(lambda _: True)
            assert victim is not None, "listeners were promised more pages than there are"
            self._preempt(victim)
            chosen.pop(victim, None)
            if victim is sequence:
                return False
        sequence.pages += self.pool.take(1)
        return True

    def assert_idle(self) -> None:
        """With nobody waiting or running every slot is free and every page free or cached."""
        assert self.idle, "sequences are waiting or running"
        assert sorted(self._free_slots) == list(range(self.room.slots)), f"slots leaked: {sorted(self._free_slots)} are free"
        assert (self._listeners, self._promised) == (0, 0), "listeners are counted that are gone"
        self.pool.assert_sound()
