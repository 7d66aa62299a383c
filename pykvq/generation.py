"""The generation loop of one sequence: prompt, sampling and timings."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial

import numpy as np

from pykvq.answer import Answer, PromptLogprobs
from pykvq.engine import Engine, common_prefix
from pykvq.errors import InvalidArgumentError, StateError
from pykvq.request import Piece, Request, Result
from pykvq.token_choice import TokenChooser
from pykvq.turn import TurnIterator

_logger = logging.getLogger("pykvq")


class Generation(TurnIterator[Piece]):
    """An answer in the making: iterate over it for its pieces of text. ``result`` grows along.

    Raises (while iterating):
        AbortedError: ``Llama.abort()`` was called. BusyError: a later call has ended it. ClosedError.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self.result = Result()
        super().__init__(engine.turn, _text_steps(engine, request, self.result))


def token_steps(engine: Engine, request: Request, result: Result) -> Generator[int, None, None]:
    """Evaluates the prompt, then yields one sampled token after the other until the context is full.

    A token is computed when the next one is asked for, so an abandoned loop costs nothing. A token that a stopping
    criterion refuses is not yielded, and sets the finish reason.
    """
    engine.context.clear_abort()
    _evaluate_prompt(engine, request, result)
    with TokenChooser(engine.model, request) as chooser:
        drafted: list[int] = []
        while True:
            started = time.perf_counter()
            tokens = _draw(engine, chooser, drafted, result)
            result.gen_s += time.perf_counter() - started
            first = -1 - len(drafted)
            for i, token in enumerate(tokens):
                engine.drawn_at = first + i
                yield token
            if result.finish_reason is not None:
                return
            if engine.n_free == 0:
                result.finish_reason = "length"
                return
            started = time.perf_counter()
            drafted = _drafted(engine, request, tokens[-1])
            result.n_drafted += len(drafted)
            engine.evaluate([tokens[-1], *drafted], all_logits=bool(drafted))
            result.gen_s += time.perf_counter() - started


def _draw(engine: Engine, chooser: TokenChooser, drafted: Sequence[int], result: Result) -> list[int]:
    """Draws the tokens after the one last evaluated, as long as the draft foretold them, and one more.

    What the draft had wrong is taken out of the KV cache.
    """
    n_sure = len(engine.tokens) - len(drafted)
    tokens: list[int] = []
    for i in range(len(drafted) + 1):
        place = i - len(drafted) - 1
        ids = engine.tokens[: n_sure + i] if drafted else engine.tokens
        token = chooser.choose(engine.context, place, ids)
        if chooser.should_stop(engine.context, place, ids):
            result.finish_reason = "stop"
            break
        tokens.append(token)
        if i == len(drafted) or token != drafted[i] or engine.model.is_eog(token):
            break
        result.n_accepted += 1
    engine.truncate(n_sure + max(0, len(tokens) - 1))
    return tokens


def _drafted(engine: Engine, request: Request, token: int) -> list[int]:
    """The guess at what follows a token that is about to be evaluated."""
    if request.draft is None:
        return []
    room = min(engine.n_free, engine.context.info.n_batch) - 1
    guess = request.draft(np.asarray([*engine.tokens, token], dtype=np.int32))
    return [int(each) for each in guess[: max(room, 0)]]


def _evaluate_prompt(engine: Engine, request: Request, result: Result) -> None:
    started = time.perf_counter()
    if request.prompt_logprobs:
        engine.reset()
        reader = PromptLogprobs(engine.model, request)

        def read_piece(n_tokens: int) -> None:
            for i in range(n_tokens):
                reader.read(engine.context.logits(i))

        engine.evaluate(request.prompt, read_piece)
        result.prompt_logprobs = reader.entries
    else:
        result.n_reused = engine.keep_prefix(request.prompt)
        engine.evaluate(request.prompt[result.n_reused :])
    result.prompt_n = len(request.prompt) - result.n_reused
    result.prompt_s = time.perf_counter() - started


def _text_steps(engine: Engine, request: Request, result: Result) -> Generator[Piece, None, None]:
    answer = Answer(engine.model, request, result, engine.n_ctx)
    _load_cached(engine, request)
    tokens = token_steps(engine, request, result)
    try:
        for token in tokens:
            piece = answer.push(token, partial(engine.context.logits, engine.drawn_at))
            if piece.text or piece.logprobs:
                yield piece
            if answer.ended:
                break
    finally:
        tokens.close()
    if engine.cache is not None:
        engine.cache.store(engine.tokens, engine.save_state())
    piece = answer.finish()
    if piece.text or piece.logprobs:
        yield piece


def _load_cached(engine: Engine, request: Request) -> None:
    """Loads the state with more of the prompt than the KV cache holds, if there is one."""
    if engine.cache is None:
        return
    state = engine.cache.find(request.prompt, common_prefix(engine.tokens, request.prompt))
    if state is not None:
        try:
            engine.load_state(state)
        except StateError as error:  # of another model or KV format, in a folder that several use
            _logger.warning("a cached prompt is not used: %s", error)


def sample_once(engine: Engine, request: Request) -> int:
    """Draws a token after the last one evaluated, with a sampler that remembers nothing.

    Raises:
        InvalidArgumentError: there are no logits.
    """
    if not engine.has_logits:
        raise InvalidArgumentError("there are no logits to draw from: evaluate a token first, with eval()")
    with TokenChooser(engine.model, request) as chooser:
        return chooser.choose(engine.context, -1, engine.tokens)


def token_iterator(engine: Engine, request: Request) -> Iterator[int]:
    """The sampled tokens of a request, as a stream that holds the turn."""
    return TurnIterator(engine.turn, token_steps(engine, request, Result()))
