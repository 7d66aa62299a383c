"""Tiny GGUF models with random weights, for tests of the KV cache.

The weights are scaled so that attention is neither uniform nor one-hot: scores have a standard deviation of about 2.
The tokenizer splits text into bytes (SentencePiece with byte tokens only).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
N_VOCAB = len(SPECIAL_TOKENS) + 256
SCORE_SIGMA = 2.0


@dataclass(frozen=True)
class TinyModel:
    """What a tiny model is like.

    ``arch`` is "llama", "plamo3" (K and V may differ in head dim), "gemma2" (soft-capped scores) or "mimo2" (sink
    logits; K and V may differ). The layers before the last one use a sliding window if ``window`` is above 0, which
    gemma2 and mimo2 need.
    """

    arch: str = "llama"
    head_dim_k: int = 64
    head_dim_v: int = 0  # 0: as K
    n_head: int = 4
    n_head_kv: int = 2
    n_layer: int = 2
    n_embd: int = 64
    n_ff: int = 96
    n_ctx_train: int = 8192
    window: int = 0
    f16: bool = False
    seed: int = 1
    rope_base: float = 10000.0
    rms_eps: float = 1e-5

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim_k

    @property
    def softcap(self) -> float:
        return 5.0 if self.arch == "gemma2" else 0.0

    def is_windowed(self, layer: int) -> bool:
        return self.window > 0 and layer < self.n_layer - 1

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Tensors by their GGUF name, matrices as [outputs, inputs]; what is stored as F16 is rounded to it."""
        rng = np.random.default_rng(self.seed)

        def matrix(n_out: int, n_in: int, sigma: float = 1.0) -> NDArray[np.float32]:
            values = rng.normal(0.0, sigma / np.sqrt(n_in), (n_out, n_in)).astype(np.float32)
            return values.astype(np.float16).astype(np.float32) if self.f16 else values

        def norm(n: int) -> NDArray[np.float32]:
            return rng.uniform(0.7, 1.3, n).astype(np.float32)

        tensors = {
            "token_embd.weight": matrix(N_VOCAB, self.n_embd, np.sqrt(self.n_embd)),
            "output_norm.weight": norm(self.n_embd),
        }
        if self.arch != "gemma2":
            tensors["output.weight"] = matrix(N_VOCAB, self.n_embd)
        sigma = float(np.sqrt(SCORE_SIGMA))
        for il in range(self.n_layer):
            layer = {
                "attn_norm.weight": norm(self.n_embd),
                "attn_q.weight": matrix(self.n_head * self.head_dim_k, self.n_embd, sigma),
                "attn_k.weight": matrix(self.n_head_kv * self.head_dim_k, self.n_embd, sigma),
                "attn_v.weight": matrix(self.n_head_kv * self.dim_v, self.n_embd),
                "attn_output.weight": matrix(self.n_embd, self.n_head * self.dim_v, 2.0),
                "ffn_norm.weight": norm(self.n_embd),
                "ffn_gate.weight": matrix(self.n_ff, self.n_embd),
                "ffn_up.weight": matrix(self.n_ff, self.n_embd),
                "ffn_down.weight": matrix(self.n_embd, self.n_ff),
            }
            if self.arch == "gemma2":
                layer |= {"post_attention_norm.weight": norm(self.n_embd), "post_ffw_norm.weight": norm(self.n_embd)}
            if self.arch == "mimo2":
                layer["attn_sinks.weight"] = rng.normal(0.0, 1.0, self.n_head).astype(np.float32)
            if self.arch == "plamo3":
                layer["attn_qkv.weight"] = np.concatenate([layer.pop(f"attn_{x}.weight") for x in "qkv"])
                layer["ffn_up.weight"] = np.concatenate([layer.pop("ffn_gate.weight"), layer["ffn_up.weight"]])
                # the norms set the scale of scores here
                layer["attn_q_norm.weight"] = sigma * norm(self.head_dim_k)
                layer["attn_k_norm.weight"] = sigma * norm(self.head_dim_k)
                layer |= {"post_attention_norm": norm(self.n_embd), "post_ffw_norm": norm(self.n_embd)}
            tensors |= {f"blk.{il}.{name}": values for name, values in layer.items()}
        return tensors

    def write(self, path: Path, tensors_per_file: int = 0) -> Path:
        """Writes the model, in several files if ``tensors_per_file`` is above 0; returns the (first) file."""
        writer = gguf.GGUFWriter(None, self.arch, split_max_tensors=tensors_per_file)
        writer.add_name(f"tiny {self.arch} {self.head_dim_k}/{self.dim_v} seed {self.seed}")
        writer.add_context_length(self.n_ctx_train)
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_layer)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv(self.n_head_kv)
        writer.add_key_length(self.head_dim_k)
        writer.add_value_length(self.dim_v)
        writer.add_rope_dimension_count(self.head_dim_k)
        writer.add_rope_freq_base(self.rope_base)
        writer.add_layer_norm_rms_eps(self.rms_eps)
        if self.window > 0:
            writer.add_sliding_window(self.window)
            writer.add_sliding_window_pattern([self.is_windowed(il) for il in range(self.n_layer)])
        if self.arch == "mimo2":
            writer.add_expert_feed_forward_length(self.n_ff)
        if self.arch == "gemma2":
            writer.add_attn_logit_softcapping(self.softcap)
            writer.add_final_logit_softcapping(30.0)
        self._write_tokenizer(writer)
        for name, values in self.weights().items():
            writer.add_tensor(name, values.astype(np.float16) if self.f16 and values.ndim == 2 else values)
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return min(path.parent.glob(f"{path.stem}-*-of-*.gguf")) if tensors_per_file else path

    @staticmethod
    def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
        kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))])
        writer.add_token_scores([0.0] * N_VOCAB)
        writer.add_token_types([*kinds, *[gguf.TokenType.BYTE] * 256])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)


def random_tokens(n: int, seed: int = 0) -> list[int]:
    """Ordinary tokens of the tiny models."""
    return [int(token) for token in np.random.default_rng(seed).integers(len(SPECIAL_TOKENS), N_VOCAB, n)]
