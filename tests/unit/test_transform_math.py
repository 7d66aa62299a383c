"""The bases that a calibration makes of second moments."""

from __future__ import annotations

import numpy as np
import pytest

from pykvq.calibration.moments import LayerMoments, _texts
from pykvq.calibration.transforms import (
    CLASS_DEVIATIONS,
    class_slices,
    geometric_mean,
    layer_transform,
    orthogonal,
    power,
    shrunk,
)


def moments(dim_k: int, dim_v: int, n_head: int = 2, seed: int = 0) -> LayerMoments:
    """Of keys whose mean is large against their spread and whose directions differ by four orders of magnitude."""
    rng = np.random.default_rng(seed)

    def covariance(n: int) -> np.ndarray:
        q, _ = np.linalg.qr(rng.standard_normal((n, n)))
        return (q * np.geomspace(1e-2, 1e2, n)) @ q.T

    k, v = 30 * rng.standard_normal((n_head, dim_k)), rng.standard_normal((n_head, dim_v))
    return LayerMoments(
        layer=3,
        qq=np.stack([covariance(dim_k) for _ in range(n_head)]),
        kk=np.stack([covariance(dim_k) + np.outer(mean, mean) for mean in k]),
        vv=np.stack([covariance(dim_v) + np.outer(mean, mean) for mean in v]),
        k=k,
        v=v,
        windowed=False,
        kq_scale=dim_k**-0.5,
        reach=np.ones(n_head),
        swing=np.stack([np.eye(dim_v)] * n_head),
        output=np.stack([np.eye(dim_v)] * n_head),
        residual=1.0,
    )


@pytest.mark.parametrize("n", [1, 3, 8, 24, 56, 64, 80, 96, 112, 256])
def test_orthogonal_matrices_exist_and_mix(n):
    matrix = orthogonal(n)
    assert np.allclose(matrix @ matrix.T, np.eye(n))
    assert np.abs(matrix).max() <= 1.5 / np.sqrt(n)


@pytest.mark.parametrize("spectral", [False, True])
@pytest.mark.parametrize(("dim_k", "dim_v"), [(64, 64), (128, 64), (256, 128)])
def test_scores_and_outputs_are_unchanged(dim_k, dim_v, spectral):
    transform = layer_transform(moments(dim_k, dim_v), None, spectral=spectral)
    rng = np.random.default_rng(1)
    for head in range(2):
        q, k, v = rng.standard_normal(dim_k), rng.standard_normal(dim_k), rng.standard_normal(dim_v)
        stored = transform.k[head] @ (k - transform.k_mean[head])
        score = (transform.q[head] @ q) @ stored + q @ transform.k_mean[head]
        assert np.isclose(score, q @ k)
        out = transform.out[head] @ (transform.v[head] @ (v - transform.v_mean[head])) + transform.v_mean[head]
        assert np.allclose(out, v)


def test_geometric_mean_balances_keys_and_queries():
    parts = moments(64, 64)
    keys, queries = shrunk(parts.kk[0], 0.1), shrunk(parts.qq[0], 0.1)
    root = power(geometric_mean(keys, queries), 0.5)
    inverse = np.linalg.inv(root)
    assert np.allclose(root @ keys @ root.T, inverse.T @ queries @ inverse)


def score_error(transform_k: np.ndarray, keys: np.ndarray, queries: np.ndarray) -> float:
    """Of noise that is as large in every stored coordinate."""
    inverse = np.linalg.inv(transform_k)
    return float(np.trace(transform_k @ keys @ transform_k.T) * np.trace(inverse.T @ queries @ inverse))


def test_the_basis_costs_scores_less_than_a_rotation():
    parts = moments(64, 64)
    transform = layer_transform(parts, None, spectral=False)
    keys = parts.kk[0] - np.outer(parts.k[0], parts.k[0])
    ours = score_error(transform.k[0], keys, parts.qq[0])
    assert ours < 0.5 * score_error(orthogonal(64), keys, parts.qq[0])


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_block_holds_its_share_of_the_strong_coordinates(dim):
    parts = moments(dim, 64)
    transform = layer_transform(parts, None, spectral=True)
    keys = shrunk(parts.kk[0] - np.outer(parts.k[0], parts.k[0]), 0.1)
    deviations = np.sqrt(np.diag(transform.k[0] @ keys @ transform.k[0].T)).reshape(-1, 64)
    for part, expected in zip(class_slices(64), CLASS_DEVIATIONS, strict=True):
        assert np.allclose(np.sqrt((deviations[:, part] ** 2).mean(1)), expected, rtol=0.2)


