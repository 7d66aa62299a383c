"""Whether a model finds a sentence hidden in a long text, and for how many tokens its greedy answer stays the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from pykvq.arguments import require_type
from pykvq.errors import InvalidArgumentError
from pykvq.kv_config import KVConfig, parse_kv_config, parse_kv_configs
from pykvq.llama import Llama
from pykvq.runtime import Model

# G. Kamradt 2023, "Needle in a haystack": a fact put at a depth of a text, asked for at its end
_FACT = "\n\nThe secret number of the harbour is {number}.\n\n"
_QUESTION = "\n\nThe secret number of the harbour is"
_NUMBER = 48213
_ANSWER_TOKENS = 12
_ROOM = 64
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
GREEDY_TOKENS = 128


def needle(
    model_path: str | os.PathLike[str],
    kv: str | KVConfig | Sequence[str | KVConfig],
    *,
    text: str,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    calibrate: str | os.PathLike[str] | None = None,
    n_threads: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[dict[str, Any]]:
    """Hides a number at each depth of texts of each length and asks for it; also follows the greedy answers.

    Args:
        text: the haystack; must have as many tokens as the longest of ``lengths``.
        lengths: tokens of the whole prompt.
        depths: where the fact stands, from 0 (start) to 1 (end).
        model_path, kv, calibrate, n_threads: as for ``pykvq.fidelity``.

    Returns:
        A dict for each format and length: name, length, found (share of depths at which the number is in the answer),
        by_depth (True or False each), greedy_tokens (mean number of tokens after which the greedy answer first differs
        from that of F16, 128 where it does not).

    Raises:
        InvalidArgumentError: the text is too short.
    """
    require_type("text", text, str)
    configs = [parse_kv_config("f16"), *parse_kv_configs(kv)]
    require_length(model_path, text, lengths)
    rows: list[dict[str, Any]] = []
    n_steps = len(lengths) * len(configs) * len(depths)
    done = 0
    for length in lengths:
        reference: list[list[int]] = []
        for config in configs:
            answers: list[list[int]] = []
            found: list[bool] = []
            with Llama(
                model_path,
                kv_quant=config,
                n_ctx=length + GREEDY_TOKENS + _ROOM,
                n_threads=n_threads,
                calibrate=calibrate,
            ) as llm:
                for depth in depths:
                    answer = _ask(llm, text, length, depth)
                    answers.append(answer)
                    found.append(str(_NUMBER) in llm.detokenize(answer[:_ANSWER_TOKENS]).decode("utf-8", "replace"))
                    done += 1
                    if progress is not None:
                        progress(done / n_steps)
            reference = reference or answers
            rows.append(
                {
                    "name": config.name,
                    "length": length,
                    "found": sum(found) / len(found),
                    "by_depth": dict(zip(map(str, depths), found, strict=True)),
                    "greedy_tokens": sum(map(_common, answers, reference)) / len(answers),
                }
            )
    return rows


def require_length(model_path: str | os.PathLike[str], text: str, lengths: Sequence[int]) -> None:
    """Refuses a text that is too short to hide a number in, before anything is computed.

    Raises:
        InvalidArgumentError: it has fewer tokens than the longest prompt needs; the message has both numbers.
    """
    if not lengths:
        return
    with Model(model_path, vocab_only=True) as model:

        def count(part: str, *, add_special: bool = False) -> int:
            return len(model.tokenize(part.encode("utf-8", "replace"), add_special=add_special, parse_special=False))

        n = max(lengths) - count(_FACT.format(number=_NUMBER)) - count(_QUESTION)
        n_text = count(text, add_special=True)
    if n_text < n:
        raise InvalidArgumentError(
            f"the text has {n_text} tokens and a prompt of {max(lengths)} needs {n}: give a longer one, or a smaller "
            "--needle"
        )


def _ask(llm: Llama, text: str, length: int, depth: float) -> list[int]:
    fact = llm.tokenize(_FACT.format(number=_NUMBER), add_bos=False)
    question = llm.tokenize(_QUESTION, add_bos=False)
    haystack = llm.tokenize(text)
    n = length - len(fact) - len(question)
    at = int(n * depth)
    prompt = [*haystack[:at], *fact, *haystack[at:n], *question]
    generation = llm.start_generation(prompt, max_tokens=GREEDY_TOKENS, sampling=llm.sampling_params(temperature=0.0))
    for _ in generation:
        pass
    return list(generation.result.tokens)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first difference; GREEDY_TOKENS where there is none."""
    if list(a) == list(b):
        return GREEDY_TOKENS
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
