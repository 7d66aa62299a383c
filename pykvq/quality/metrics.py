"""How far next-token distributions are from reference ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# raised when a figure is computed in another way, so that reports of different versions are not compared
METRICS_VERSION = 1

Logits = npt.NDArray[np.float32]


def log_softmax(logits: Logits) -> Logits:
    """Log probabilities along the last axis."""
    with np.errstate(invalid="ignore"):  # a row that is not finite becomes NaN
        shifted = logits - logits.max(axis=-1, keepdims=True)
        sums = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
        result: Logits = shifted - np.log(sums).astype(np.float32)
    return result


@dataclass
class Divergence:
    """Collects the comparison of one format with the reference, token by token."""

    kld: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    nll_reference: list[float] = field(default_factory=list)
    n_logits: int = 0
    n_nonfinite: int = 0

    def add(self, reference: Logits, logits: Logits, next_tokens: npt.NDArray[np.int32]) -> None:
        """Adds tokens: log probabilities of the reference and own logits, [n, n_vocab], and the true next tokens."""
        self.n_logits += logits.size
        self.n_nonfinite += int(logits.size - np.isfinite(logits).sum())
        own = log_softmax(logits)
        # a token that the reference all but rules out adds nothing, also where its log probability is -inf
        with np.errstate(invalid="ignore"):
            difference = np.where(np.isneginf(reference), 0, reference - own)
            kld = np.einsum("tv,tv->t", np.exp(reference), difference, dtype=np.float64)
        rows = np.arange(len(own))
        self.kld += kld.tolist()
        is_number = ~np.isnan(own).any(-1)
        self.same_top += (is_number & (own.argmax(-1) == reference.argmax(-1))).tolist()
        self.nll += (-own[rows, next_tokens]).tolist()
        self.nll_reference += (-reference[rows, next_tokens]).tolist()

    def summary(self) -> dict[str, float]:
        """The figures of a report; KLD in nats, shares from 0 to 1, ppl_change relative with its standard error.

        The standard error is that of the mean difference of the log likelihoods, tokens taken as independent. Figures
        of logits that are not finite are NaN or infinite themselves, apart from same_top and nonfinite.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            return self._summary()

    def _summary(self) -> dict[str, float]:
        kld = np.array(self.kld)
        change = np.array(self.nll) - np.array(self.nll_reference)
        ratio = float(np.exp(change.mean()))
        return {
            "kld_mean": float(kld.mean()),
            "kld_sem": float(kld.std() / np.sqrt(len(kld))),
            "kld_median": float(np.median(kld)),
            "kld_p99": float(np.quantile(kld, 0.99)),
            "kld_p999": float(np.quantile(kld, 0.999)),
            "same_top": float(np.mean(self.same_top)),
            "ppl": float(np.exp(np.mean(self.nll))),
            "ppl_change": ratio - 1,
            "ppl_change_error": ratio * float(change.std() / np.sqrt(len(change))),
            "nonfinite": self.n_nonfinite / max(1, self.n_logits),
        }
