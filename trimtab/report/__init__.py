# SPDX-License-Identifier: Apache-2.0
"""Report: read a run folder, sum it up, draw it. Needs no GPU and no torch.

    run.json, metrics.jsonl, trace.arrow --read--> Run --passes--> blocks of (what ran, why) --> summary, pool --> page

The policy's own code is run over the recorded norms again, block by block, so a report of a hundred thousand
steps takes seconds and little memory.
"""

from trimtab.report.page import render, write_page
from trimtab.report.read import Run, Trace, iter_trace, read_run, read_trace, scan_trace
from trimtab.report.summary import Offender, Summary, summarize

__all__ = [
    "Offender",
    "Run",
    "Summary",
    "Trace",
    "iter_trace",
    "read_run",
    "read_trace",
    "render",
    "scan_trace",
    "summarize",
    "write_page",
]