def test_a_channel_that_never_changes_gives_finite_matrices():
    parts = moments(64, 64)
    for matrix in (*parts.kk, *parts.qq, *parts.vv):
        matrix[5], matrix[:, 5] = 0, 0
    parts.k[:, 5] = parts.v[:, 5] = 0
    transform = layer_transform(parts, np.zeros((2, 64, 64)), spectral=True)
    for matrix in (transform.k, transform.q, transform.v, transform.out):
        assert np.isfinite(matrix).all()
        assert np.abs(matrix).max() < 1e6


class OneHead:
    """Attention of one head to tokens that are all compressed, and its moments, computed without any shortcut."""

    dim, n = 64, 40
    scale, residual = 0.125, 7.0

    def __init__(self) -> None:
        self.rng = np.random.default_rng(2)
        self.q, self.k, self.v = (self.rng.standard_normal((self.n, self.dim)) for _ in range(3))
        self.wo = self.rng.standard_normal((96, self.dim))

    def attend(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights = np.exp(self.scale * self.q @ k.T)
        weights /= weights.sum(1, keepdims=True)
        return weights, weights @ v

    def moments(self) -> LayerMoments:
        weights, output = self.attend(self.k, self.v)
        away = self.v[None] - output[:, None]
        return LayerMoments(
            layer=0,
            qq=(self.q.T @ self.q / self.n)[None],
            kk=(self.k.T @ self.k / self.n)[None],
            vv=(self.v.T @ self.v / self.n)[None],
            k=self.k.mean(0)[None],
            v=self.v.mean(0)[None],
            windowed=False,
            kq_scale=self.scale,
            reach=np.array([(weights**2).sum() / self.n]),
            swing=np.einsum("qt,qti,qtj->ij", weights**2, away, away)[None] / self.n,
            output=(output.T @ output)[None] / self.n,
            residual=self.residual,
        )

    def error(self, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Of what the output projection gives, [n, 96]."""
        return np.asarray((self.attend(k, v)[1] - self.attend(self.k, self.v)[1]) @ self.wo.T)


@pytest.mark.parametrize("what", ["k", "v"])
def test_sensitivity_is_the_error_that_noise_makes(what):
    head, noise, n_draws = OneHead(), 1e-3, 200
    transform = layer_transform(head.moments(), (head.wo.T @ head.wo)[None], spectral=False)
    inverse = np.linalg.inv(transform.k[0]) if what == "k" else transform.out[0]
    total = 0.0
    for _ in range(n_draws):
        change = noise * head.rng.standard_normal((head.n, head.dim)) @ inverse.T
        error = head.error(head.k + change, head.v) if what == "k" else head.error(head.k, head.v + change)
        total += float((error**2).sum(1).mean())
    found = total / n_draws / noise**2 / head.residual
    assert found == pytest.approx(getattr(transform, f"{what}_sensitivity"), rel=0.1)


def test_an_output_that_is_normalized_counts_as_what_is_added():
    head, norm = OneHead(), 3.0
    gram = (head.wo.T @ head.wo)[None]
    plain, normalized = (layer_transform(head.moments(), gram, n, spectral=False) for n in (None, norm))
    square = (head.attend(head.k, head.v)[1] @ head.wo.T) ** 2
    share = norm / square.sum(1).mean()
    assert normalized.v_sensitivity == pytest.approx(share * plain.v_sensitivity)
    assert normalized.k_sensitivity == pytest.approx(share * plain.k_sensitivity)


@pytest.mark.parametrize(
    ("n_tokens", "n_positions", "n_text", "step"),
    [
        (2048, 2048, 2048, 0),
        (2048, 8192, 2048, 6144),
        (2048, 512, 512, 0),
        (300, 2048, 600, 1448),
        (1500, 4096, 2048, 2048),
    ],
)
def test_each_passage_is_computed_twice_in_a_row(n_tokens, n_positions, n_text, step):
    ids, *rest = _texts(range(n_tokens), n_positions)
    assert rest == [n_text, step]
    expected = [
        token
        for start in range(0, n_tokens, n_text // 2)
        for token in 2 * list(range(start, min(start + n_text // 2, n_tokens)))
    ]
    assert ids.tolist() == expected
