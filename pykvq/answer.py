"""From sampled tokens to the text of an answer: pieces, log probabilities, and the reasons to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pykvq.request import Piece, Request, Result, TokenLogprob
from pykvq.runtime import FloatArray, Model
from pykvq.text_stream import GraphemeStream, StopMatcher, Utf8Stream

# reads the n_vocab logits that a token was drawn from
LogitsReader = Callable[[], FloatArray]


class Answer:
    """The answer to a request, token by token. It keeps ``result.tokens`` and ``result.finish_reason``.

    Args:
        n_ctx: tokens that prompt and answer may have together.
    """

    def __init__(self, model: Model, request: Request, result: Result, n_ctx: int) -> None:
        self._model = model
        self._request = request
        self._result = result
        limit = n_ctx - len(request.prompt)
        wanted = request.max_tokens
        self._max_tokens = min(wanted, limit) if wanted and wanted > 0 else limit
        self._writer = _PieceWriter(request.stop)

    @property
    def ended(self) -> bool:
        """Whether there is a reason to end."""
        return self._result.finish_reason is not None

    def push(self, token: int, read_logits: LogitsReader) -> Piece:
        """Takes a sampled token, and returns the text that it completes."""
        if self._model.is_eog(token):
            self._result.finish_reason = "stop"
            return Piece("")
        self._result.tokens.append(token)
        piece = self._writer.push(self._entry(token, read_logits))
        if self._writer.stopped:
            self._result.finish_reason = "stop"
        elif len(self._result.tokens) >= self._max_tokens:
            self._result.finish_reason = "length"
        return piece

    def finish(self) -> Piece:
        """The text that was held back."""
        return self._writer.finish()

    def _entry(self, token: int, read_logits: LogitsReader) -> TokenLogprob:
        special = self._request.show_special
        if self._request.n_logprobs is None:
            return TokenLogprob(token, self._model.token_bytes(token, special=special), None)
        return with_logprobs(self._model, token, read_logits(), self._request.n_logprobs, special=special)


class _PieceWriter:
    """Turns tokens into pieces, and keeps each token's log probability with the text that the token ends in."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._utf8 = Utf8Stream()
        self._graphemes = GraphemeStream()
        self._stops = StopMatcher(stop)
        self._pending: list[tuple[int, TokenLogprob]] = []  # (characters up to its end, token)
        self._n_decoded = 0
        self._n_released = 0

    @property
    def stopped(self) -> bool:
        return self._stops.matched

    def push(self, entry: TokenLogprob) -> Piece:
        decoded = self._utf8.push(entry.raw)
        if entry.logprob is not None:
            end = self._n_decoded + len(decoded) + self._utf8.is_inside_code_point
            self._pending.append((end, replace(entry, offset=self._n_decoded)))
        self._n_decoded += len(decoded)
        return self._release(self._graphemes.push(self._stops.push(decoded)))

    def finish(self) -> Piece:
        """The text that was held back; after a stop string also the tokens that reach into it are dropped."""
        tail = "" if self.stopped else self._stops.push(self._utf8.finish()) + self._stops.finish()
        text = self._graphemes.push(tail) + self._graphemes.finish()
        self._n_released += len(text)
        if self.stopped:
            return Piece(text, self._logprobs_before(self._n_released))
        return Piece(text, tuple(entry for _, entry in self._pending))

    def _release(self, text: str) -> Piece:
        self._n_released += len(text)
        n_whole = sum(1 for end, _ in self._pending if end <= self._n_released)
        whole, self._pending = self._pending[:n_whole], self._pending[n_whole:]
        return Piece(text, tuple(entry for _, entry in whole))

    def _logprobs_before(self, n_characters: int) -> tuple[TokenLogprob, ...]:
        return tuple(entry for _, entry in self._pending if entry.offset < n_characters)


class PromptLogprobs:
    """Collects the log probability of each prompt token given the tokens before it."""

    def __init__(self, model: Model, request: Request) -> None:
        self._model = model
        self._request = request
        self._n_read = 0
        self._offset = 0
        self._previous: FloatArray | None = None
        self.entries: list[TokenLogprob] = []

    def read(self, logits: FloatArray) -> None:
        """Takes the logits of the next prompt token, which was just computed."""
        token = self._request.prompt[self._n_read]
        self._append(token)
        self._previous = logits
        self._n_read += 1

    def _append(self, token: int) -> None:
        if self._previous is None:
            if token == self._model.info.token_bos:
                return
            entry = TokenLogprob(token, self._model.token_bytes(token, special=True), None)
        else:
            n_top = self._request.n_logprobs or 0
            entry = with_logprobs(self._model, token, self._previous, n_top, special=True)
        self.entries.append(replace(entry, offset=self._offset))
        self._offset += len(entry.raw.decode("utf-8", "replace"))


def with_logprobs(model: Model, token: int, logits: FloatArray, n_top: int, *, special: bool = False) -> TokenLogprob:
    """A token with its log probability and those of the ``n_top`` likeliest tokens."""
    logprobs = log_softmax(logits)
    likeliest = np.argsort(-logprobs, kind="stable")[:n_top]
    top = tuple((model.token_bytes(int(i), special=True), float(logprobs[i])) for i in likeliest)
    return TokenLogprob(token, model.token_bytes(token, special=special), float(logprobs[token]), top)


def log_softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    """Natural logarithms of the probabilities that ``logits`` (n values) stand for, in float64."""
    shifted = logits.astype(np.float64) - float(np.max(logits))
    result: npt.NDArray[np.float64] = shifted - np.log(np.sum(np.exp(shifted)))
    return result
