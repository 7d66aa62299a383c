"""Thin typed wrappers over the C API: Model, Context and Sampler own one native handle each.

Rules that keep the native side safe: a handle is freed once and never while it is in use, a Context and a Sampler keep
their Model alive, and a call on a closed object raises ClosedError. All token, position and sequence ids are int32.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvq import native
from pykvq.errors import CalibrationError, ClosedError, InvalidArgumentError, ModelFileError, UnsupportedModelError
from pykvq.handles import (
    Closeable,
    FieldValue,
    Handle,
    HandleOwner,
    ProgressCallback,
    ProgressGuard,
    context_params,
    encoded_path,
    fill_struct,
    int8_pointer,
    int32_pointer,
    read_string,
    require_own_process,
)
from pykvq.kv_config import KVConfig
from pykvq.sampling import SamplingParams

FloatArray = npt.NDArray[np.float32]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ModelInfo:
    """What a model is, as ``pykvq_model_info`` tells it. A token id of -1 means that the model has no such token."""

    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_swa: int
    n_vocab: int
    n_params: int
    n_bytes: int
    token_bos: int
    token_eos: int
    token_eot: int
    token_nl: int
    token_pad: int
    token_fim_prefix: int
    token_fim_suffix: int
    token_fim_middle: int
    add_bos: bool
    add_eos: bool
    has_encoder: bool
    has_decoder: bool
    is_recurrent: bool
    is_hybrid: bool


@dataclass(frozen=True)
class ContextInfo:
    """Sizes of a context in tokens and bytes, as ``pykvq_context_info`` tells them."""

    n_ctx: int
    n_ctx_seq: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_threads: int
    n_threads_batch: int
    kv_bytes: int
    kv_bytes_f16: int
    kv_elements: int
    compute_bytes: int
    flash_attn: bool
    n_attention_device: int
    n_attention_fallback: int
    can_shift: bool
    calibration_bytes: int


@dataclass(frozen=True)
class TierInfo:
    """A tier of a KV cache as it is now, as ``pykvq_tier_info`` tells it; capacity and use in tokens."""

    type_k: str
    type_v: str
    n_capacity: int
    n_used: int
    n_bytes: int
    n_requantized: int


class Model(HandleOwner):
    """A loaded GGUF model: weights, tokenizer and metadata. Safe to read from many threads.

    Args:
        path: the GGUF file.
        progress: called with 0 to 1 during the load; returning False stops it (AbortedError).
        params: fields of ``pykvq_model_params`` by name; None leaves the library's default.

    Raises:
        ModelFileError: the file is missing, unreadable, damaged or not a GGUF file.
        OutOfMemoryError, UnsupportedModelError, InvalidArgumentError, AbortedError.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, progress: ProgressCallback | None = None, **params: FieldValue
    ) -> None:
        ffi, lib = native.load()
        raw_path = encoded_path(path)
        native_params = ffi.new("pykvq_model_params *", lib.pykvq_model_default_params())
        keep_alive = fill_struct(native_params, params)
        guard = ProgressGuard(progress)
        native_params.progress, native_params.progress_data = guard.arguments()
        out = ffi.new("pykvq_model **")
        status = lib.pykvq_model_load(raw_path, native_params, out)
        del keep_alive
        if guard.error is not None and status == 0:
            lib.pykvq_model_free(out[0])
        guard.check(status, format_error=ModelFileError)
        self._handle = Handle("model", out[0], lib.pykvq_model_free)
        self.info = self._read_info()

    def _read_info(self) -> ModelInfo:
        ffi, lib = native.load()
        info = ffi.new("pykvq_model_info *")
        with self._handle.use() as model:
            lib.pykvq_model_get_info(model, info)
        return ModelInfo(**{field.name: getattr(info, field.name) for field in fields(ModelInfo)})

    def retain(self) -> Any:
        """The native pointer, which stays valid until the matching ``release()``."""
        return self._handle.retain()

    def release(self) -> None:
        """Ends what ``retain()`` began."""
        self._handle.release()

    def description(self) -> str:
        """One line such as "llama 134M Q4_1"."""
        _, lib = native.load()
        with self._handle.use() as model:
            return read_string(partial(lib.pykvq_model_desc, model)) or ""

    def metadata(self) -> dict[str, str]:
        """All scalar GGUF keys and their values, as text."""
        _, lib = native.load()
        with self._handle.use() as model:
            result: dict[str, str] = {}
            for i in range(lib.pykvq_model_meta_count(model)):
                key = read_string(partial(lib.pykvq_model_meta_key_at, model, i))
                value = read_string(partial(lib.pykvq_model_meta_value_at, model, i))
                if key is not None and value is not None:
                    result[key] = value
            return result

    def chat_template(self) -> str | None:
        """The model's default chat template, None if it has none."""
        ffi, lib = native.load()
        with self._handle.use() as model:
            text = lib.pykvq_model_chat_template(model, ffi.NULL)
            return None if text == ffi.NULL else ffi.string(text).decode("utf-8", "replace")

    def tokenize(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of UTF-8 ``text``; ``add_special`` adds BOS and EOS where the model wants them."""
        ffi, lib = native.load()
        count = ffi.new("int32_t *")
        # a token covers at least one byte, apart from the few special ones around the text
        capacity = len(text) + 8
        source = ffi.from_buffer("char[]", text)
        with self._handle.use() as model:
            while True:
                tokens = np.empty(capacity, dtype=np.int32)
                native.check(
                    lib.pykvq_tokenize(
                        model, source, len(text), add_special, parse_special, int32_pointer(tokens), capacity, count
                    )
                )
                if count[0] <= capacity:
                    return [int(token) for token in tokens[: count[0]]]
                capacity = count[0]

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, maybe a part of a code point; special tokens yield none unless ``special``."""
        ffi, lib = native.load()
        count = ffi.new("int32_t *")
        capacity = 64
        with self._handle.use() as model:
            while True:
                buffer = ffi.new("char[]", capacity)
                native.check(lib.pykvq_token_bytes(model, token, special, buffer, capacity, count))
                if count[0] <= capacity:
                    return bytes(ffi.buffer(buffer, count[0]))
                capacity = count[0]

    def is_eog(self, token: int) -> bool:
        """Whether a token ends generation (EOS, EOT and the like)."""
        _, lib = native.load()
        with self._handle.use() as model:
            return bool(lib.pykvq_token_is_eog(model, token))

    def eog_tokens(self) -> list[int]:
        """All tokens that end generation."""
        return [token for token in range(self.info.n_vocab) if self.is_eog(token)]

    def is_control(self, token: int) -> bool:
        """Whether a token is a control token, whose text is not meant to be shown."""
        _, lib = native.load()
        with self._handle.use() as model:
            return bool(lib.pykvq_token_is_control(model, token))


class Context(Closeable):
    """A KV cache and the compute buffers for one model. Its calls are serialised; it keeps the model alive.

    Args:
        model: the model to run.
        kv: the KV cache format.
        params: fields of ``pykvq_context_params`` by name; None leaves the library's default.

    Raises:
        CalibrationError: the calibration file does not fit the model.
        InvalidArgumentError, OutOfMemoryError, UnsupportedModelError.
    """

    def __init__(self, model: Model, kv: KVConfig, **params: FieldValue) -> None:
        ffi, lib = native.load()
        native_params, keep_alive = context_params(kv, params)
        self.model = model
        self._lock = threading.RLock()
        # guards the pointer against abort(), which cannot wait for the decode that holds _lock
        self._abort_lock = threading.Lock()
        self._pointer: Any = None
        self._owner = os.getpid()
        out = ffi.new("pykvq_context **")
        model_pointer = model.retain()
        try:
            status = lib.pykvq_context_create(model_pointer, native_params, out)
            native.check(status, format_error=CalibrationError)
        except BaseException:
            model.release()
            raise
        del keep_alive
        self._pointer = out[0]
        self.info = self.read_info()

    def read_info(self) -> ContextInfo:
        """The context's sizes as they are now."""
        ffi, lib = native.load()
        info = ffi.new("pykvq_context_info *")
        with self._use() as context:
            lib.pykvq_context_get_info(context, info)
        return ContextInfo(**{field.name: getattr(info, field.name) for field in fields(ContextInfo)})

    def read_tiers(self) -> list[TierInfo]:
        """The tiers of the KV cache as they are now, empty for a cache without."""
        ffi, lib = native.load()
        info = ffi.new("pykvq_tier_info *")
        result = []
        with self._use() as context:
            for i in range(lib.pykvq_context_tier_count(context)):
                native.check(lib.pykvq_context_get_tier(context, i, info))
                type_k, type_v = (ffi.string(name).decode("ascii") for name in (info.type_k, info.type_v))
                result.append(TierInfo(type_k, type_v, info.n_capacity, info.n_used, info.n_bytes, info.n_requantized))
        return result

    @contextlib.contextmanager
    def _use(self) -> Iterator[Any]:
        with self._lock:
            if self._pointer is None:
                raise ClosedError("this model is closed: create a new Llama")
            require_own_process(self._owner, "model")
            yield self._pointer

    def close(self) -> None:
        """Stops a running decode and frees the context. Any thread may call it; again does nothing."""
        if getattr(self, "_pointer", None) is None or self._owner != os.getpid():
            return
        _, lib = native.load()
        self.abort()
        with self._lock, self._abort_lock:
            pointer, self._pointer = self._pointer, None
        if pointer is not None:
            lib.pykvq_context_free(pointer)
            self.model.release()

    def decode(self, tokens: Sequence[int], first_pos: int, want_logits: Sequence[bool]) -> None:
        """Computes tokens of sequence 0 at positions first_pos, first_pos + 1, ...; see ``decode_batch``."""
        n = len(tokens)
        self.decode_batch(tokens, range(first_pos, first_pos + n), [0] * n, want_logits)

    def decode_batch(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], want_logits: Sequence[bool]
    ) -> None:
        """Computes one batch of tokens; all arguments have its length.

        Args:
            positions: each follows the last one that its sequence holds.
            sequences: sequence ids.
            want_logits: marks the tokens whose logits or embeddings are wanted.

        Raises:
            ContextFullError: no room in the KV cache; it is as before.
            AbortedError: stopped by ``abort()``; see ``pos_max`` for what was done.
        """
        _, lib = native.load()
        ids, where, who = (np.asarray(values, dtype=np.int32) for values in (tokens, positions, sequences))
        wanted = np.asarray(want_logits, dtype=np.int8)
        pointers = (int32_pointer(ids), int32_pointer(where), int32_pointer(who), int8_pointer(wanted))
        with self._use() as context:
            native.check(lib.pykvq_decode(context, *pointers, len(ids)))

    def add_lora(self, path: str | os.PathLike[str], scale: float) -> None:
        """Adds a LoRA adapter, times ``scale``, to what is computed from now on.

        Raises:
            ModelFileError: the file is missing, damaged, or an adapter of another model.
        """
        _, lib = native.load()
        raw_path = encoded_path(path)
        with self._use() as context:
            native.check(lib.pykvq_context_add_lora(context, raw_path, scale), format_error=ModelFileError)

    def logits(self, i: int = -1) -> FloatArray:
        """A copy of the n_vocab logits of the i-th token of the last batch; -1 is the last one asked for.

        Raises:
            InvalidArgumentError: no logits were asked for that token.
        """
        _, lib = native.load()
        with self._use() as context:
            return self._floats(lib.pykvq_logits(context, i), self.model.info.n_vocab, f"logits of token {i}")

    def embeddings(self, i: int) -> FloatArray:
        """A copy of the n_embd embedding values of the i-th token of the last batch."""
        _, lib = native.load()
        with self._use() as context:
            return self._floats(lib.pykvq_embeddings(context, i), self.model.info.n_embd, f"embedding of token {i}")

    def pooled_embedding(self, seq: int = 0) -> FloatArray | None:
        """A copy of the n_embd pooled embedding values of a sequence, None where the model pools nothing."""
        ffi, lib = native.load()
        with self._use() as context:
            pointer = lib.pykvq_embeddings_seq(context, seq)
            if pointer == ffi.NULL:
                return None
            return self._floats(pointer, self.model.info.n_embd, "pooled embedding")

    @staticmethod
    def _floats(pointer: Any, n: int, what: str) -> FloatArray:
        ffi, _ = native.load()
        if pointer == ffi.NULL:
            raise InvalidArgumentError(f"the {what} was not asked for in the last decode: evaluate the token first")
        values: FloatArray = np.frombuffer(ffi.buffer(pointer, n * 4), dtype=np.float32).copy()
        return values

    def abort(self) -> None:
        """Stops the running decode, or the next one, with AbortedError. Any thread may call it."""
        _, lib = native.load()
        with self._abort_lock:
            if self._pointer is not None:
                lib.pykvq_context_abort(self._pointer)

    def clear_abort(self) -> None:
        """Takes back an abort request that no decode has seen."""
        _, lib = native.load()
        with self._use() as context:
            lib.pykvq_context_clear_abort(context)

    def kv_clear(self) -> None:
        """Empties the KV cache."""
        _, lib = native.load()
        with self._use() as context:
            lib.pykvq_kv_clear(context)

    def kv_remove(self, first_pos: int, seq: int = 0) -> None:
        """Removes the tokens of a sequence from first_pos on; 0 removes all of them.

        Raises:
            UnsupportedModelError: the model's state has no parts (recurrent models).
        """
        _, lib = native.load()
        with self._use() as context:
            native.check(lib.pykvq_kv_remove(context, seq, first_pos, -1))

    def kv_keep(self, n_keep: int, seq: int = 0) -> bool:
        """Keeps the first n_keep tokens of a sequence and removes the others, where the cache can do that.

        Returns:
            Whether it did. If not, nothing is changed: a sliding window no longer holds what is before them, or a
            recurrent state has no parts.
        """
        n_swa = self.model.info.n_swa
        if n_keep <= 0 or (n_swa and self.pos_min(seq) > max(0, n_keep - n_swa)):
            return False
        try:
            self.kv_remove(n_keep, seq)
        except UnsupportedModelError:
            return False
        return True

    def kv_copy(self, source: int, target: int) -> None:
        """Adds what sequence ``source`` holds to ``target``, which must be empty unless all share one cache."""
        _, lib = native.load()
        with self._use() as context:
            native.check(lib.pykvq_kv_copy(context, source, target, -1, -1))

    def pos_min(self, seq: int = 0) -> int:
        """The smallest position that a sequence holds, -1 if it is empty."""
        _, lib = native.load()
        with self._use() as context:
            return int(lib.pykvq_kv_pos_min(context, seq))

    def pos_max(self, seq: int = 0) -> int:
        """The largest position that a sequence holds, -1 if it is empty."""
        _, lib = native.load()
        with self._use() as context:
            return int(lib.pykvq_kv_pos_max(context, seq))

    def save_state(self) -> bytes:
        """The state of sequence 0 with its own header and checksum."""
        ffi, lib = native.load()
        size = ffi.new("size_t *")
        with self._use() as context:
            native.check(lib.pykvq_state_size(context, 0, size))
            data = bytearray(size[0])
            native.check(lib.pykvq_state_save(context, 0, ffi.from_buffer("uint8_t[]", data), len(data), size))
            return bytes(memoryview(data)[: size[0]])

    def load_state(self, data: Buffer) -> None:
        """Replaces sequence 0 by a saved state.

        Raises:
            StateError: the state is damaged or of another model or KV type; the cache is as before.
        """
        ffi, lib = native.load()
        with self._use() as context:
            native.check(lib.pykvq_state_load(context, 0, ffi.from_buffer("uint8_t[]", data), len(data)))

    def sample(self, sampler: Sampler, i: int = -1) -> int:
        """Draws a token from the logits of the i-th token of the last batch; -1 is the last one asked for."""
        ffi, lib = native.load()
        token = ffi.new("int32_t *")
        with self._use() as context, sampler.use() as pointer:
            native.check(lib.pykvq_sampler_sample(pointer, context, i, token))
        return int(token[0])


