# SPDX-License-Identifier: Apache-2.0
"""What becomes of a trained model in very few bits, and how to keep more of it.

settings.py      the numbers of ultra-low-bit retraining, checked
quantizer.py     learnable clipping and LoRA of one weight
fisher.py        saliency: which weights the loss depends on
blocks.py        the decoder blocks of any model, and how it calls them
block.py         calibrate_block: one block, and the objective
walk.py          retrain_: the whole model, block by block, resumable
packed.py        weights as they are stored, what they truly cost, a model in one file
export.py        the result for Transformers and for peft
calibration.py   sequences to calibrate with, and perplexity
rounding.py      the quantizers of the 4-bit check, as pure functions
rtn.py           rtn_: the 4-bit check of a whole model, in place
attention.py     how a model's keys and values are reached
cover.py         which weights are quantized, and why the others are not
"""

from trimtab.retrain.block import Calibrated, calibrate_block
from trimtab.retrain.calibration import perplexity, windows
from trimtab.retrain.export import load_folder, save_adapter, save_base, save_folder, save_model, to_torchao
from trimtab.retrain.fisher import StoredSaliency, saliency
from trimtab.retrain.packed import Packed, bits_per_weight, load_packed_, save_packed
from trimtab.retrain.quantizer import ClippedLora
from trimtab.retrain.rounding import mix, quantize_activation, quantize_kv, quantize_weight
from trimtab.retrain.rtn import RtnReport, rtn_
from trimtab.retrain.settings import Settings
from trimtab.retrain.walk import Progress, Retrained, retrain_

__all__ = [
    "Calibrated",
    "ClippedLora",
    "Packed",
    "Progress",
    "Retrained",
    "RtnReport",
    "Settings",
    "StoredSaliency",
    "bits_per_weight",
    "calibrate_block",
    "load_folder",
    "load_packed_",
    "mix",
    "perplexity",
    "quantize_activation",
    "quantize_kv",
    "quantize_weight",
    "retrain_",
    "rtn_",
    "saliency",
    "save_adapter",
    "save_base",
    "save_folder",
    "save_model",
    "save_packed",
    "to_torchao",
    "windows",
]
