"""Runs a reference and candidate KV formats over the same text side by side and compares what they predict.

All contexts get the same tokens in the same batches, so that a token is as old when it is read as it is in generation.
The reference keeps its cache in F16 tiers: it takes the same path through the attention kernel as the tiered
candidates, and what differs is the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pykvq.errors import InternalError, InvalidArgumentError
from pykvq.kv_config import KVConfig, parse_kv_config
from pykvq.quality.metrics import Divergence, Logits, log_softmax
from pykvq.runtime import Context, Model
from pykvq.sample_text import spread_starts

REFERENCE = "f16:128+f16"
# the part of each text whose predictions are not compared: it has little or no compressed past
SKIPPED_SHARE = 4


@dataclass(frozen=True)
class Candidate:
    """A KV format to compare, with the calibration to use."""

    name: str
    kv: KVConfig
    calibration: str | None = None


@dataclass(frozen=True)
class CandidateResult:
    """What a candidate's cache takes, and how its predictions differ.

    ``n_aged``: tokens of a chunk that have left the first tier at its end; None without tiers.
    """

    candidate: Candidate
    kv_bytes: int
    bits_per_element: float
    n_aged: int | None
    divergence: Divergence


def split_text(tokens: Sequence[int], n_ctx: int, n_chunks: int) -> list[npt.NDArray[np.int32]]:
    """n_chunks texts of n_ctx tokens, evenly spread.

    Raises:
        InvalidArgumentError: the text is shorter than one; the message has both numbers.
    """
    if len(tokens) < n_ctx:
        raise InvalidArgumentError(
            f"the text has {len(tokens)} tokens and one chunk takes {n_ctx}: give a longer text, or a smaller --ctx"
        )
    starts = spread_starts(len(tokens), n_ctx, min(n_chunks, len(tokens) // n_ctx))
    return [np.asarray(tokens[start : start + n_ctx], dtype=np.int32) for start in starts]


def compare(
    model: Model,
    candidates: Sequence[Candidate],
    chunks: Sequence[npt.NDArray[np.int32]],
    *,
    n_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[CandidateResult]:
    """Compares the candidates with F16 on chunks of equal length; ``progress`` gets (batches done, batches in all).

    Raises:
        InternalError: what the reference predicts is not a number.
    """
    n_ctx = len(chunks[0])
    reference = parse_kv_config(REFERENCE)
    n_batch = reference.micro_batch(n_ctx)
    n_batches = len(chunks) * -(-n_ctx // n_batch)
    done = 0
    with contextlib.ExitStack() as stack:

        def open_context(kv: KVConfig, calibration: str | None) -> Context:
            context = Context(
                model,
                kv,
                n_ctx=n_ctx,
                n_batch=n_batch,
                n_ubatch=n_batch,
                n_threads=n_threads,
                n_threads_batch=n_threads,
                calibration=calibration,
            )
            stack.callback(context.close)
            return context

        base = open_context(reference, None)
        contexts = [open_context(candidate.kv, candidate.calibration) for candidate in candidates]
        divergences = [Divergence() for _ in candidates]
        for chunk in chunks:
            for context in (base, *contexts):
                context.kv_clear()
            for start in range(0, n_ctx, n_batch):
                wanted = _wanted(start, min(start + n_batch, n_ctx), n_ctx)
                logits = _decode(base, chunk, start, wanted)
                expected = _expected(logits) if any(wanted) else None
                for context, divergence in zip(contexts, divergences, strict=True):
                    logits = _decode(context, chunk, start, wanted)
                    if expected is not None:
                        positions = start + np.flatnonzero(wanted)
                        divergence.add(expected, logits, chunk[positions + 1])
                done += 1
                if progress is not None:
                    progress(done, n_batches)
        return [
            _result(candidate, context, divergence)
            for candidate, context, divergence in zip(candidates, contexts, divergences, strict=True)
        ]


def _result(candidate: Candidate, context: Context, divergence: Divergence) -> CandidateResult:
    info, tiers = context.read_info(), context.read_tiers()
    n_aged = sum(tier.n_used for tier in tiers[1:]) if tiers else None
    return CandidateResult(candidate, info.kv_bytes, 8 * info.kv_bytes / info.kv_elements, n_aged, divergence)


def _expected(logits: Logits) -> Logits:
    """The log probabilities of the reference."""
    expected = log_softmax(logits)
    if np.isnan(expected).any():
        raise InternalError(
            "the model's logits are not a number: its weights or an F16 cache are broken for this input, so there is "
            "nothing to compare with"
        )
    return expected


def _wanted(start: int, stop: int, n_ctx: int) -> list[bool]:
    """Which predictions of a batch are compared: not the first part's, and not the last one, whose truth is unknown."""
    return [n_ctx // SKIPPED_SHARE <= pos < n_ctx - 1 for pos in range(start, stop)]


def _decode(context: Context, chunk: npt.NDArray[np.int32], start: int, wanted: Sequence[bool]) -> Logits:
    """The wanted logits, [n, n_vocab]."""
    tokens = chunk[start : start + len(wanted)].tolist()
    context.decode(tokens, start, wanted if any(wanted) else [*wanted[:-1], True])
    rows = [context.logits(i) for i, is_wanted in enumerate(wanted) if is_wanted]
    return np.stack(rows) if rows else np.empty((0, 0), dtype=np.float32)
