"""An in-memory stand-in for the native library, for tests that need no build and no model.

Its structs come from the real header, so a field that the package sets must exist. Its model has one token per byte
and a few special ones; the next token is taken from ``replies``, a queue that the test fills.
"""

import re
from collections import deque
from pathlib import Path

import cffi
import numpy as np

HEADER = Path(__file__).parents[2] / "native" / "api" / "pykvq.h"
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL = {BOS: b"<s>", EOS: b"</s>", IM_START: b"<|im_start|>", IM_END: b"<|im_end|>"}
N_VOCAB = 260
N_EMBD = 4
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OK, INVALID, IO, FORMAT, MEMORY, UNSUPPORTED, NO_SPACE, ABORTED, INTERNAL = range(9)


def make_ffi():
    text = HEADER.read_text(encoding="utf-8")
    declarations = re.search(r"^// cdef-begin$(.*)^// cdef-end$", text, re.S | re.M).group(1)
    ffi = cffi.FFI()
    ffi.cdef(declarations.replace("PYKVQ_API ", ""))
    return ffi


ffi = make_ffi()


class FakeContext:
    def __init__(self, params):
        self.n_ctx = (params.n_ctx or 2048) // (1 if params.kv_unified else params.n_seq_max)
        self.n_batch = min(params.n_batch, params.n_ubatch) if params.n_tiers else params.n_batch
        self.tiers = [
            [ffi.string(params.tiers[i].type_k), ffi.string(params.tiers[i].type_v)] for i in range(params.n_tiers)
        ]
        self.n_seq = params.n_seq_max
        # the KV cache: of each sequence, a token for each position
        self.sequences = {seq: [] for seq in range(self.n_seq)}
        self.logits = {}
        self.aborted = False
        self.freed = False

    @property
    def tokens(self):
        return self.sequences[0]


