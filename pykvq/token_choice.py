"""Drawing the next token: a sampler, the callbacks of a request, and the grammar that its answer must follow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykvq.errors import InvalidArgumentError
from pykvq.request import Request
from pykvq.runtime import Context, FloatArray, Model, Sampler


class TokenChooser:
    """Draws the tokens of one answer; it remembers those drawn.

    Raises:
        InvalidArgumentError: a sampling parameter is out of its range, or the grammar is not one.
    """

    def __init__(self, model: Model, request: Request) -> None:
        self._model = model
        self._request = request
        self._matcher = request.constraint.start(model) if request.constraint is not None else None
        self._sampler = Sampler(model, request.sampling)

    def choose(self, context: Context, i: int, ids: Sequence[int]) -> int:
        """Draws a token from the logits of the i-th token of the last batch.

        Args:
            ids: all tokens so far, for the callbacks.
        """
        if not self._request.logits_processors and self._matcher is None:
            return context.sample(self._sampler, i)
        logits = self._processed(context.logits(i), ids)
        if self._matcher is None:
            return self._sampler.sample_logits(logits)
        token = self._sampler.sample_logits(self._matcher.mask(logits))
        self._matcher.accept(token)
        return token

    def should_stop(self, context: Context, i: int, ids: Sequence[int]) -> bool:
        """Whether a stopping criterion refuses the token just drawn."""
        if not self._request.stopping_criteria:
            return False
        arguments = np.asarray(ids, dtype=np.int32), context.logits(i)
        return any(criterion(*arguments) for criterion in self._request.stopping_criteria)

    def _processed(self, logits: FloatArray, ids: Sequence[int]) -> FloatArray:
        if not self._request.logits_processors:
            return logits
        id_array = np.asarray(ids, dtype=np.int32)
        for processor in self._request.logits_processors:
            logits = processor(id_array, logits)
        n_vocab = self._model.info.n_vocab
        if np.shape(logits) != (n_vocab,):
            raise InvalidArgumentError(f"a logits processor must return {n_vocab} logits, got shape {np.shape(logits)}")
        try:
            values = np.array(logits, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"a logits processor must return numbers: {error}") from error
        if (n_nan := int(np.isnan(values).sum())) > 0:
            raise InvalidArgumentError(f"a logits processor returned {n_nan} logits of {n_vocab} that are not a number")
        return values

    def close(self) -> None:
        """Frees the sampler. Calling it again does nothing."""
        self._sampler.close()

    def __enter__(self) -> TokenChooser:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
