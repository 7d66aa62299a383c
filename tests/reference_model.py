"""llama and plamo3 models in NumPy, attending in float64 to K and V rows that the caller gives.

It judges what a context computed from the rows that lie in its cache, whatever precision they have.
"""

from __future__ import annotations

import numpy as np
from file_model import FileModel
from numpy.typing import DTypeLike, NDArray
from tiny_models import TinyModel

Array = NDArray[np.float64]
# K [n, n_head_kv, head_dim_k] and V [n, n_head_kv, head_dim_v] of one layer
Rows = tuple[Array, Array]


class ReferenceModel:
    def __init__(self, tiny: TinyModel | FileModel, dtype: DTypeLike = np.float64) -> None:
        assert tiny.arch in ("llama", "plamo3"), tiny.arch
        assert tiny.window == 0
        self.tiny = tiny
        self.weights = {name: values.astype(dtype, copy=False) for name, values in tiny.weights().items()}

    def forward(self, token: int, pos: int, rows: list[Rows]) -> tuple[Array, list[Rows]]:
        """Logits of a token that attends to the given rows, a pair a layer, its own among them.

        Also returns the row of its own that each layer computed, [1, n_head_kv, head_dim].
        """
        x = self.weights["token_embd.weight"][token]
        own = []
        for il in range(self.tiny.n_layer):
            layer = {k.removeprefix(f"blk.{il}."): w for k, w in self.weights.items() if k.startswith(f"blk.{il}.")}
            q, k, v = self._qkv(layer, self._norm(x, layer["attn_norm.weight"]), pos)
            own.append((k[None], v[None]))
            attended = layer["attn_output.weight"] @ self._attention(q, *rows[il]).reshape(-1).astype(x.dtype)
            x = x + self._post_norm(attended, layer.get("post_attention_norm"))
            hidden = self._ffn(layer, self._norm(x, layer["ffn_norm.weight"]))
            x = x + self._post_norm(hidden, layer.get("post_ffw_norm"))
        return self.weights["output.weight"] @ self._norm(x, self.weights["output_norm.weight"]), own

    def rope(self, x: Array, pos: int) -> Array:
        """x [n, head_dim_k]; llama turns neighbours (2i, 2i + 1), plamo3 halves (i, i + head_dim_k / 2)."""
        dim = x.shape[1]
        angle = pos * self.tiny.rope_base ** (-2.0 * np.arange(dim // 2) / dim)
        pairs = x.reshape(-1, dim // 2, 2) if self.tiny.arch == "llama" else x.reshape(-1, 2, dim // 2).swapaxes(1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = np.stack([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)
        return turned.reshape(-1, dim) if self.tiny.arch == "llama" else turned.swapaxes(1, 2).reshape(-1, dim)

    def _qkv(self, layer: dict[str, Array], x: Array, pos: int) -> tuple[Array, Array, Array]:
        t = self.tiny
        if t.arch == "plamo3":
            sizes = [t.n_head * t.head_dim_k, t.n_head_kv * t.head_dim_k]
            q, k, v = np.split(layer["attn_qkv.weight"] @ x, np.cumsum(sizes))
        else:
            q, k, v = (layer[f"attn_{name}.weight"] @ x for name in "qkv")
        q, k = q.reshape(t.n_head, -1), k.reshape(t.n_head_kv, -1)
        if t.arch == "plamo3":
            q, k = self._norm(q, layer["attn_q_norm.weight"]), self._norm(k, layer["attn_k_norm.weight"])
        return self.rope(q, pos), self.rope(k, pos), v.reshape(t.n_head_kv, -1)

    def _attention(self, q: Array, k: Array, v: Array) -> Array:
        """q [n_head, head_dim_k] -> [n_head, head_dim_v]"""
        group = self.tiny.n_head // self.tiny.n_head_kv
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("hd,nhd->hn", q, k) / np.sqrt(self.tiny.head_dim_k)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), v)

    def _ffn(self, layer: dict[str, Array], x: Array) -> Array:
        if self.tiny.arch == "plamo3":
            gate, up = np.split(layer["ffn_up.weight"] @ x, 2)
        else:
            gate, up = layer["ffn_gate.weight"] @ x, layer["ffn_up.weight"] @ x
        return layer["ffn_down.weight"] @ (gate / (1.0 + np.exp(-gate)) * up)

    def _norm(self, x: Array, weight: Array) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.tiny.rms_eps) * weight

    def _post_norm(self, x: Array, weight: Array | None) -> Array:
        return x if weight is None else self._norm(x, weight)
