"""What a calibration needs of a model's weights: how an error of a value reaches the residual stream."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from pykvq.calibration.moments import Array, LayerMoments
from pykvq.gguf_header import TensorInfo, read_headers

_OUTPUT_NORM = re.compile(r"blk\.(\d+)\.post_attention_norm\.weight")


@dataclass(frozen=True)
class Weight:
    """A tensor of a model file."""

    path: Path
    info: TensorInfo

    def read(self) -> npt.NDArray[np.float32]:
        """Its values decoded, outermost dimension first.

        Raises:
            NotImplementedError: it is of a type that gguf does not decode.
        """
        kind = gguf.GGMLQuantizationType.__members__.get(self.info.type_name.upper())
        if kind is None:
            raise NotImplementedError(self.info.type_name)
        shape = (*self.info.shape[:0:-1], -1)
        data = np.memmap(self.path, np.uint8, "r", self.info.offset, self.info.n_bytes).reshape(shape)
        return np.asarray(gguf.quants.dequantize(data, kind), dtype=np.float32)


def read_tensors(model_path: str | os.PathLike[str]) -> dict[str, Weight]:
    """The tensors of all files of a model by name.

    Raises:
        ModelFileError: a file is missing or damaged.
    """
    return {
        tensor.name: Weight(header.path, tensor) for header in read_headers(model_path) for tensor in header.tensors
    }


def output_norms(tensors: Mapping[str, Weight]) -> dict[int, float]:
    """By layer, the squared norm of the weights that scale a normalized attention output before it is added, if any.

    Where a layer has no other norm around its feed-forward part, as in gpt-oss, that one is before it, and not meant.
    """
    result: dict[int, float] = {}
    for name, tensor in tensors.items():
        match = _OUTPUT_NORM.fullmatch(name)
        if match is None or tensor.info.type_name.upper() != "F32":
            continue
        if tensors.keys() & {f"blk.{match[1]}.ffn_norm.weight", f"blk.{match[1]}.post_ffw_norm.weight"}:
            result[int(match[1])] = float(np.square(tensor.read(), dtype=np.float64).sum())
    return result


def output_grams(tensors: Mapping[str, Weight], layers: list[LayerMoments]) -> dict[int, Array]:
    """Mean of Woᵀ Wo over the query heads of each KV head, [n_head, dim_v, dim_v], by layer.

    Layers whose output projection is missing, merged with another or of a type that cannot be decoded are left out.
    """
    result: dict[int, Array] = {}
    for layer in layers:
        tensor = tensors.get(f"blk.{layer.layer}.attn_output.weight")
        if tensor is None:
            continue
        n_head, dim_v = layer.v.shape
        try:
            weight = tensor.read()
        except NotImplementedError:
            continue
        heads = weight.reshape(len(weight), n_head, -1, dim_v)
        rows = heads.transpose(1, 0, 2, 3).reshape(n_head, -1, dim_v)
        result[layer.layer] = (rows.transpose(0, 2, 1) @ rows).astype(np.float64) / heads.shape[2]
    return result
