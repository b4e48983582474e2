# SPDX-License-Identifier: Apache-2.0
"""How often the thresholds are exceeded when nothing is wrong: norms that only scatter, around a level that stays.

    python benchmarks/false_triggers.py [--steps 4000] [--units 500] [--seed 0]

Independent lognormal norms, no drift, judged by the paper's rule (cumulative mean, window 5). Per scatter sigma of the
log norm: the share of unit-steps with the ratio above alpha, and with the jump above beta, after the first 100 steps.
The paper's Theorem 2 bounds this share; it gives no figures.
"""

import argparse

import numpy as np
from common import save

from trimtab.control.policy import Policy
from trimtab.control.replay import replay

SIGMAS = (0.1, 0.2, 0.3)
ALPHAS = (1.1, 1.5, 2.0)
BETAS = (1.3, 1.5, 2.0)
SETTLED = 100


def shares(sigma: float, steps: int, units: int, seed: int) -> dict[str, float]:
    """The share of unit-steps above each threshold."""
    norms = np.exp(sigma * np.random.default_rng(seed).standard_normal((steps, units))).astype(np.float32)
    found = replay(norms, Policy(alpha_warmup=None, window=5))
    ratio, jump = found.ratio[SETTLED:], found.jump[SETTLED:]
    over = {f"ratio > {alpha}": float((ratio > alpha).mean()) for alpha in ALPHAS}
    return over | {f"jump > {beta}": float((jump > beta).mean()) for beta in BETAS}


def main() -> None:
    """Print and save the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--units", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    table = {f"sigma {sigma}": shares(sigma, args.steps, args.units, args.seed) for sigma in SIGMAS}
    save("false_triggers", table, steps=args.steps, units=args.units, seed=args.seed)


if __name__ == "__main__":
    main()
