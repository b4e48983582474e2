# SPDX-License-Identifier: Apache-2.0
"""What a replay of a recorded trace decides, under the policy and the detector that the trace names."""

import trimtab
from trimtab.control.policy import Policy
from trimtab.control.replay import Decisions
from trimtab.report.read import Trace


def replayed(trace: Trace) -> Decisions:
    """The decisions of every recorded pass."""
    return trimtab.replay(
        trace.norms,
        Policy.from_dict(trace.policy),
        seen=trace.seen,
        recoverable=trace.recoverable,
        total_steps=trace.total_steps,
        detector=trace.detector,
        columns=trace.columns,
        parts=[part.units for part in trace.quotas],
    )
