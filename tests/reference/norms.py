# SPDX-License-Identifier: Apache-2.0
"""Random norms with everything that is hard: zeros, ties, NaN, Inf, units that are not seen or may not be chosen."""

import numpy as np

VALUES = np.array([0.0, 0.5, 1.0, 1.0, 2.0, 3.0, 7.0, 1e-20, 1e20, np.nan, np.inf], np.float32)


def random_norms(rng: np.random.Generator, most: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Norms of fewer than `most` steps; now and then a mask of what was seen, and of who may be chosen."""
    steps, units = int(rng.integers(1, most)), int(rng.integers(1, 7))
    norms = np.exp(rng.normal(0, 0.7, (steps, units))).astype(np.float32)
    special = rng.random(norms.shape) < rng.choice([0.0, 0.3, 0.9])
    norms[special] = rng.choice(VALUES, int(special.sum()))
    if units > 1 and rng.random() < 0.3:
        norms[:, 1] = norms[:, 0]  # ties at every step
    seen = rng.random(norms.shape) < 0.8 if rng.random() < 0.5 else None
    return norms, seen, rng.random(units) < 0.7 if rng.random() < 0.4 else None
