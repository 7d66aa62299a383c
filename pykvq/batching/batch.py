"""Which tokens of which slots are computed next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pykvq.batching.slot import Slot


@dataclass(frozen=True)
class Share:
    """A slot's tokens in a batch: [first, first + n) of it."""

    slot: Slot
    first: int
    n: int


@dataclass
class Batch:
    """The arrays of one decode call, and whose tokens they are."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    want_logits: list[bool] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)

    def add(self, slot: Slot, piece: Sequence[int], is_last: bool) -> None:
        """Adds a slot's next tokens; ``is_last`` says that no more are pending, so that a token is to be drawn."""
        n = len(piece)
        all_wanted = slot.work is not None and slot.work.in_prompt and slot.work.prompt_reader is not None
        self.shares.append(Share(slot, len(self.tokens), n))
        self.tokens += piece
        self.positions += range(len(slot.tokens), len(slot.tokens) + n)
        self.sequences += [slot.seq] * n
        self.want_logits += [all_wanted] * (n - 1) + [all_wanted or is_last]


def plan_batch(slots: Sequence[Slot], n_batch: int, n_shared_prompt: int) -> Batch:
    """The next batch: one token of each slot that generates, and prompt tokens of the others.

    Args:
        n_batch: most tokens of a batch.
        n_shared_prompt: most prompt tokens beside slots that generate, so that these do not wait long.

    The room for prompts is divided evenly, so that a short one is not held up by a long one.
    """
    busy = [(slot, slot.pending) for slot in slots if slot.work is not None]
    n_single = sum(1 for _, pending in busy if len(pending) == 1)
    room = n_batch - n_single
    if n_single:
        room = min(room, n_shared_prompt)
    prompts = sorted((entry for entry in busy if len(entry[1]) > 1), key=lambda entry: len(entry[1]))
    lengths = {slot.seq: 1 for slot, _ in busy}
    for i, (slot, pending) in enumerate(prompts):
        lengths[slot.seq] = min(len(pending), room // (len(prompts) - i))
        room -= lengths[slot.seq]
    batch = Batch()
    for slot, pending in busy:
        n = lengths[slot.seq]
        if n:
            batch.add(slot, pending[:n], n == len(pending))
    return batch
