"""The bases in which keys and values are stored, from second moments. Everything here is float64.

Keys become A (k - mean) and queries A⁻ᵀ q. Noise of one size in every stored coordinate then costs a score
tr(A⁻ᵀ Σq A⁻¹), and its size follows tr(A Σk Aᵀ); AᵀA = Σk⁻¹ # Σq, the geometric mean of two positive-definite matrices
(Pusz and Woronowicz 1975), minimises the product. For values the Gram matrix of the output projection stands in for Σq.
An orthogonal matrix behind it does not change that, and is used to spread or to sort what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pykvq.calibration.moments import Array, LayerMoments

# of each block of 64 stored values, the spectral key types give the first 8 more bits, and expect them to have this
# part of the standard deviation of the others (docs/formats.md)
CLASS_SIZES = (8, 56)
CLASS_DEVIATIONS = (0.55, 1.0)
# and the noise that their bits leave of that of the others, fitted to the KLD of single layers (docs/fidelity.md)
CLASS_NOISE = (0.14, 1.0)
BLOCK = 64
# share of the mean eigenvalue that is added to every eigenvalue, and how much of the way to go from a plain rotation
KEY_SHRINKAGE = 0.1
VALUE_SHRINKAGE = 0.1
VALUE_POWER = 0.5
# eigenvalues below this part of the largest are numerical noise
_FLOOR = 1e-9


@dataclass(frozen=True)
class LayerTransform:
    """Matrices [n_head, dim, dim] and means [n_head, dim] of a layer, named as in ``native/llama/kvq-transform.h``.

    k_sensitivity, v_sensitivity: the squared error that the layer adds to the residual stream, as part of that, when
    the stored coordinates of all keys (values) but sinks and window get noise of variance 1. Of the strong coordinates
    of sorted keys, CLASS_NOISE of that.
    windowed: a sliding-window layer, whose cache has no tiers; its sensitivities are 0.
    """

    layer: int
    k: Array
    q: Array
    v: Array
    out: Array
    k_mean: Array
    v_mean: Array
    k_sensitivity: float
    v_sensitivity: float
    windowed: bool


def orthogonal(n: int) -> Array:
    """An orthogonal matrix of order n that mixes all coordinates: Hadamard's (Sylvester) times a cosine transform.

    n = 2^a m: the Kronecker product of the Hadamard matrix of order 2^a and the DCT-II matrix of order m; entries of
    both are of about equal size.
    """
    power = n & -n
    m = n // power
    hadamard = np.ones((1, 1))
    while len(hadamard) < power:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    rows, columns = np.indices((m, m))
    cosine = np.cos(np.pi * rows * (2 * columns + 1) / (2 * m)) * np.sqrt(2 / m)
    cosine[0] = np.sqrt(1 / m)
    return np.kron(hadamard / np.sqrt(power), cosine)


def layer_transform(
    moments: LayerMoments, output_gram: Array | None, norm: float | None = None, *, spectral: bool
) -> LayerTransform:
    """The transform of a layer.

    Args:
        output_gram: [n_head, dim_v, dim_v], mean of Woᵀ Wo over the query heads of a KV head; None for the identity.
        norm: squared norm that the attention's output is brought to before it is added, of models that do so.
        spectral: deal the key coordinates to the classes of the spectral types, else mix all.
    """
    dim_v = moments.vv.shape[-1]
    keys = [
        _key_basis(kk, qq, mean, spectral=spectral)
        for kk, qq, mean in zip(moments.kk, moments.qq, moments.k, strict=True)
    ]
    grams = np.eye(dim_v)[None].repeat(len(moments.vv), 0) if output_gram is None else output_gram
    values = [_value_basis(vv, gram, mean) for vv, gram, mean in zip(moments.vv, grams, moments.v, strict=True)]
    k, v = np.stack(keys), np.stack(values)
    # of an output's squared error, what is added to the residual stream as part of it; windowed layers are not sampled
    gain = 1.0 if norm is None else norm / _mean_square(grams, moments.output)
    share = 0.0 if moments.windowed else gain / moments.residual
    return LayerTransform(
        layer=moments.layer,
        k=k,
        q=_inverse(k).transpose(0, 2, 1),
        v=v,
        out=_inverse(v),
        k_mean=moments.k,
        v_mean=moments.v,
        k_sensitivity=share * _key_error(k, moments, grams, spectral=spectral),
        v_sensitivity=share * _value_error(v, moments, grams),
        windowed=moments.windowed,
    )


def _key_basis(kk: Array, qq: Array, mean: Array, *, spectral: bool) -> Array:
    keys = shrunk(kk - np.outer(mean, mean), KEY_SHRINKAGE)
    queries = shrunk(qq, KEY_SHRINKAGE)
    balanced = power(geometric_mean(keys, queries), 0.5)
    n = len(keys)
    if spectral:
        spread = balanced @ keys @ balanced.T
        eigenvalues, vectors = np.linalg.eigh(spread)
        order = np.argsort(eigenvalues)[::-1]
        sorted_basis = vectors[:, order].T @ balanced
        # unit variance in every class: the types know how their codebooks relate, not how the classes of a head do
        basis = class_mixer(n) @ (sorted_basis / class_deviation(eigenvalues[order])[:, None])
        return deal(basis)
    return _normalised(orthogonal(n) @ balanced, keys)


def _value_basis(vv: Array, gram: Array, mean: Array) -> Array:
    values = shrunk(vv - np.outer(mean, mean), VALUE_SHRINKAGE)
    balanced = power(geometric_mean(values, shrunk(gram, VALUE_SHRINKAGE)), 0.5 * VALUE_POWER)
    return _normalised(orthogonal(len(values)) @ balanced, values)


def _key_error(bases: Array, moments: LayerMoments, grams: Array, *, spectral: bool) -> float:
    """Noise e in a key moves its score by q·e, and the output by p (v - o) times that."""
    dim = bases.shape[-1]
    noise = np.tile(np.repeat(CLASS_NOISE, CLASS_SIZES), dim // BLOCK) if spectral else np.ones(dim)
    scores = moments.kq_scale**2 * _error_weights(bases, moments.qq) @ noise
    return float(scores @ np.einsum("hij,hji->h", grams, moments.swing))


def _value_error(bases: Array, moments: LayerMoments, grams: Array) -> float:
    """Noise in a value moves the output by p times that."""
    return float(_error_weights(bases, grams).sum(-1) @ moments.reach)


def _mean_square(grams: Array, outputs: Array) -> float:
    """Of what the output projection makes of the heads, taken as independent; kept from zero."""
    return max(float(np.einsum("hij,hji->", grams, outputs)), float(np.finfo(np.float64).tiny))


def _error_weights(bases: Array, readers: Array) -> Array:
    """What a reader's second moment makes of an error of 1 in each stored coordinate, [n_head, dim]."""
    inverse = _inverse(bases)
    result: Array = np.einsum("hji,hjk,hki->hi", inverse, readers, inverse)
    return result


