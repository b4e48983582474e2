# SPDX-License-Identifier: Apache-2.0
"""One scale for a block of 128 tokens of output gradients: a loud token silences its neighbours.

DeepSeek-V3 (arXiv 2412.19437, appendix B.2) reports that a model of about 16B parameters diverged near 300B tokens
when the gradients that enter grad_input were quantized in blocks of 128 x 128 instead of tiles of 1 x 128. That is E4M3
and a long run; a short one shows nothing in E4M3, so the exhibit has E2M1 gradients in its arms and E4M3 beside them.
"""

from trimtab.lab.exhibits.case import SMALL, Arm, Exhibit, convert_anew_
from trimtab.lab.run import Run
from trimtab.linear.paths import Cast, Gemm, Path, Recipe


def gradient_blocks(fmt: str, rows: int) -> Recipe:
    """E4M3 tiles everywhere, but for the output gradient: this format, one scale for `rows` tokens."""
    tile, column, block = (Cast("e4m3", group) for group in ((1, 128), (128, 1), (128, 128)))
    gradient = Cast(fmt, (rows, 128))
    low = Path(
        f"gradient-{fmt}-{rows}x128",
        output=Gemm(tile, block),
        grad_input=Gemm(gradient, block),
        grad_weight=Gemm(Cast(fmt, (128, 1)) if rows == 1 else gradient, column),
    )
    return Recipe(low, Path.plain(), name=low.name)


def coarse(run: Run, broken: bool) -> None:
    """Blocks of 128 tokens, or tiles of one; the seed recipe's name says the gradient's format."""
    fmt = "e4m3" if run.config.recipe == "fp8_block" else "e2m1"
    convert_anew_(run, gradient_blocks(fmt, 128 if broken else 1))


_LOW = {"mode": "observe", "path": "low"}

BLOCKS = Exhibit(
    name="blocks",
    thread="deepseek-ai/DeepGEMM#10",
    what="do gradients need care in a block-scaled backward? 128 x 128 blocks diverged (arXiv 2412.19437, B.2)",
    settings=SMALL | {"steps": 70, "recipe": "fp4"},
    prepare=coarse,
    more=(
        Arm("tiles", _LOW, broken=False, note="low, one scale per token"),
        Arm("e4m3", _LOW | {"recipe": "fp8_block"}, note="low, blocks of 128 x 128, as in the paper"),
        Arm("e4m3-tiles", _LOW | {"recipe": "fp8_block"}, broken=False, note="low, one scale per token"),
    ),
    note="E2M1 gradients stand in for E4M3 and 300B tokens",
)
