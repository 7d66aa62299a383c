"""Slots: the sequences of a context, each with the tokens that it holds and the job that it works on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pykvq.answer import Answer, PromptLogprobs
from pykvq.batching.job import Job
from pykvq.engine import common_prefix
from pykvq.runtime import Context, Model
from pykvq.token_choice import TokenChooser

# a copy of a sequence costs about as much as computing this many tokens
_MIN_COPIED_TOKENS = 64


class Work:
    """A job that a slot works on: the sampler, the answer so far, and all tokens up to the last one drawn."""

    def __init__(self, model: Model, job: Job, n_ctx: int) -> None:
        self.job = job
        self.chooser = TokenChooser(model, job.request)
        self.answer = Answer(model, job.request, job.result, n_ctx)
        self.started = time.perf_counter()
        self.tokens = list(job.request.prompt)
        self.prompt_reader = PromptLogprobs(model, job.request) if job.request.prompt_logprobs else None

    @property
    def in_prompt(self) -> bool:
        """Whether no token of the answer has been drawn yet."""
        return len(self.tokens) == len(self.job.request.prompt)


class Slot:
    """A sequence of a context.

    Args:
        seq: its sequence id.
    """

    def __init__(self, context: Context, seq: int) -> None:
        self.seq = seq
        self.tokens: list[int] = []
        self.work: Work | None = None
        self.last_used = 0.0
        self._context = context

    @property
    def pending(self) -> list[int]:
        """Tokens that are to be computed next."""
        return self.work.tokens[len(self.tokens) :] if self.work is not None else []

    def common_prefix(self, prompt: Sequence[int]) -> int:
        """Leading tokens of a prompt that this slot holds; never the last one, whose logits are needed."""
        return min(common_prefix(self.tokens, prompt), len(prompt) - 1)

    def truncate(self, n_keep: int) -> None:
        """Removes all but the first n_keep tokens, or all where the cache cannot do that."""
        n_held = self._context.pos_max(self.seq) + 1
        if n_held == n_keep or self._context.kv_keep(n_keep, self.seq):
            del self.tokens[n_keep:]
        else:
            self._context.kv_remove(-1, self.seq)
            self.tokens.clear()

    def sync(self) -> None:
        """Makes the KV cache agree with the token list after a decode that stopped half-way."""
        self.truncate(len(self.tokens))

    def copy_prefix(self, source: Slot, n_tokens: int) -> None:
        """Takes over the first n_tokens of another slot."""
        self.truncate(0)
        self._context.kv_copy(source.seq, self.seq)
        self.tokens = list(source.tokens)
        self.truncate(n_tokens)


def take_slot(slots: Sequence[Slot], prompt: Sequence[int], *, can_copy: bool) -> Slot | None:
    """The free slot that is best for a prompt, holding as much of it as can be had; None if none is free.

    A slot of which at least half is of use is continued. Else the least recently used one is emptied, and the longest
    common prefix with any slot, free or busy, is copied.
    """
    free = [slot for slot in slots if slot.work is None]
    if not free:
        return None

    def preference(slot: Slot) -> tuple[float, float, int]:
        n_common = slot.common_prefix(prompt)
        if 2 * n_common >= len(slot.tokens):
            return (0, -n_common, slot.seq)
        return (1, slot.last_used, slot.seq)

    slot = min(free, key=preference)
    n_own = slot.common_prefix(prompt)
    donor = max(slots, key=lambda other: other.common_prefix(prompt))
    n_common = donor.common_prefix(prompt)
    if can_copy and donor is not slot and n_common >= n_own + _MIN_COPIED_TOKENS:
        slot.copy_prefix(donor, n_common)
    else:
        slot.truncate(n_own)
    return slot