def _inverse(matrices: Array) -> Array:
    result: Array = np.asarray(np.linalg.inv(matrices), dtype=np.float64)
    return result


def _normalised(basis: Array, second_moment: Array) -> Array:
    """Scaled so that stored values have a mean square of 1: far from where F16 overflows or loses precision."""
    result: Array = basis / np.sqrt(np.trace(basis @ second_moment @ basis.T) / len(basis))
    return result


def class_slices(n: int) -> list[slice]:
    """Where the classes of a head of n sorted coordinates are."""
    edges = np.cumsum([0, *(size * n // BLOCK for size in CLASS_SIZES)])
    return [slice(int(start), int(stop)) for start, stop in pairwise(edges)]


def class_deviation(variances: Array) -> Array:
    """What each sorted coordinate is divided by, so that its class gets the deviation that the types expect."""
    result = np.empty_like(variances)
    for part, wanted in zip(class_slices(len(variances)), CLASS_DEVIATIONS, strict=True):
        result[part] = np.sqrt(variances[part].mean()) / wanted
    return result


def class_mixer(n: int) -> Array:
    """Orthogonal, and mixes inside the classes only."""
    result = np.zeros((n, n))
    for part in class_slices(n):
        result[part, part] = orthogonal(part.stop - part.start)
    return result


def deal(basis: Array) -> Array:
    """Rows in class order to blocks of 64 rows with the same share of every class."""
    n_blocks = len(basis) // BLOCK
    rows = [np.arange(part.start, part.stop).reshape(n_blocks, -1) for part in class_slices(len(basis))]
    result: Array = basis[np.concatenate(rows, axis=1).ravel()]
    return result


def shrunk(matrix: Array, share: float) -> Array:
    """A symmetric matrix with a share of the mean eigenvalue added to each: few tokens make small ones too small."""
    symmetric = (matrix + matrix.T) / 2
    mean = max(float(np.trace(symmetric)) / len(symmetric), np.finfo(np.float64).tiny)
    result: Array = symmetric + share * mean * np.eye(len(symmetric))
    return result


def power(matrix: Array, exponent: float) -> Array:
    """A power of a symmetric positive-definite matrix."""
    eigenvalues, vectors = np.linalg.eigh(matrix)
    floored = np.maximum(eigenvalues, eigenvalues[-1] * _FLOOR)
    result: Array = (vectors * floored**exponent) @ vectors.T
    return result


def geometric_mean(keys: Array, queries: Array) -> Array:
    """keys⁻¹ # queries."""
    root, inverse = power(keys, 0.5), power(keys, -0.5)
    result: Array = inverse @ power(root @ queries @ root, 0.5) @ inverse
    return result
