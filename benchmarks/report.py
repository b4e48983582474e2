# SPDX-License-Identifier: Apache-2.0
"""What a long run's page costs: seconds, bytes and peak memory for a synthetic trace.

python benchmarks/report.py [--steps 100000] [--units 224]
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from common import save

from trimtab import Policy, Recorder
from trimtab.report.page import write_page


def record(folder: Path, steps: int, units: int) -> None:
    """A run whose norms fall slowly, with a spike now and then."""
    draw, policy = np.random.default_rng(0), Policy(alpha=1.5, beta=2.0)
    limits = policy.resolve(units, steps)
    names = [f"blocks.{i // 7}.linear.{i % 7}" for i in range(units)]
    seen, high = np.ones(units, bool), np.zeros(units, bool)
    with Recorder(folder) as recorder:
        recorder.open_trace(names, seen, policy.to_dict(), *limits, steps)
        for step in range(1, steps + 1):
            norms = (draw.lognormal(0, 0.1, units) / (1 + step / 5000) ** 0.3).astype(np.float32)
            norms[step % units] *= 5 if step % 500 == 0 else 1
            recorder.observe(step, norms, seen, high, float(np.linalg.norm(norms)))
            recorder.log(step, loss=2 + 4 / np.sqrt(1 + step / 200) + draw.normal(0, 0.02))


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--units", type=int, default=224)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        started = time.perf_counter()
        record(folder, args.steps, args.units)
        recorded = time.perf_counter()
        page = write_page(folder)
        done = time.perf_counter()
        table = {
            "record_us_per_step": round(1e6 * (recorded - started) / args.steps, 1),
            "trace_bytes_per_unit_step": round((folder / "trace.arrow").stat().st_size / args.steps / args.units, 2),
            "page_seconds": round(done - recorded, 1),
            "page_megabytes": round(page.stat().st_size / 1e6, 2),
            "peak_memory_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000),
        }
    save("report_cpu", table, steps=args.steps, units=args.units, seed=0)


if __name__ == "__main__":
    main()
