"""Unbiased pass@k."""

from __future__ import annotations

from pipeline.errors import ConfigError


def pass_at_k(n: int, solved: int, k: int) -> float:
    """Probability that at least one of k samples, drawn from n without replacement, is among the `solved` ones.

    1 - C(n - c, k) / C(n, k) as a product of factors in [0, 1] (Chen et al. 2021, "Evaluating large language models trained on
    code"): no large binomials. Raises ConfigError when k > n.
    """
    if not 1 <= k <= n:
        raise ConfigError(f"pass@{k} needs at least {k} samples of a task, there are {n}: raise eval.n or lower eval.k")
    if not 0 <= solved <= n:
        raise ValueError(f"{solved} of {n} samples solved")
    if n - solved < k:
        return 1.0
    failing = 1.0
    for i in range(n - solved + 1, n + 1):
        failing *= 1.0 - k / i
    return 1.0 - failing
