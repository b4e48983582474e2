# SPDX-License-Identifier: Apache-2.0
"""How fast a policy is replayed: unit-steps per second on one core, over recorded-like norms.

    OMP_NUM_THREADS=1 python benchmarks/replay.py [--steps 20000]

`quiet` norms rarely trigger; `busy` ones (sigma 0.3, paper thresholds) fill the budget on nearly every step, the
worst case for the row-by-row part of the decision.
"""

import argparse
import time

import numpy as np
from common import save

from trimtab import Policy, replay
from trimtab.control.policy import HISTORIES


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    draw = np.random.default_rng(0)
    table = {}
    for units in (84, 224):
        for name, sigma, policy in (("quiet", 0.1, Policy(alpha=1.5)), ("busy", 0.3, Policy())):
            norms = np.exp(sigma * draw.standard_normal((args.steps, units))).astype(np.float32)
            for history in HISTORIES:
                best = min(_seconds(norms, policy.replace(history=history)) for _ in range(args.repeats))
                table[f"{units} units, {name}, {history}"] = {"million_per_s": round(norms.size / best / 1e6, 2)}
    save("replay_cpu", table, steps=args.steps, repeats=args.repeats, seed=0)


def _seconds(norms: np.ndarray, policy: Policy) -> float:
    started = time.perf_counter()
    replay(norms, policy, keep="summary")
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
