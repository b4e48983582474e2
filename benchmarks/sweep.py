# SPDX-License-Identifier: Apache-2.0
"""How long a sweep takes: 50 policies over a recorded trace of 100,000 steps and 224 units, read from disk.

    OMP_NUM_THREADS=1 python benchmarks/sweep.py [--steps 100000] [--policies 50]

`quiet` norms rarely trigger; `busy` ones (sigma 0.3) fill the budget of the lower thresholds on nearly every step, the
worst case for the row-by-row part of the decision. The grid is that of `trimtab sweep`, and a few longer locks.
Beside the time (on a shared machine the CPU's is the fairer one): the largest memory of the process, and what the same
policies cost when each is replayed alone, from 8,192 of the steps.
"""

import argparse
import resource
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
from common import save

from trimtab import Policy, Recorder, replay
from trimtab.control.sweep import Sweep
from trimtab.report.read import iter_trace
from trimtab.report.whatif import grid_of


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--units", type=int, default=224)
    parser.add_argument("--policies", type=int, default=50)
    parser.add_argument("--name", default="sweep_cpu")
    args = parser.parse_args()
    locks = [Policy(lock_steps=2 + k, alpha=2.0) for k in range(args.policies)]
    policies = [*grid_of(Policy()).values(), *locks][: args.policies]
    table = {}
    for name, sigma in (("quiet", 0.1), ("busy", 0.3)):
        with tempfile.TemporaryDirectory() as folder:
            _record(Path(folder), args.steps, args.units, sigma)
            started, worked = time.perf_counter(), time.process_time()
            found = Sweep(policies, np.ones(args.units, bool), args.steps)
            for block in iter_trace(Path(folder) / "trace.arrow"):
                found.add(block.norms, block.seen)
            rows = found.rows()
            seconds, cpu = time.perf_counter() - started, time.process_time() - worked
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            share = np.concatenate([b.norms for b in islice(iter_trace(Path(folder) / "trace.arrow"), 2)])
        worked = time.process_time()
        for policy in policies:
            replay(share, policy, keep="summary", total_steps=args.steps)
        alone = (time.process_time() - worked) * args.steps / len(share)
        table[name] = {
            "policies": len(rows),
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),
            "one_by_one_cpu_seconds": round(alone, 1),
            "peak_mb": round(most / 1024),
        }
    save(args.name, table, steps=args.steps, units=args.units, seed=0)


def _record(folder: Path, steps: int, units: int, sigma: float) -> None:
    draw = np.random.default_rng(0)
    seen, high = np.ones(units, bool), np.zeros(units, bool)
    with Recorder(folder) as recorder:
        names = [f"unit{i}" for i in range(units)]
        recorder.open_trace(names, seen, Policy().to_dict(), max_high=11, warmup_steps=2500, total_steps=steps)
        for step in range(1, steps + 1):
            recorder.observe(step, np.exp(sigma * draw.standard_normal(units)).astype(np.float32), seen, high, 1.0)


if __name__ == "__main__":
    main()
