"""The generation loop: prompt, sampling, text pieces, stop conditions and timings."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvq.engine import Engine
from pykvq.errors import InvalidArgumentError
from pykvq.runtime import FloatArray, Model, Sampler
from pykvq.sampling import SamplingParams
from pykvq.text_stream import StopMatcher, Utf8Stream
from pykvq.turn import TurnIterator

IdArray = npt.NDArray[np.int32]
# (all token ids so far, n_vocab logits) -> n_vocab logits
LogitsProcessor: TypeAlias = Callable[[IdArray, FloatArray], FloatArray]
# (all token ids so far, n_vocab logits) -> whether to stop
StoppingCriterion: TypeAlias = Callable[[IdArray, FloatArray], bool]


@dataclass(frozen=True)
class TokenLogprob:
    """A token with the natural logarithm of its probability under the model, before any sampling parameter."""

    token: int
    raw: bytes
    logprob: float | None
    # the likeliest tokens: (bytes, logarithm of the probability), likeliest first
    top: tuple[tuple[bytes, float], ...] = ()
    # characters of the answer, or of the echoed prompt, before this token
    offset: int = 0


@dataclass(frozen=True)
class Piece:
    """Text that can be shown, and the tokens it completes (only if log probabilities were asked for)."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Request:
    """What to generate. ``max_tokens`` None or <= 0 means until the context is full."""

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    # number of likeliest tokens to report with each token, None for no log probabilities
    n_logprobs: int | None = None
    prompt_logprobs: bool = False
    logits_processors: tuple[LogitsProcessor, ...] = ()
    stopping_criteria: tuple[StoppingCriterion, ...] = ()


@dataclass
class Result:
    """What a generation has produced so far. Times are in seconds."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    # prompt tokens taken over from the KV cache, and those computed
    n_reused: int = 0
    prompt_n: int = 0
    prompt_s: float = 0.0
    gen_s: float = 0.0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def gen_n(self) -> int:
        """Tokens generated, the one that ended the answer not counted."""
        return len(self.tokens)


class Generation(TurnIterator[Piece]):
    """An answer in the making: iterate over it for its pieces of text. ``result`` grows along.

    Raises (while iterating):
        AbortedError: ``Llama.abort()`` was called. BusyError: a later call has ended it. ClosedError.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self.result = Result()
        super().__init__(engine.turn, _text_steps(engine, request, self.result))

    def run(self) -> tuple[str, list[TokenLogprob]]:
        """Generates to the end and returns the whole text with the log probabilities."""
        with self:
            pieces = list(self)
        return "".join(piece.text for piece in pieces), [entry for piece in pieces for entry in piece.logprobs]


def token_steps(engine: Engine, request: Request, result: Result) -> Generator[int, None, None]:
    """Evaluates the prompt, then yields one sampled token after the other until the context is full.

    A token is computed when the next one is asked for, so an abandoned loop costs nothing. A token that a stopping
    criterion refuses is not yielded, and sets the finish reason.
    """
    engine.context.clear_abort()
    _evaluate_prompt(engine, request, result)
    with Sampler(engine.model, request.sampling) as sampler:
        while True:
            started = time.perf_counter()
            token = _sample(engine, request, sampler)
            stopped = any(criterion(*_callback_arguments(engine)) for criterion in request.stopping_criteria)
            result.gen_s += time.perf_counter() - started
            if stopped:
                result.finish_reason = "stop"
                return
            yield token
            if engine.n_free == 0:
                result.finish_reason = "length"
                return
            started = time.perf_counter()
            engine.evaluate([token])
            result.gen_s += time.perf_counter() - started


def _evaluate_prompt(engine: Engine, request: Request, result: Result) -> None:
    started = time.perf_counter()
    if request.prompt_logprobs:
        engine.reset()
        reader = _PromptLogprobs(engine, request)
        engine.evaluate(request.prompt, reader.read)
        result.prompt_logprobs = reader.entries
    else:
        result.n_reused = engine.keep_prefix(request.prompt)
        engine.evaluate(request.prompt[result.n_reused :])
    result.prompt_n = len(request.prompt) - result.n_reused
    result.prompt_s = time.perf_counter() - started


def _sample(engine: Engine, request: Request, sampler: Sampler) -> int:
    if not request.logits_processors:
        return engine.context.sample(sampler)
    ids, logits = _callback_arguments(engine)
    for processor in request.logits_processors:
        logits = processor(ids, logits)
    if np.shape(logits) != (engine.model.info.n_vocab,):
        raise InvalidArgumentError(
            f"a logits processor must return {engine.model.info.n_vocab} logits, got shape {np.shape(logits)}"
        )
    return sampler.sample_logits(logits)


def _callback_arguments(engine: Engine) -> tuple[IdArray, FloatArray]:
    return np.asarray(engine.tokens, dtype=np.int32), engine.context.logits()


