"""``Llama``: generation, under llama-cpp-python's argument names and with its response shapes."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from pykvq import peer_arguments, responses
from pykvq.answer import log_softmax
from pykvq.embedding import embed_texts
from pykvq.engine import Engine, common_prefix
from pykvq.errors import ContextFullError, InvalidArgumentError, LibraryError
from pykvq.generation import Generation, sample_once, token_iterator
from pykvq.prompt_cache import PromptCache
from pykvq.request import Request, callables
from pykvq.responses import Plan, Response
from pykvq.runtime import Buffer, Context, FloatArray
from pykvq.sampling import SamplingParams
from pykvq.text_model import Grammar, LogitsProcessors, StoppingCriteria, TextModel, grammar_argument


class Llama(TextModel):
    """A GGUF model with a compressed KV cache.

    Args:
        model_path: the GGUF file.
        kv_quant: the KV cache format: a preset (see ``pykvq.kv_presets()``), tiers TYPE[/VTYPE][:TOKENS]+... such as
            "f16:128+q8_0:2048+q4_ve", youngest tokens first, or a KVConfig. "auto" takes what is predicted to cost
            least and fits ``kv_memory``.
        kv_memory: with "auto": bytes, text such as "2GiB", or a fraction below 1 of the memory that is free now.
        n_sink: with tiers: first tokens of a sequence that keep the first tier's type.
        n_gpu_layers: layers kept on the GPU, -1 for all.
        main_gpu: without effect, as layers are split over all GPUs, or those of device.
        device: names of the GPUs to use, with commas between, such as "CUDA0" or "ROCm1"; "none"; None for all.
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
        lora_path, lora_scale: a LoRA adapter (GGUF) and its factor.
        draft_model: guesses the next tokens, such as ``pykvq.speculative.PromptLookup()``; the answers stay
            the same, up to how sums round.
        calibrate: the calibration for q4_ve and q2_t: "auto" takes the model's, and makes one if there is none; "never"
            goes without; else the path of one. None is what PYKVQ_CALIBRATE says, or "auto".
        verbose: print the native log to stderr (process-wide).
        progress: called with 0 to 1 during the load; returning False stops it.
        force: load even what does not seem to fit into memory.
        calibration_progress: the same for the calibration.

    Raises:
        ModelFileError: the file is missing, unreadable, damaged or not a GGUF file.
        InvalidArgumentError: a value is out of range, or an unknown ``kv_quant`` (the valid ones are listed).
        CalibrationError: the calibration is missing, damaged, or of another model.
        OutOfMemoryError: too little memory is free; the message names the largest setting that fits.
        UnsupportedModelError, AbortedError, LibraryError.

    Calls from several threads are served one after the other. An unfinished stream holds the model for its thread;
    another call in that thread ends it.
    """

    _loaded_engine: Engine | None = None

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: Sequence[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        **values: Any,
    ) -> Llama:
        """A model from the Hugging Face hub, which is downloaded first if it is not in the cache.

        Args:
            repo_id: such as "Qwen/Qwen2.5-0.5B-Instruct-GGUF".
            filename: the file's name, or a pattern such as "*q8_0.gguf" that one file matches.
            additional_files: further names or patterns: the other parts of a split model.
            local_dir, cache_dir: where to put the files.
            values: arguments of the constructor.

        Raises:
            LibraryError: huggingface_hub is not installed. InvalidArgumentError: no file matches, or several do.
            DownloadError: the hub cannot be reached, or has no such repository.
        """
        from pykvq.pretrained import download

        peer_arguments.refuse(
            "from_pretrained", {key: values.pop(key) for key in ("local_dir_use_symlinks",) if key in values}
        )
        path = download(repo_id, filename, additional_files or (), local_dir=local_dir, cache_dir=cache_dir)
        return cls(path, **values)

    def set_cache(self, cache: PromptCache | None) -> None:
        """Keeps the states of answers in a cache, such as ``pykvq.prompt_cache.RamCache()``; None ends it."""
        if cache is not None and not isinstance(cache, PromptCache):
            raise InvalidArgumentError(f"the cache must be one of pykvq.prompt_cache, got {cache!r}")
        self._engine.cache = cache

    def create_chat_completion_openai_v1(self, *args: Any, **values: Any) -> Any:
        """``create_chat_completion`` with objects of the package openai instead of dicts."""
        try:
            from openai.types.chat import ChatCompletion, ChatCompletionChunk
        except ImportError as error:
            raise LibraryError("this needs the package openai: pip install openai") from error
        answer = self.create_chat_completion(*args, **values)
        if isinstance(answer, dict):
            return ChatCompletion(**answer)
        return (ChatCompletionChunk(**chunk) for chunk in answer)

    def pooling_type(self) -> int:
        """How embeddings are pooled: -1 as the model says, 0 none, 1 mean, 2 cls, 3 last, 4 rank."""
        return self._pooling_type

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """Leading tokens that two lists have in common."""
        return common_prefix(a, b)

    @staticmethod
    def logits_to_logprobs(logits: Any, axis: int = -1) -> FloatArray:
        """Natural logarithms of the probabilities that logits stand for, along an axis."""
        values: FloatArray = np.apply_along_axis(log_softmax, axis, np.asarray(logits, dtype=np.float32))
        return values.astype(np.float32)

    @property
    def eval_tokens(self) -> list[int]:
        """The tokens in the KV cache."""
        return list(self._engine.tokens)

    def _start(self, context: Context) -> None:
        self._loaded_engine = Engine(self._model, context, self._n_ctx)

    @property
    def _engine(self) -> Engine:
        self._context  # noqa: B018 (raises if there is none)
        assert self._loaded_engine is not None
        return self._loaded_engine

    def _respond(self, plan: Plan) -> Any:
        return self._chunks(plan) if plan.stream else self._response(plan)

    def _response(self, plan: Plan) -> Response:
        writers = []
        for i, request in enumerate(plan.requests):
            with self._generation(request) as generation:
                writer = plan.make_writer(request, generation.result, i)
                for piece in generation:
                    writer.push(piece)
            writer.finish()
            writers.append(writer)
        return plan.response(writers)

    def _chunks(self, plan: Plan) -> Generator[Response, None, None]:
        writers = []
        for i, request in enumerate(plan.requests):
            with self._generation(request) as generation:
                writer = plan.make_writer(request, generation.result, i)
                writers.append(writer)
                yield from writer.start()
                for piece in generation:
                    yield from writer.push(piece)
            yield from writer.finish()
        yield from plan.last_chunks(writers)

    def _generation(self, request: Request) -> Generation:
        return Generation(self._engine, request)

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
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise InvalidArgumentError(f"sampling must come from sampling_params(), got {sampling!r}")
        (request,) = self._requests(
            1,
            prompt,
            max_tokens=max_tokens,
            stop=stop,
            sampling={},
            n_logprobs=n_logprobs,
            prompt_logprobs=prompt_logprobs,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
        )
        return self._generation(request if sampling is None else replace(request, sampling=sampling))

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
        grammar: Grammar = None,
        **sampling: Any,
    ) -> Iterator[int]:
        """Yields sampled tokens, those that end a text included, until the context is full.

        Args:
            tokens: the prompt; what the KV cache already has of it is not computed again.
            temp: the temperature.
            reset: False puts ``tokens`` after those in the KV cache instead of replacing them.
            grammar: as for ``create_completion``.
            sampling: other fields of ``SamplingParams``.
        """
        held = [] if reset else list(self._engine.tokens)
        request = Request(
            prompt=self._prompt_tokens([*held, *self._checked_tokens(tokens)]),
            sampling=self.sampling_params(
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                typical_p=typical_p,
                temperature=temp,
                repeat_penalty=repeat_penalty,
                **_known_sampling("generate", sampling),
            ),
            logits_processors=callables("logits_processor", logits_processor),
            stopping_criteria=callables("stopping_criteria", stopping_criteria),
            constraint=grammar_argument(grammar),
            draft=self._draft,
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

    def sample(
        self,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.8,
        repeat_penalty: float = 1.0,
        *,
        logits_processor: LogitsProcessors = None,
        grammar: Grammar = None,
        **sampling: Any,
    ) -> int:
        """Draws a token after the last one evaluated, without adding it to the KV cache.

        Args:
            temp: the temperature.
            logits_processor: callables (ids, scores) -> scores.
            grammar: what the token must begin with; see ``create_completion``.
            sampling: other fields of ``SamplingParams``.

        Raises:
            InvalidArgumentError: nothing has been evaluated.
        """
        request = Request(
            prompt=(),
            sampling=self.sampling_params(
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                typical_p=typical_p,
                temperature=temp,
                repeat_penalty=repeat_penalty,
                **_known_sampling("sample", sampling),
            ),
            logits_processors=callables("logits_processor", logits_processor),
            constraint=grammar_argument(grammar),
        )
        with self._engine.turn:
            return sample_once(self._engine, request)

    def create_embedding(self, input: str | Sequence[str], model: str | None = None) -> Response:
        """Embeddings of one text or several, in the shape of OpenAI's response.

        Raises:
            InvalidArgumentError: the model was loaded without embedding=True, or a text is empty.
        """
        texts: Any = [input] if isinstance(input, (str, bytes)) else input
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
        texts = self._embedding_tokens(input, truncate, self._context.info.n_batch)
        with self._engine.turn:
            self._engine.reset()
            vectors = embed_texts(self._context, texts, normalize=normalize)
        result = vectors[0] if isinstance(input, str) else vectors
        return (result, sum(map(len, texts))) if return_count else result

    # --- state

    @property
    def n_tokens(self) -> int:
        """Tokens in the KV cache now."""
        return len(self._engine.tokens)

    def reset(self) -> None:
        """Empties the KV cache."""
        with self._engine.turn:
            self._engine.reset()

    def save_state(self) -> bytes:
        """The tokens and their KV cache, for ``load_state``."""
        with self._engine.turn:
            return self._engine.save_state()

    def load_state(self, state: Buffer) -> None:
        """Goes back to a saved state, given as bytes or another contiguous buffer.

        Raises:
            StateError: damaged, or of another model or KV format; nothing is changed then.
            InvalidArgumentError: not bytes.
        """
        with self._engine.turn:
            self._engine.load_state(state)

    def abort(self) -> None:
        """Ends the running computation with AbortedError. Any thread may call it."""
        self._context.abort()

    def close(self) -> None:
        """Ends what is running and frees all native memory. Any thread may call it; again does nothing."""
        if self._loaded_engine is not None:
            self._loaded_engine.turn.close()
        super().close()


def _known_sampling(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams among further arguments; what else there is, is refused."""
    names = {field.name for field in fields(SamplingParams)}
    peer_arguments.refuse(method, {name: value for name, value in given.items() if name not in names})
    return {name: value for name, value in given.items() if name in names}