class FakeLib:
    """The functions of pykvq.h that the package calls."""

    attention_layers = (0, 0)  # on a GPU, and on a GPU but computed by the CPU

    def __init__(self):
        self.replies = deque()
        self.last_error = b""
        self.abi_version = 2
        self.available_memory = 2**40
        self.add_bos = True
        self.fim_tokens = (1, 2, 3)
        self.n_swa = 0
        self.window_start = 0
        self.can_remove = True
        self.template = TEMPLATE
        self.pooled = False
        self.contexts = []
        self.models_freed = 0
        self.sampler_params = []
        self.decoded = []  # (first position, tokens) of each decode
        self.batches = []  # (sequence, token) of each token of each decode
        self.before_decode = lambda: None
        # the token after those of a sequence
        self.next_token = lambda held: self.replies.popleft() if self.replies else EOS
        self.objects = {}
        self.keep = []

    # handles are numbers, cast to pointers
    def _new(self, kind, value):
        number = len(self.objects) + 1
        self.objects[number] = value
        return ffi.cast(f"{kind} *", number)

    def _get(self, pointer):
        return self.objects[int(ffi.cast("uintptr_t", pointer))]

    def _fail(self, status, text):
        self.last_error = text.encode()
        return status

    def _string(self, text, buf, size):
        raw = text.encode()
        ffi.memmove(buf, raw[: size - 1] + b"\0", min(len(raw), size - 1) + 1)
        return len(raw)

    def pykvq_abi_version(self):
        return self.abi_version

    def pykvq_last_error(self):
        self.keep.append(ffi.new("char[]", self.last_error))
        return self.keep[-1]

    def pykvq_log_set(self, fn, data, level):
        pass

    pykvq_py_log = ffi.NULL
    pykvq_py_progress = ffi.NULL

    # --- model

    def pykvq_model_default_params(self):
        return ffi.new("pykvq_model_params *", {"n_gpu_layers": -1, "use_mmap": True})[0]

    def pykvq_model_load(self, path, params, out):
        if not Path(path.decode()).is_file():
            return self._fail(IO, f"model file not found: '{path.decode()}'")
        if Path(path.decode()).read_bytes()[:4] != b"GGUF":
            return self._fail(FORMAT, f"'{path.decode()}' is no GGUF model")
        out[0] = self._new("pykvq_model", "model")
        return OK

    def pykvq_model_free(self, model):
        self.models_freed += 1

    def pykvq_model_get_info(self, model, info):
        info.n_ctx_train = 2048
        info.n_vocab = N_VOCAB
        info.n_embd = N_EMBD
        info.n_swa = self.n_swa
        info.add_bos = self.add_bos
        info.token_fim_prefix, info.token_fim_suffix, info.token_fim_middle = self.fim_tokens
        info.token_bos, info.token_eos, info.token_eot, info.token_nl = BOS, EOS, IM_END, 10

    def pykvq_token_is_control(self, model, token):
        return token in SPECIAL

    def pykvq_model_desc(self, model, buf, size):
        return self._string("fake 1B F16 " + "x" * 300, buf, size)

    META = (("general.name", "fake"), ("general.note", "ü" * 200))

    def pykvq_model_meta_count(self, model):
        return len(self.META)

    def pykvq_model_meta_key_at(self, model, i, buf, size):
        return self._string(self.META[i][0], buf, size)

    def pykvq_model_meta_value_at(self, model, i, buf, size):
        return self._string(self.META[i][1], buf, size)

    def pykvq_model_chat_template(self, model, name):
        if self.template is None:
            return ffi.NULL
        self.keep.append(ffi.new("char[]", self.template.encode()))
        return self.keep[-1]

    def pykvq_tokenize(self, model, text, n, add_special, parse_special, tokens, capacity, count):
        data = bytes(ffi.buffer(text, n))
        ids = [BOS] if add_special and self.add_bos else []
        while data:
            special = next((t for t, raw in SPECIAL.items() if parse_special and data.startswith(raw)), None)
            ids.append(data[0] if special is None else special)
            data = data[1 if special is None else len(SPECIAL[special]) :]
        count[0] = len(ids)
        if len(ids) <= capacity:
            for i, token in enumerate(ids):
                tokens[i] = token
        return OK

    def pykvq_token_bytes(self, model, token, special, buf, capacity, count):
        if not 0 <= token < N_VOCAB:
            return self._fail(INVALID, f"token {token} is out of range")
        raw = bytes([token]) if token < 256 else (SPECIAL[token] if special else b"")
        count[0] = len(raw)
        if len(raw) <= capacity:
            ffi.memmove(buf, raw, len(raw))
        return OK

    def pykvq_token_is_eog(self, model, token):
        return token in (EOS, IM_END)

    # --- context

    def pykvq_context_default_params(self):
        values = {"n_ctx": 4096, "n_batch": 512, "n_ubatch": 512, "n_seq_max": 1, "flash_attn": -1, "kv_unified": True}
        return ffi.new("pykvq_context_params *", values)[0]

    def pykvq_context_create(self, model, params, out):
        if not params.n_tiers and ffi.string(params.type_k) == b"iq4_nl":
            return self._fail(UNSUPPORTED, "type_k=iq4_nl does not go\nwith this model")
        context = FakeContext(params)
        self.contexts.append(context)
        out[0] = self._new("pykvq_context", context)
        return OK

    def pykvq_available_memory(self):
        return self.available_memory

    def pykvq_available_device_memory(self):
        return 0

    def pykvq_predict_memory(self, model, params, info):
        info.weights_bytes = 1000
        info.kv_bytes = 1000 * params.n_ctx
        info.compute_bytes = 1000
        return OK

    def pykvq_context_free(self, context):
        assert not self._get(context).freed
        self._get(context).freed = True

    def pykvq_context_get_info(self, pointer, info):
        context = self._get(pointer)
        info.n_ctx = context.n_ctx
        info.n_ctx_seq = context.n_ctx
        info.n_seq_max = context.n_seq
        info.n_ubatch = context.n_batch
        info.n_batch = context.n_batch
        info.kv_elements = 1000 * context.n_ctx
        info.kv_bytes_f16 = 2 * info.kv_elements
        info.kv_bytes = info.kv_elements * 17 // 32
        info.flash_attn = True
        info.n_attention_device, info.n_attention_fallback = self.attention_layers

    def pykvq_context_tier_count(self, pointer):
        return len(self._get(pointer).tiers)

    def pykvq_context_get_tier(self, pointer, i, info):
        context = self._get(pointer)
        self.keep += [ffi.new("char[]", name) for name in context.tiers[i]]
        info.type_k, info.type_v = self.keep[-2:]
        info.n_capacity = context.n_ctx
        info.n_used = len(context.tokens) if i == 0 else 0
        return OK

    def pykvq_decode(self, pointer, tokens, pos, seq_id, want, n):
        self.before_decode()
        context = self._get(pointer)
        assert not context.freed
        assert 1 <= n <= context.n_batch
        if context.aborted:
            context.aborted = False
            return self._fail(ABORTED, "the decode was stopped")
        if max(len(context.sequences[seq_id[i]]) for i in range(n)) + n > context.n_ctx + context.n_seq - 1:
            return self._fail(NO_SPACE, "the KV cache has no room")
        for i in range(n):
            held = context.sequences[seq_id[i]]
            assert pos[i] == len(held)
            held.append(tokens[i])
        self.decoded.append((pos[0], [tokens[i] for i in range(n)]))
        self.batches.append([(seq_id[i], tokens[i]) for i in range(n)])
        # where logits are asked for at every token they foretell the next one; else they follow the queue
        context.logits = {}
        for i in (i for i in range(n) if want[i]):
            is_inside = i + 1 < n and seq_id[i + 1] == seq_id[i]
            token = tokens[i + 1] if is_inside else self.next_token(context.sequences[seq_id[i]])
            row = np.zeros(N_VOCAB, dtype=np.float32)
            row[token] = 10.0
            context.logits[i] = context.logits[-1] = row
        return OK

    def pykvq_logits(self, pointer, i):
        row = self._get(pointer).logits.get(i)
        return ffi.NULL if row is None else ffi.from_buffer("float[]", row)

    def pykvq_embeddings(self, pointer, i):
        token = self.batches[-1][i][1]
        self.keep.append(ffi.new("float[]", [token, 0, 0, 3]))
        return self.keep[-1]

    def pykvq_embeddings_seq(self, pointer, seq_id):
        if not self.pooled:
            return ffi.NULL
        self.keep.append(ffi.new("float[]", [3, 0, 0, 4]))
        return self.keep[-1]

    def pykvq_context_abort(self, pointer):
        assert not self._get(pointer).freed
        self._get(pointer).aborted = True

    def pykvq_context_clear_abort(self, pointer):
        self._get(pointer).aborted = False

    # --- KV cache and state

    def pykvq_kv_clear(self, pointer):
        for held in self._get(pointer).sequences.values():
            held.clear()

    def pykvq_kv_remove(self, pointer, seq_id, p0, p1):
        if not self.can_remove and p0 >= 0:
            return self._fail(UNSUPPORTED, "no part can be removed")
        del self._get(pointer).sequences[seq_id][max(p0, 0) :]
        return OK

    def pykvq_kv_copy(self, pointer, source, target, p0, p1):
        sequences = self._get(pointer).sequences
        assert not sequences[target]
        sequences[target] = list(sequences[source])
        return OK

    def pykvq_kv_pos_min(self, pointer, seq_id):
        return self.window_start if self._get(pointer).sequences[seq_id] else -1

    def pykvq_kv_pos_max(self, pointer, seq_id):
        return len(self._get(pointer).sequences[seq_id]) - 1

    def pykvq_state_size(self, pointer, seq_id, size):
        size[0] = 4 * len(self._get(pointer).tokens) + 100  # more than is written, as in llama.cpp
        return OK

    def pykvq_state_save(self, pointer, seq_id, data, n_bytes, written):
        raw = b"FAKE" + np.array(self._get(pointer).tokens, dtype=np.int32).tobytes()
        ffi.memmove(data, raw, len(raw))
        written[0] = len(raw)
        return OK

    def pykvq_state_load(self, pointer, seq_id, data, n_bytes):
        raw = bytes(ffi.buffer(data, n_bytes))
        if not raw.startswith(b"FAKE"):
            return self._fail(FORMAT, "the state is of another model")
        self._get(pointer).tokens[:] = np.frombuffer(raw[4:], dtype=np.int32).tolist()
        return OK

    # --- sampling

    def pykvq_sampler_default_params(self):
        return ffi.new("pykvq_sampler_params *")[0]

    def pykvq_sampler_create(self, model, params, out):
        bias = {params.logit_bias_tokens[i]: params.logit_bias_values[i] for i in range(params.n_logit_bias)}
        names = ("seed", "temperature", "top_k", "top_p", "min_p", "penalty_last_n", "repeat_penalty")
        self.sampler_params.append({**{name: getattr(params, name) for name in names}, "logit_bias": bias})
        out[0] = self._new("pykvq_sampler", bias)
        return OK

    def pykvq_sampler_free(self, sampler):
        pass

    def pykvq_sampler_sample(self, sampler, context, i, token):
        row = self._get(context).logits.get(i)
        if row is None:
            return self._fail(INVALID, "no logits were asked for")
        return self._draw(sampler, row, token)

    def pykvq_sampler_sample_logits(self, sampler, logits, n_vocab, token):
        return self._draw(sampler, np.array([logits[i] for i in range(n_vocab)]), token)

    def _draw(self, sampler, row, token):
        row = row.copy()
        for biased, value in self._get(sampler).items():
            row[biased] += value
        token[0] = int(np.argmax(row))
        return OK

    # --- KV types

    def pykvq_kv_type_block_size(self, name):
        return {b"f16": 1, b"q8_0": 32, b"q4_ve": 64}.get(name, 0)

    def pykvq_kv_type_block_bytes(self, name):
        return {b"f16": 2, b"q8_0": 34, b"q4_ve": 34}.get(name, 0)
