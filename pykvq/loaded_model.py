"""A loaded model with its context: tokens and text, sizes, saved state, closing. ``Llama`` adds generation to it."""

from __future__ import annotations

import logging
import operator
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from pykvq import native, peer_arguments
from pykvq.arguments import require_type
from pykvq.calibration import CalibrationInfo
from pykvq.calibration.automatic import calibration_for
from pykvq.chat_template import ChatTemplate, Message
from pykvq.embedding import MAX_BATCH_TEXTS
from pykvq.errors import ChatTemplateError, ContextFullError, InvalidArgumentError, UnsupportedModelError
from pykvq.handles import FieldValue, ProgressCallback
from pykvq.kv_auto import AutomaticChoice, choose_format, parse_memory
from pykvq.kv_config import (
    DEFAULT_PRESET,
    DEFAULT_SINKS,
    OWN_TYPES,
    KVConfig,
    kv_presets,
    parse_kv_config,
)
from pykvq.kv_layers import with_calibration
from pykvq.measured import recall, warning
from pykvq.predict import kv_bytes, require_memory
from pykvq.runtime import Context, ContextInfo, Model
from pykvq.speculative import Draft

logger = logging.getLogger("pykvq")

AUTOMATIC = "auto"
# llama.cpp's value for "draw a seed"; -1 means the same
RANDOM_SEED = 0xFFFFFFFF
# limits of pykvq_context_create
_MAX_N_CTX = 2**30
_MAX_N_BATCH = 2**20
_TYPE_KEYS = ("type_k", "type_v")