def _text_steps(engine: Engine, request: Request, result: Result) -> Generator[Piece, None, None]:
    limit = engine.n_ctx - len(request.prompt)
    max_tokens = min(request.max_tokens, limit) if request.max_tokens and request.max_tokens > 0 else limit
    writer = _PieceWriter(request.stop)
    tokens = token_steps(engine, request, result)
    try:
        for token in tokens:
            if engine.model.is_eog(token):
                result.finish_reason = "stop"
                break
            result.tokens.append(token)
            piece = writer.push(_token_entry(engine, request, token))
            if piece.text or piece.logprobs:
                yield piece
            if writer.stopped:
                result.finish_reason = "stop"
                break
            if len(result.tokens) >= max_tokens:
                result.finish_reason = "length"
                break
    finally:
        tokens.close()
    piece = writer.finish()
    if piece.text or piece.logprobs:
        yield piece


def _token_entry(engine: Engine, request: Request, token: int) -> TokenLogprob:
    if request.n_logprobs is None:
        return TokenLogprob(token, engine.model.token_bytes(token), None)
    return _with_logprobs(engine.model, token, engine.context.logits(), request.n_logprobs)


class _PieceWriter:
    """Turns tokens into pieces, and keeps each token's log probability with the text that the token ends in."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._utf8 = Utf8Stream()
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
            self._pending.append((end, _at_offset(entry, self._n_decoded)))
        self._n_decoded += len(decoded)
        return self._release(self._stops.push(decoded))

    def finish(self) -> Piece:
        """The text that was held back; after a stop string also the tokens that reach into it are dropped."""
        if self.stopped:
            return Piece("", self._logprobs_before(self._n_released))
        tail = self._stops.push(self._utf8.finish()) + self._stops.finish()
        self._n_released += len(tail)
        return Piece(tail, tuple(entry for _, entry in self._pending))

    def _release(self, text: str) -> Piece:
        self._n_released += len(text)
        n_whole = sum(1 for end, _ in self._pending if end <= self._n_released)
        whole, self._pending = self._pending[:n_whole], self._pending[n_whole:]
        return Piece(text, tuple(entry for _, entry in whole))

    def _logprobs_before(self, n_characters: int) -> tuple[TokenLogprob, ...]:
        return tuple(entry for _, entry in self._pending if entry.offset < n_characters)


class _PromptLogprobs:
    """Collects the log probability of each prompt token given the tokens before it."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request
        self._n_read = 0
        self._offset = 0
        self._previous: FloatArray | None = None
        self.entries: list[TokenLogprob] = []

    def read(self, n_tokens: int) -> None:
        """Takes in the logits of a piece of n_tokens tokens that was just decoded."""
        for i in range(n_tokens):
            token = self._request.prompt[self._n_read]
            self._append(token)
            self._previous = self._engine.context.logits(i)
            self._n_read += 1

    def _append(self, token: int) -> None:
        model = self._engine.model
        if self._previous is None:
            if token == model.info.token_bos:
                return
            entry = TokenLogprob(token, model.token_bytes(token, special=True), None)
        else:
            entry = _with_logprobs(model, token, self._previous, self._request.n_logprobs or 0, special=True)
        self.entries.append(_at_offset(entry, self._offset))
        self._offset += len(entry.raw.decode("utf-8", "replace"))


def _at_offset(entry: TokenLogprob, offset: int) -> TokenLogprob:
    return TokenLogprob(entry.token, entry.raw, entry.logprob, entry.top, offset)


def _with_logprobs(model: Model, token: int, logits: FloatArray, n_top: int, *, special: bool = False) -> TokenLogprob:
    logprobs = log_softmax(logits)
    likeliest = np.argsort(-logprobs, kind="stable")[:n_top]
    top = tuple((model.token_bytes(int(i), special=True), float(logprobs[i])) for i in likeliest)
    return TokenLogprob(token, model.token_bytes(token, special=special), float(logprobs[token]), top)


def log_softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    """Natural logarithms of the probabilities that ``logits`` (n values) stand for, in float64."""
    shifted = logits.astype(np.float64) - float(np.max(logits))
    result: npt.NDArray[np.float64] = shifted - np.log(np.sum(np.exp(shifted)))
    return result


def callables(name: str, value: Any) -> tuple[Any, ...]:
    """The callables of an argument that takes None, one callable or a list of them.

    Raises:
        InvalidArgumentError: something in it cannot be called.
    """
    # llama-cpp-python's LogitsProcessorList is a list that can itself be called
    items: Iterable[Any] = () if value is None else value if isinstance(value, (list, tuple)) else (value,)
    for item in items:
        if not callable(item):
            raise InvalidArgumentError(f"{name} must be callables (ids, scores), got {item!r}")
    return tuple(items)


def sample_once(engine: Engine, params: SamplingParams, processors: tuple[LogitsProcessor, ...]) -> int:
    """Draws a token after the last one evaluated, with a sampler that remembers nothing."""
    request = Request(prompt=(), sampling=params, logits_processors=processors)
    with Sampler(engine.model, params) as sampler:
        return _sample(engine, request, sampler)


def token_iterator(engine: Engine, request: Request) -> Iterator[int]:
    """The sampled tokens of a request, as a stream that holds the turn."""
    return TurnIterator(engine.turn, token_steps(engine, request, Result()))
