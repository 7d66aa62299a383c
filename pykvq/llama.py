"""``Llama``: generation, under llama-cpp-python's argument names and with its response shapes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pykvq import responses
from pykvq.chat_template import Message
from pykvq.embedding import Embedding, embed_tokens
from pykvq.errors import ContextFullError, InvalidArgumentError
from pykvq.generation import (
    Generation,
    LogitsProcessor,
    Request,
    StoppingCriterion,
    callables,
    sample_once,
    token_iterator,
)
from pykvq.loaded_model import RANDOM_SEED, LoadedModel
from pykvq.responses import Response, ResponseHead
from pykvq.sampling import SamplingParams
from pykvq.text_stream import stop_strings

_MAX_LOGPROBS = 100

LogitsProcessors = Sequence[LogitsProcessor] | LogitsProcessor | None
StoppingCriteria = Sequence[StoppingCriterion] | StoppingCriterion | None


class Llama(LoadedModel):
    """A GGUF model with a compressed KV cache.

    Args:
        model_path: the GGUF file.
        kv_quant: the KV cache format: a preset (see ``pykvq.kv_presets()``), tiers TYPE[/VTYPE][:TOKENS]+... such as
            "f16:128+q8_0:2048+q4_ve", youngest tokens first, or a KVConfig.
        n_sink: with tiers: first tokens of a sequence that keep the first tier's type.
        n_gpu_layers: layers kept on the GPU, -1 for all.
        main_gpu: the GPU to use.
        vocab_only: load the tokenizer and the metadata only.
        use_mmap, use_mlock: map the file; keep it from being swapped.
        seed: where the seeds of calls that name none come from; -1 draws it.
        n_ctx: tokens that prompt and answer may have together, 0 for the model's training context.
        n_batch, n_ubatch: most prompt tokens that a native call takes, and that it computes at once; None chooses. With
            tiers both are the smaller of the two.
        n_threads, n_threads_batch: threads for single tokens and for prompts; None for the physical cores.
        rope_scaling_type, rope_freq_base, rope_freq_scale, yarn_*: position scaling; None or 0 leaves the model's.
        pooling_type: of embeddings: -1 the model's, 0 none, 1 mean, 2 cls, 3 last, 4 rank.
        embedding: compute embeddings instead of text.
        offload_kqv, op_offload: keep the KV cache, and large operations, on the GPU.
        flash_attn: None chooses; a quantized V needs it.
        swa_full: keep all tokens in the cache of sliding-window layers.
        last_n_tokens_size: tokens of the answer that the penalties look back at, -1 for all.
        chat_template: a jinja2 template in place of the model's own.
        type_k, type_v: names of KV types: a cache without tiers, in place of ``kv_quant``.
        verbose: print the native log to stderr (process-wide).
        progress: called with 0 to 1 during the load; returning False stops it.
        force: load even what does not seem to fit into memory.

    Raises:
        ModelFileError: the file is missing, unreadable, damaged or not a GGUF file.
        InvalidArgumentError: a value is out of range, or an unknown ``kv_quant`` (the valid ones are listed).
        OutOfMemoryError: too little memory is free; the message names the largest setting that fits.
        UnsupportedModelError, AbortedError, LibraryError.

    Calls from several threads are served one after the other. An unfinished stream holds the model for its thread;
    another call in that thread ends it.
    """

    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | Sequence[str] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteria = None,
        logits_processor: LogitsProcessors = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> Any:
        """Completes a text.

        Args:
            prompt: text, or token ids (to which no BOS is added).
            suffix: text after the gap; not supported, must be None.
            max_tokens: most tokens of the answer; None or <= 0 means until the context is full.
            temperature, top_k, top_p, min_p, typical_p: how the next token is drawn; temperature 0 is greedy.
            logprobs: report the log probability of each token and of that many likeliest ones.
            echo: put the prompt before the answer.
            stop: strings that end the answer and are not part of it.
            frequency_penalty, presence_penalty, repeat_penalty: make tokens of the answer less likely to come again.
            stream: return an iterator of chunks instead of one dict.
            seed: of the draw; None takes the next one of the model's seeds, -1 a random one.
            mirostat_mode, mirostat_tau, mirostat_eta: 1 or 2 aims at a constant surprise (Basu et al. 2020,
                arXiv:2007.14966) instead of filtering.
            model: the name to report.
            stopping_criteria: callables (ids, scores) -> bool that end the answer before the token just drawn.
            logits_processor: callables (ids, scores) -> scores, before everything else.
            logit_bias: added to the logits, by token id.

        Returns:
            A dict in the shape of OpenAI's text_completion, or an iterator of such chunks.

        Raises:
            ContextFullError: the prompt does not fit; the message has both numbers.
            InvalidArgumentError, AbortedError, BusyError, ClosedError.
        """
        if suffix is not None:
            raise InvalidArgumentError("suffix is not supported: put the whole prompt, with its markers, in prompt")
        generation = self.start_generation(
            prompt,
            max_tokens=max_tokens,
            stop=stop,
            sampling=self.sampling_params(
                seed=seed,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                typical_p=typical_p,
                repeat_penalty=repeat_penalty,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                mirostat_mode=mirostat_mode,
                mirostat_tau=mirostat_tau,
                mirostat_eta=mirostat_eta,
                logit_bias=logit_bias,
            ),
            n_logprobs=_checked_logprobs("logprobs", logprobs),
            prompt_logprobs=echo and logprobs is not None,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
        )
        prompt_text = self._prompt_text(prompt) if echo or logprobs is not None else ""
        head = ResponseHead(
            model=self.model_path if model is None else model,
            prompt_text=prompt_text if echo else "",
            text_offset=len(prompt_text),
        )
        return responses.completion_chunks(generation, head) if stream else responses.completion(generation, head)

    __call__ = create_completion

    def create_chat_completion(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: LogitsProcessors = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answers a chat, through the model's chat template.

        Args:
            messages: dicts with "role" and "content".
            tools: function descriptions for the template.
            logprobs, top_logprobs: report each token's log probability, and that many likeliest ones.
            chat_template_kwargs: further variables of the template, such as ``{"enable_thinking": False}``.
            max_tokens and the rest: as in ``create_completion``.

        Returns:
            A dict in the shape of OpenAI's chat.completion, or an iterator of chat.completion.chunk dicts.

        Raises:
            ChatTemplateError: no template, or it refuses the messages. ContextFullError: the chat does not fit.
            InvalidArgumentError, AbortedError, BusyError, ClosedError.
        """
        if top_logprobs is not None and not logprobs:
            raise InvalidArgumentError(f"top_logprobs={top_logprobs} needs logprobs=True")
        generation = self.start_generation(
            self.chat_prompt(messages, tools=tools, **(chat_template_kwargs or {})),
            max_tokens=max_tokens,
            stop=stop,
            sampling=self.sampling_params(
                seed=seed,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                typical_p=typical_p,
                repeat_penalty=repeat_penalty,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                mirostat_mode=mirostat_mode,
                mirostat_tau=mirostat_tau,
                mirostat_eta=mirostat_eta,
                logit_bias=logit_bias,
            ),
            n_logprobs=_checked_logprobs("top_logprobs", top_logprobs or 0) if logprobs else None,
            logits_processor=logits_processor,
        )
        head = ResponseHead(model=self.model_path if model is None else model)
        if stream:
            return responses.chat_completion_chunks(generation, head)
        return responses.chat_completion(generation, head)

    def _prompt_text(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self.detokenize(prompt).decode("utf-8", "replace")

    def start_generation(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampling: SamplingParams | None = None,
        n_logprobs: int | None = None,
        prompt_logprobs: bool = False,
        logits_processor: LogitsProcessors = None,
        stopping_criteria: StoppingCriteria = None,
    ) -> Generation:
        """An answer in the making: iterate over it for pieces of text; its ``result`` has tokens and timings.

        The prompt is checked at once; nothing is computed before the first step.

        Args:
            prompt: text, or token ids.
            sampling: see ``sampling_params``; None for the defaults.
            n_logprobs: number of likeliest tokens to report with each token, None for no log probabilities.
            prompt_logprobs: report those of the prompt too.
            max_tokens, stop, logits_processor, stopping_criteria: as in ``create_completion``.
        """
        if self._makes_embeddings:
            raise InvalidArgumentError("this model was loaded with embedding=True: load it without to generate text")
        request = Request(
            prompt=self._prompt_tokens(prompt),
            max_tokens=max_tokens,
            sampling=sampling or self.sampling_params(),
            stop=stop_strings(stop),
            n_logprobs=n_logprobs,
            prompt_logprobs=prompt_logprobs,
            logits_processors=callables("logits_processor", logits_processor),
            stopping_criteria=callables("stopping_criteria", stopping_criteria),
        )
        return Generation(self._engine, request)

    def sampling_params(
        self, *, seed: int | None = None, logit_bias: Mapping[int, float] | None = None, **values: Any
    ) -> SamplingParams:
        """Sampling parameters with a seed drawn from the model's seeds where none is given."""
        if seed is None:
            seed = self._seeds.getrandbits(31)
        elif seed in (-1, RANDOM_SEED):
            seed = random.SystemRandom().getrandbits(31)
        bias = {int(token): float(value) for token, value in (logit_bias or {}).items()}
        self._checked_tokens(bias)
        return SamplingParams(seed=seed, logit_bias=bias, last_n_tokens=self._last_n_tokens, **values)

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.8,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        *,
        logits_processor: LogitsProcessors = None,
        stopping_criteria: StoppingCriteria = None,
        **sampling: Any,
    ) -> Iterator[int]:
        """Yields sampled tokens, those that end a text included, until the context is full.

        Args:
            tokens: the prompt; what the KV cache already has of it is not computed again.
            temp: the temperature.
            reset: False puts ``tokens`` after those in the KV cache instead of replacing them.
            sampling: other fields of ``SamplingParams``.
        """
        held = [] if reset else list(self._engine.tokens)
        request = Request(
            prompt=self._prompt_tokens([*held, *tokens]),
            sampling=self.sampling_params(
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                typical_p=typical_p,
                temperature=temp,
                repeat_penalty=repeat_penalty,
                **sampling,
            ),
            logits_processors=callables("logits_processor", logits_processor),
            stopping_criteria=callables("stopping_criteria", stopping_criteria),
        )
        return token_iterator(self._engine, request)

    def eval(self, tokens: Sequence[int]) -> None:
        """Computes tokens after those in the KV cache.

        Raises:
            ContextFullError: they do not fit; the message has both numbers.
        """
        ids = self._checked_tokens(tokens)
        with self._engine.turn:
            self._engine.sync()
            if len(ids) > self._engine.n_free:
                raise ContextFullError(
                    f"{len(ids)} more tokens do not fit: {self.n_tokens} of {self.n_ctx()} are in use; "
                    "call reset(), or raise n_ctx"
                )
            self._engine.evaluate(ids)

    def sample(self, temp: float = 0.8, logits_processor: LogitsProcessors = None, **sampling: Any) -> int:
        """Draws a token after the last one evaluated, without adding it to the KV cache.

        Args:
            temp: the temperature.
            logits_processor: callables (ids, scores) -> scores.
            sampling: other fields of ``SamplingParams``.

        Raises:
            InvalidArgumentError: nothing has been evaluated.
        """
        params = self.sampling_params(temperature=temp, **sampling)
        with self._engine.turn:
            return sample_once(self._engine, params, callables("logits_processor", logits_processor))

    def create_embedding(self, input: str | Sequence[str], model: str | None = None) -> Response:
        """Embeddings of one text or several, in the shape of OpenAI's response.

        Raises:
            InvalidArgumentError: the model was loaded without embedding=True, or a text is empty.
        """
        texts = [input] if isinstance(input, str) else list(input)
        vectors, n_tokens = self.embed(texts, return_count=True)
        return responses.embeddings(vectors, n_tokens, self.model_path if model is None else model)

    def embed(
        self, input: str | Sequence[str], normalize: bool = False, truncate: bool = True, return_count: bool = False
    ) -> Any:
        """The embedding of a text (n_embd floats, or one such list a token without pooling), or a list of them.

        Args:
            normalize: scale to length 1.
            truncate: cut texts to n_batch tokens instead of refusing them.
            return_count: return (embeddings, number of tokens).

        Raises:
            InvalidArgumentError: the model was loaded without embedding=True, or a text is empty or too long.
        """
        if not self._makes_embeddings:
            raise InvalidArgumentError("this model was loaded to generate text: load it with embedding=True")
        texts = [input] if isinstance(input, str) else list(input)
        vectors: list[Embedding] = []
        n_tokens = 0
        for text in texts:
            tokens = self.tokenize(text)
            tokens = tokens[: self._engine.context.info.n_batch] if truncate else tokens
            n_tokens += len(tokens)
            with self._engine.turn:
                vectors.append(embed_tokens(self._engine, tokens, normalize=normalize))
        result = vectors[0] if isinstance(input, str) else vectors
        return (result, n_tokens) if return_count else result


def _checked_logprobs(name: str, value: int | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not 0 <= value <= _MAX_LOGPROBS:
        raise InvalidArgumentError(f"{name} must be between 0 and {_MAX_LOGPROBS} tokens, got {value!r}")
    return value