class LoadedModel:
    """A GGUF model with a context. The arguments and what they may raise are described at ``pykvq.Llama``.

    A subclass says with ``_start`` what is to compute on the context.
    """

    _n_slots = 1

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        kv_quant: str | KVConfig = DEFAULT_PRESET,
        kv_memory: str | float | None = None,
        n_sink: int = DEFAULT_SINKS,
        n_gpu_layers: int = 0,
        main_gpu: int = 0,
        device: str | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        seed: int = RANDOM_SEED,
        n_ctx: int = 4096,
        n_batch: int = 512,
        n_ubatch: int | None = None,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = None,
        pooling_type: int = -1,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float | None = None,
        yarn_attn_factor: float | None = None,
        yarn_beta_fast: float | None = None,
        yarn_beta_slow: float | None = None,
        yarn_orig_ctx: int | None = None,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool | None = None,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        last_n_tokens_size: int = 64,
        chat_template: str | None = None,
        type_k: str | int | None = None,
        type_v: str | int | None = None,
        lora_path: str | os.PathLike[str] | None = None,
        lora_scale: float = 1.0,
        draft_model: Draft | None = None,
        calibrate: str | os.PathLike[str] | None = None,
        verbose: bool = False,
        progress: ProgressCallback | None = None,
        calibration_progress: ProgressCallback | None = None,
        force: bool = False,
        **unsupported: Any,
    ) -> None:
        peer_arguments.refuse("__init__", unsupported)
        require_type("model_path", model_path, str, os.PathLike)
        for name, size in (("n_ctx", n_ctx), ("n_batch", n_batch), ("last_n_tokens_size", last_n_tokens_size)):
            require_type(name, size, int)
        require_type("n_ubatch", n_ubatch, int, optional=True)
        n_ctx, n_batch, n_ubatch = int(n_ctx), int(n_batch), None if n_ubatch is None else int(n_ubatch)
        require_type("flash_attn", flash_attn, bool, optional=True)
        require_type("device", device, str, optional=True)
        require_type("embedding", embedding, bool)
        require_type("chat_template", chat_template, str, optional=True)
        require_type("lora_path", lora_path, str, os.PathLike, optional=True)
        require_type("lora_scale", lora_scale, float)
        self._choice: AutomaticChoice | None = None
        is_automatic = kv_quant == AUTOMATIC and type_k is None and type_v is None
        if is_automatic != (kv_memory is not None):
            raise InvalidArgumentError(f"kv_quant={AUTOMATIC!r} and kv_memory belong together: give both or neither")
        budget = parse_memory(kv_memory) if is_automatic else 0
        preset = DEFAULT_PRESET if is_automatic else kv_quant
        self._kv = parse_kv_config(preset, type_k=type_k, type_v=type_v, n_sink=n_sink)
        if embedding and self._kv.is_tiered:  # nothing grows old in a cache that each text empties
            self._kv = kv_presets()["f16"]
        _check_sizes(n_ctx, n_batch, n_batch if n_ubatch is None else n_ubatch)
        _check_flash_attention(self._kv, flash_attn)
        self.model_path = os.fspath(model_path)
        self.verbose = verbose
        self._last_n_tokens = last_n_tokens_size
        self._template_source = chat_template
        self._template: ChatTemplate | None = None
        self._makes_embeddings = embedding
        self._draft = draft_model
        self._pooling_type = pooling_type
        self._loaded_context: Context | None = None
        self._calibration: CalibrationInfo | None = None
        self._measured: dict[str, Any] | None = None
        self.set_seed(seed)
        native.set_verbose(verbose)
        model_params: dict[str, FieldValue] = {
            "n_gpu_layers": n_gpu_layers,
            "main_gpu": main_gpu,
            "device": device,
            "use_mmap": use_mmap,
        }
        context_params: dict[str, FieldValue] = {
            "n_batch": n_batch,
            "flash_attn": {None: -1, False: 0, True: 1}[flash_attn],
            "pooling_type": pooling_type,
            "rope_freq_base": rope_freq_base,
            "rope_freq_scale": rope_freq_scale,
            "rope_scaling": rope_scaling_type,
            "yarn_ext_factor": yarn_ext_factor,
            "yarn_attn_factor": yarn_attn_factor,
            "yarn_beta_fast": yarn_beta_fast,
            "yarn_beta_slow": yarn_beta_slow,
            "yarn_orig_ctx": yarn_orig_ctx,
            "embeddings": embedding,
            "offload_kqv": offload_kqv,
            "op_offload": op_offload,
            "swa_full": swa_full,
        }
        if not (force or vocab_only):
            sizes = self._sizes(self._kv, n_ctx, n_batch, n_ubatch)
            if n_ctx == 0 and not embedding:
                sizes["n_ubatch"] = n_ubatch  # chosen once the model's context is known
            require_memory(
                model_path,
                self._kv,
                n_ctx * self._n_slots,
                model_params,
                {**context_params, **sizes},
                calibrated=self._kv.takes_calibration(calibrate),
            )
        self._model = Model(model_path, progress=progress, vocab_only=vocab_only, use_mlock=use_mlock, **model_params)
        if vocab_only:
            return
        n_ctx = n_ctx or self._model.info.n_ctx_train
        try:
            _check_draft(self._model, draft_model)
            self._calibration = calibration_for(
                self._model, model_path, self._kv, calibrate, n_ctx, n_threads, calibration_progress
            )
            self._kv = with_calibration(self._kv, self._calibration)
            if is_automatic:

                def n_bytes(kv: KVConfig, tokens: int) -> int:
                    sizes = {**context_params, **self._sizes(kv, tokens, n_batch, n_ubatch)}
                    return kv_bytes(self._model, kv, tokens * self._n_slots, **sizes)[0]

                self._choice = choose_format(
                    self._calibration, n_ctx, budget, n_sink=n_sink, n_bytes=n_bytes, tiers=not embedding
                )
                self._kv = self._choice.kv
                logger.info("kv_quant=%s: %s", AUTOMATIC, self._choice)
            self._measured = recall(model_path, str(self._kv))
            if self._measured is not None and (text := warning(self._kv.name, self._measured)):
                logger.warning("%s", text)
            self._loaded_context = Context(
                self._model,
                self._kv,
                n_ctx=n_ctx * self._n_slots,
                n_threads=n_threads,
                n_threads_batch=n_threads if n_threads_batch is None else n_threads_batch,
                force=force,
                calibration=None if self._calibration is None else os.fspath(self._calibration.path),
                **context_params,
                **self._sizes(self._kv, n_ctx, n_batch, n_ubatch),
            )
            if n_fallback := self._loaded_context.info.n_attention_fallback:
                logger.warning(
                    "the GPU does not compute attention over %s: the CPU does, for %d layers, which is slow",
                    self._kv,
                    n_fallback,
                )
            if lora_path is not None:
                self._loaded_context.add_lora(lora_path, lora_scale)
            # llama.cpp rounds the cells up to 256; who asks for fewer tokens gets no more
            self._n_ctx = min(n_ctx, self._loaded_context.info.n_ctx_seq)
            self._start(self._loaded_context)
        except BaseException:
            self.close()
            raise

    def _sizes(self, kv: KVConfig, n_ctx: int, n_batch: int, n_ubatch: int | None) -> dict[str, FieldValue]:
        """Fields of a context in which each slot has n_ctx tokens."""
        if self._makes_embeddings:  # a text is pooled within a micro-batch
            return {"n_seq_max": MAX_BATCH_TEXTS, "kv_unified": True, "n_ubatch": n_batch}
        return {
            "n_seq_max": self._n_slots,
            # slots have a cache each, so that no token looks at the cells of others
            "kv_unified": self._n_slots == 1,
            "n_ubatch": min(n_batch, n_ubatch or kv.micro_batch(n_ctx)),
        }

    def _start(self, context: Context) -> None:
        """Begins to use the new context."""

    # --- tokens and text ---

    def tokenize(self, text: str | bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: text, or its UTF-8 bytes.
            add_bos: add the tokens that the model wants around a text, if it wants any.
            special: read "<|im_end|>" and the like as the tokens they name.
        """
        return self._model.tokenize(_utf8(text), add_special=add_bos, parse_special=special)

    def detokenize(
        self, tokens: Iterable[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens, which may begin or end inside a code point.

        Args:
            tokens: token ids.
            prev_tokens: the tokens before them; a leading space is kept if there are any.
            special: write special tokens out instead of leaving them away.
        """
        ids = self._checked_tokens(tokens)
        data = b"".join(self._model.token_bytes(token, special=special) for token in ids)
        starts_text = not prev_tokens and ids[:1] == [self.token_bos()]
        # SentencePiece models put a space before the first word of a text
        return data[1:] if starts_text and not special and data.startswith(b" ") else data

    def token_bos(self) -> int:
        """The id of the token that begins a text, -1 if there is none."""
        return self._model.info.token_bos

    def token_eos(self) -> int:
        """The id of the token that ends a text, -1 if there is none."""
        return self._model.info.token_eos

    def token_eot(self) -> int:
        """The id of the token that ends a turn, -1 if there is none."""
        return self._model.info.token_eot

    def token_nl(self) -> int:
        """The id of the line break, -1 if there is none."""
        return self._model.info.token_nl

    def chat_prompt(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt that the chat template makes of messages.

        Args:
            messages: dicts with "role" and "content".
            variables: ``tools``, ``documents``, and whatever else the template reads.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
            InvalidArgumentError: a message is not one.
        """
        if self._template is None:
            self._template = self._compile_template()
        return self._template.render(messages, **variables)

    @property
    def template_source(self) -> str | None:
        """The chat template's text, None if there is none."""
        if self._template_source is None:
            self._template_source = self._model.chat_template()
        return self._template_source

    def _compile_template(self) -> ChatTemplate:
        source = self.template_source
        if source is None:
            raise ChatTemplateError(
                f"{os.path.basename(self.model_path)} has no chat template: pass chat_template=..., or complete raw "
                "text (create_completion, or pykvq-run with -p and without --chat)"
            )
        info = self._model.info
        return ChatTemplate(
            source, bos_token=self._token_text(info.token_bos), eos_token=self._token_text(info.token_eos)
        )

    def _token_text(self, token: int) -> str:
        return "" if token < 0 else self._model.token_bytes(token, special=True).decode("utf-8", "replace")

    # --- sizes ---

    @property
    def metadata(self) -> dict[str, str]:
        """All scalar GGUF keys of the model file, as text."""
        return self._model.metadata()

    def description(self) -> str:
        """One line about the model, such as "llama 134M Q4_1"."""
        return self._model.description()

    def n_vocab(self) -> int:
        """Number of tokens in the vocabulary."""
        return self._model.info.n_vocab

    def n_bytes(self) -> int:
        """Bytes of the weights."""
        return self._model.info.n_bytes

    def n_embd(self) -> int:
        """Values of an embedding."""
        return self._model.info.n_embd

    def n_ctx(self) -> int:
        """Tokens that prompt and answer may have together."""
        self._context  # noqa: B018 (raises if there is none)
        return self._n_ctx

    def n_ctx_train(self) -> int:
        """Tokens that the model was trained on at once."""
        return self._model.info.n_ctx_train

    @property
    def n_tokens(self) -> int:
        """Tokens in the KV cache now."""
        return sum(self._context.pos_max(seq) + 1 for seq in range(self._n_slots))

    def kv_info(self) -> dict[str, Any]:
        """What the KV cache is and takes, all slots together (``n_ctx`` is that of one).

        Returns:
            kv_quant, tiers_spec: the format's name, and its tiers as text.
            kv_bytes, kv_bytes_f16, ratio: bytes really allocated, those of a cache of n_ctx in F16, and their quotient.
            bits_per_element: bits per element of K and V of n_ctx tokens, all included: scales, sinks, window, room for
                new tokens.
            n_ctx, n_tokens: room, and tokens held.
            tiers: a dict each, youngest first: type_k, type_v, n_capacity and n_used in tokens, n_bytes,
                bits_per_element, n_requantized (tokens that came down into it so far), layers (those of other types:
                {"k7": "q8_0"} for the keys of layer 7).
            automatic: with kv_quant="auto": what was chosen, and the KLD predicted for it.
            calibration: None, or a dict: path, text, n_tokens, n_positions (the longest context it is for),
                spectral_keys, n_bytes (of the transforms in memory), sensitivity (a dict for each layer: layer, k, v,
                what an error in its keys and values costs).
            measured: what ``pykvq.fidelity`` last said of this format on this model, None if it was never asked:
                kld_mean, kld_sem (nats), same_top, ppl_change, nonfinite (shares), n_ctx, n_compared, float_weights; a
                figure that was not finite is None.
            flash_attn, attention_route: how attention is computed, and where: on the CPU, or on a GPU and for how many
                layers. It names layers on a GPU whose attention falls back to the CPU.
            compute_bytes: scratch memory of the computation.
        """
        info = self._context.read_info()
        n_tokens = self.n_tokens
        tiers = [
            {
                **asdict(tier),
                "bits_per_element": own.bits_per_element(),
                "layers": own.types_of_layers(),
            }
            for tier, own in zip(self._context.read_tiers(), self._kv.tiers, strict=False)
        ]
        if not tiers:
            only = self._kv.tiers[0]
            tiers = [
                {
                    "type_k": only.type_k,
                    "type_v": only.type_v,
                    "n_capacity": info.n_ctx,
                    "n_used": n_tokens,
                    "n_bytes": info.kv_bytes,
                    "n_requantized": 0,
                    "bits_per_element": only.bits_per_element(),
                    "layers": {},
                }
            ]
        return {
            "kv_quant": self._kv.name,
            "tiers_spec": str(self._kv),
            "kv_bytes": info.kv_bytes,
            "kv_bytes_f16": info.kv_bytes_f16,
            "ratio": info.kv_bytes / info.kv_bytes_f16 if info.kv_bytes_f16 else 1.0,
            "bits_per_element": 8 * info.kv_bytes / info.kv_elements if info.kv_elements else 0.0,
            "n_ctx": self.n_ctx(),
            "n_tokens": n_tokens,
            "tiers": tiers,
            "automatic": None if self._choice is None else str(self._choice),
            "calibration": _calibration_dict(self._calibration, info.calibration_bytes),
            "measured": self._measured,
            "flash_attn": info.flash_attn,
            "attention_route": _attention_route([str(tier[key]) for tier in tiers for key in _TYPE_KEYS], info),
            "compute_bytes": info.compute_bytes,
        }

    # --- state ---

    def set_seed(self, seed: int) -> None:
        """Sets where the seeds of calls that name none come from; -1 draws it."""
        require_type("seed", seed, int)
        self._seeds = random.Random(None if seed in (-1, RANDOM_SEED) else int(seed))

    def close(self) -> None:
        """Ends what is running and frees all native memory. Any thread may call it; again does nothing."""
        if self._loaded_context is not None:
            self._loaded_context.close()
        self._model.close()

    def __enter__(self: _Self) -> _Self:  # typing.Self needs Python 3.11
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def _context(self) -> Context:
        if self._loaded_context is None:
            raise InvalidArgumentError("this model was loaded with vocab_only=True: load it without to compute")
        return self._loaded_context

    def _prompt_tokens(self, prompt: str | bytes | Sequence[int]) -> tuple[int, ...]:
        """The tokens of a prompt, with BOS exactly once where the model wants it; checked against the context."""
        if isinstance(prompt, (str, bytes)):
            tokens = self.tokenize(prompt, add_bos=True, special=True)
            bos = self.token_bos()
            if bos >= 0 and self._model.info.add_bos and tokens[:2] == [bos, bos]:
                del tokens[0]  # a chat template that writes BOS itself
            tokens = tokens or ([bos] if bos >= 0 else [])
        else:
            tokens = self._checked_tokens(prompt, "the prompt")
        if not tokens:
            raise InvalidArgumentError("the prompt is empty, and the model has no token that begins a text")
        n_ctx = self.n_ctx()
        if len(tokens) >= n_ctx:
            raise ContextFullError(
                f"Requested tokens ({len(tokens)}) exceed context window of {n_ctx}, of which one token at least is "
                "for the answer: shorten the prompt, or raise n_ctx"
            )
        return tuple(tokens)

    def _checked_tokens(self, tokens: Iterable[int], name: str = "tokens") -> list[int]:
        try:
            ids = [operator.index(token) for token in tokens]
        except TypeError as error:
            raise InvalidArgumentError(f"{name} must be text or a list of token ids: {error}") from error
        n_vocab = self.n_vocab()
        wrong = next((token for token in ids if not 0 <= token < n_vocab), None)
        if wrong is not None:
            raise InvalidArgumentError(f"token {wrong} is not in the vocabulary, whose ids go from 0 to {n_vocab - 1}")
        return ids


def _utf8(text: str | bytes) -> bytes:
    require_type("the text", text, str, bytes)
    if isinstance(text, bytes):
        return text
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"the text is not valid Unicode: {error.reason} at character {error.start}"
        ) from error


def _check_sizes(n_ctx: int, n_batch: int, n_ubatch: int) -> None:
    if not 0 <= n_ctx <= _MAX_N_CTX:
        raise InvalidArgumentError(
            f"n_ctx must be 0 (the model's training context) or between 1 and {_MAX_N_CTX} tokens, got {n_ctx}"
        )
    for name, value in (("n_batch", n_batch), ("n_ubatch", n_ubatch)):
        if not 1 <= value <= _MAX_N_BATCH:
            raise InvalidArgumentError(f"{name} must be between 1 and {_MAX_N_BATCH} tokens, got {value}")


def _check_flash_attention(kv: KVConfig, flash_attn: bool | None) -> None:
    if flash_attn is False and kv.needs_flash_attention:
        raise InvalidArgumentError(f"the KV format {kv} needs flash attention: leave flash_attn out, or take f16")


def _check_draft(model: Model, draft: Draft | None) -> None:
    if draft is not None and not callable(draft):
        raise InvalidArgumentError(f"draft_model must be callable, such as PromptLookup(), got {draft!r}")
    if draft is not None and (model.info.is_recurrent or model.info.is_hybrid or model.info.n_swa):
        raise UnsupportedModelError(
            "draft_model needs a model that can take back tokens, which recurrent and sliding-window ones cannot: "
            "leave it out"
        )


def _calibration_dict(calibration: CalibrationInfo | None, n_bytes: int) -> dict[str, Any] | None:
    if calibration is None:
        return None
    return {
        "path": os.fspath(calibration.path),
        "text": calibration.text,
        "n_tokens": calibration.n_tokens,
        "n_positions": calibration.n_positions,
        "spectral_keys": calibration.spectral_keys,
        "n_bytes": n_bytes,
        "sensitivity": [asdict(layer) for layer in calibration.sensitivity],
    }


def _attention_route(types: Sequence[str], info: ContextInfo) -> str:
    """Whose attention runs where; types are those of the tiers' K and V, two a tier."""
    tiered = len(types) > 2
    if info.n_attention_device == 0:
        route = _cpu_attention_route(tiered, info.flash_attn)
        if info.n_attention_fallback:
            route += f", for {info.n_attention_fallback} layers on a GPU that does not compute it"
        return route
    own = tiered or not set(OWN_TYPES).isdisjoint(types)
    owner = "pykvq tiered" if tiered else "pykvq" if own else "llama.cpp"
    return f"{owner} flash attention (gpu, {info.n_attention_device} layers)"


def _cpu_attention_route(tiered: bool, flash_attn: bool) -> str:
    if tiered:
        return "pykvq tiered flash attention (cpu)"
    if not flash_attn:
        return "llama.cpp attention (cpu)"
    # as native/cpu reads it, see kvq-cpu.h
    owner = "llama.cpp" if os.environ.get("PYKVQ_FLASH_ATTN") == "ggml" else "pykvq"
    return f"{owner} flash attention (cpu)"


_Self = TypeVar("_Self", bound=LoadedModel)
