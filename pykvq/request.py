"""What a generation is asked for, and what it has produced so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvq.errors import InvalidArgumentError
from pykvq.runtime import FloatArray
from pykvq.sampling import SamplingParams

if TYPE_CHECKING:
    from pykvq.constraint import Constraint
    from pykvq.speculative import Draft

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
    # the grammar that the answer must follow
    constraint: Constraint | None = None
    # guesses the next tokens
    draft: Draft | None = None
    # whether special tokens of the answer are written out
    show_special: bool = False


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
    # tokens proposed by the draft, and those of them that were right
    n_drafted: int = 0
    n_accepted: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def gen_n(self) -> int:
        """Tokens generated, the one that ended the answer not counted."""
        return len(self.tokens)


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