class Sampler(HandleOwner):
    """A chain of samplers with its own random state and memory of the tokens drawn.

    Raises:
        InvalidArgumentError: a parameter is out of its range.
    """

    def __init__(self, model: Model, params: SamplingParams) -> None:
        ffi, lib = native.load()
        bias_tokens = np.array(list(params.logit_bias), dtype=np.int32)
        bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        native_params = ffi.new("pykvq_sampler_params *", lib.pykvq_sampler_default_params())
        fill_struct(native_params, params.native_fields())
        native_params.n_logit_bias = len(bias_tokens)
        native_params.logit_bias_tokens = int32_pointer(bias_tokens)
        native_params.logit_bias_values = ffi.from_buffer("float[]", bias_values)
        out = ffi.new("pykvq_sampler **")
        with model.use() as pointer:
            native.check(lib.pykvq_sampler_create(pointer, native_params, out))
        self._handle = Handle("sampler", out[0], lib.pykvq_sampler_free)

    def sample_logits(self, logits: FloatArray) -> int:
        """Draws a token from n_vocab logits of the caller."""
        ffi, lib = native.load()
        values = np.ascontiguousarray(logits, dtype=np.float32)
        token = ffi.new("int32_t *")
        with self._handle.use() as pointer:
            native.check(
                lib.pykvq_sampler_sample_logits(pointer, ffi.from_buffer("float[]", values), len(values), token)
            )
        return int(token[0])
