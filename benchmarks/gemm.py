# SPDX-License-Identifier: Apache-2.0
"""One product and its casts: BF16 against FP8 and INT8 on the shapes of large decoders.

    python benchmarks/gemm.py [--rounds 20] [--shapes 16384x2048x8192,...]

Per shape tokens x in x out, interleaved: the BF16 product; the FP8 product alone (operands cast before), per tensor,
per row and per 128 numbers; the INT8 one; each cast alone, in one layout and in both; saved activations packed and
unpacked, in one launch and by torch operations; and the whole linear, forward and backward, in BF16 and in each recipe.
TFLOP/s and GB/s are of what the operation must do: 2 M K N operations, or its reads and writes. What a GPU does not
have is left out.
"""

import argparse
import functools
import time
from collections.abc import Callable

import torch
from common import against, interleave, save
from torch import Tensor, nn

from trimtab import convert_
from trimtab.linear import packing, real, tiles
from trimtab.linear.paths import Cast
from trimtab.linear.quantize import group_amax

SHAPES = "16384x2048x2048,16384x2048x8192,16384x8192x2048,16384x4096x14336"
RECIPES = ("fp8", "fp8_delayed", "fp8_row", "fp8_block", "int8", "saved4")
MOVED = {
    "amax": 2,
    "cast": 3,
    "cast transposed": 3,
    "cast both": 4,
    "cast tiles": 3,
    "cast tiles transposed": 3,
    "cast tiles both": 4,
    "cast squares": 3,
    "cast squares transposed": 3,
    "pack e2m1": 2.5,
    "pack e2m1, torch operations": 2.5,
    "unpack e2m1": 2.5,
    "pack e4m3": 3,
    "unpack e4m3": 3,
}
"""Bytes read and written per number."""


def timed(call: Callable[[], object], repeats: int = 10) -> Callable[[], float]:
    """Seconds per call, by the host's clock around a batch of them."""

    def run() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / repeats

    return run


def operand(x: Tensor, cast: Cast) -> real.Side:
    """A matrix as the left or right side of a product."""
    made = real._quantize(x, cast, group_amax(x, cast.group), (True, False))[0]
    assert made is not None
    return made


def linear(tokens: int, into: int, out: int, recipe: str | None) -> Callable[[], None]:
    """Forward and backward of one linear."""
    module = nn.Sequential(nn.Linear(into, out, bias=False)).to("cuda", torch.bfloat16)
    if recipe is not None:
        convert_(module, recipe)
    x = torch.randn(tokens, into, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, out, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        module(x).backward(grad)

    return run


def tiled(x: Tensor, w: Tensor) -> dict[str, Callable[[], object]]:
    """Casts and the three products with a scale per 128 numbers."""
    tile, column, square = (Cast("e4m3", group) for group in ((1, 128), (128, 1), (128, 128)))
    dy = torch.randn(x.shape[0], w.shape[0], device=x.device, dtype=x.dtype)
    pairs = {
        "output": (tiles.quantize(x, tile, None)[0], tiles.quantize(w, square, None)[0]),
        "grad_input": (tiles.quantize(dy, tile, None)[0], tiles.quantize(w, None, square)[1]),
        "grad_weight": (tiles.quantize(dy, None, column)[1], tiles.quantize(x, None, column)[1]),
    }
    arms: dict[str, Callable[[], object]] = {}
    for role, (a, b) in pairs.items():
        assert a is not None
        assert b is not None
        arms[f"fp8 product per 128, {role}"] = functools.partial(tiles.multiply, a, b, torch.bfloat16)
    return arms | {
        "cast tiles": lambda: tiles.quantize(x, tile, None),
        "cast tiles transposed": lambda: tiles.quantize(x, None, column),
        "cast tiles both": lambda: tiles.quantize(x, tile, column),
        "cast squares": lambda: tiles.quantize(w, square, None),
        "cast squares transposed": lambda: tiles.quantize(w, None, square),
    }


def packed(x: Tensor) -> dict[str, Callable[[], object]]:
    """Saved activations in 4 and 8 bits."""
    arms: dict[str, Callable[[], object]] = {}
    for fmt in ("e2m1", "e4m3"):
        made = packing.pack(x, fmt)
        arms[f"pack {fmt}"] = functools.partial(packing.pack, x, fmt)
        arms[f"unpack {fmt}"] = functools.partial(packing.unpack, *made, fmt, x.shape[1], x.dtype)
    arms["pack e2m1, torch operations"] = lambda: packing.pack(x, "e2m1", group_amax(x, "token"))
    return arms


def measure(tokens: int, into: int, out: int, rounds: int) -> dict[str, dict[str, float]]:
    """Everything on one shape."""
    x = torch.randn(tokens, into, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(out, into, device="cuda", dtype=torch.bfloat16)
    per = {"tensor": Cast("e4m3", "tensor"), "row": Cast("e4m3", "token"), "int8": Cast("int8", "token")}
    sides = {name: (operand(x, cast), operand(w, cast)) for name, cast in per.items()}
    amax = group_amax(x, "tensor")
    has_tiles = tiles.lacks(x.device) is None
    recipes = [recipe for recipe in RECIPES if has_tiles or recipe != "fp8_block"]
    arms: dict[str, Callable[[], object]] = {
        "bf16": lambda: x @ w.t(),
        "fp8 product": lambda: real._multiply("output", *sides["tensor"], torch.bfloat16),
        "fp8 product, exact sums": lambda: real._multiply("grad_input", *sides["tensor"], torch.bfloat16),
        "fp8 product per row": lambda: real._multiply("output", *sides["row"], torch.bfloat16),
        "int8 product": lambda: real._multiply("output", *sides["int8"], torch.bfloat16),
        "amax": lambda: torch.linalg.vector_norm(x, torch.inf),
        "cast": lambda: real._quantize(x, per["tensor"], amax, (True, False)),
        "cast transposed": lambda: real._quantize(x, per["tensor"], amax, (False, True)),
        "cast both": lambda: real._quantize(x, per["tensor"], amax, (True, True)),
        **(tiled(x, w) if has_tiles else {}),
        **packed(x),
        "linear bf16": linear(tokens, into, out, None),
        **{f"linear {recipe}": linear(tokens, into, out, recipe) for recipe in recipes},
    }
    for call in arms.values():
        call()
    table = against(interleave({name: timed(call) for name, call in arms.items()}, rounds), "bf16")
    for name, row in table.items():
        if name in MOVED:
            numbers = w.numel() if "squares" in name else x.numel()
            row["GB/s"] = round(MOVED[name] * numbers / row["ms"] / 1e6, 1)
        else:
            products = 3 if name.startswith("linear") else 1
            row["TFLOP/s"] = round(products * 2 * tokens * into * out / row["ms"] / 1e9, 1)
    return table


def main() -> None:
    """Run every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shapes", default=SHAPES)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU with FP8 units: there is no CUDA device")
    shapes = [tuple(int(n) for n in shape.split("x")) for shape in args.shapes.split(",")]
    table = {"x".join(map(str, shape)): measure(*shape, args.rounds) for shape in shapes}
    save("gemm_cuda", table, rounds=args.rounds)


if __name__ == "__main__":
    main()
