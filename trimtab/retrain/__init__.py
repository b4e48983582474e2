# SPDX-License-Identifier: Apache-2.0
"""What becomes of a trained model in very few bits.

rounding.py    the quantizers of the 4-bit check, as pure functions
rtn.py         rtn_: the 4-bit check of a whole model, in place
attention.py   how a model's keys and values are reached
"""

from trimtab.retrain.rounding import mix, quantize_activation, quantize_kv, quantize_weight
from trimtab.retrain.rtn import RtnReport, rtn_

__all__ = ["RtnReport", "mix", "quantize_activation", "quantize_kv", "quantize_weight", "rtn_"]
