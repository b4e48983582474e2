# SPDX-License-Identifier: Apache-2.0
"""The exhibits of the museum: one public thread each, by subject.

case.py       what an exhibit is
scaling.py    scales that come from the past: stale after a resume, outgrown, outgrown without saturation
recompute.py  a recompute that differs from its forward: another precision, a scale that never moves
zeros.py      what is divided by zero or never written: LoRA's B, an expert without tokens
blocks.py     one scale for too many output gradients
"""

from trimtab.lab.exhibits.blocks import BLOCKS
from trimtab.lab.exhibits.case import Arm, Exhibit
from trimtab.lab.exhibits.recompute import RECOMPUTE, STUCK
from trimtab.lab.exhibits.scaling import GROWTH, OVERFLOW, RESUME
from trimtab.lab.exhibits.zeros import COLLAPSE, EXPERT, LORA

EXHIBITS: tuple[Exhibit, ...] = (RESUME, GROWTH, OVERFLOW, LORA, BLOCKS, RECOMPUTE, STUCK, EXPERT, COLLAPSE)

__all__ = ["EXHIBITS", "Arm", "Exhibit"]
