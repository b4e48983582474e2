# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Transformer Engine, which needs CUDA to be built: the parts that an integration touches.

Faithful in these: `autocast` nests and restores what was around it, a disabled one included; a module asks the global
state once, when its forward starts, and its backward uses what it said; `calibrating` updates amax histories without
quantizing; delayed scaling updates its scales when the outermost enabled region ends; modules made under
`quantized_model_init` hold FP8 weights. The arithmetic is E4M3 rounding around FP32 products.
"""
