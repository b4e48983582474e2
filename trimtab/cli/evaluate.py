# SPDX-License-Identifier: Apache-2.0
"""`trimtab evaluate`: the held-out loss of a run's model, and what is left of it in few bits."""

import json
from pathlib import Path
from typing import Annotated

import typer


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    bits: Annotated[
        list[str] | None,
        typer.Option(
            metavar="W-A-KV", help="Bits of weights, activations, keys and values: 4-4-16, 4-4-4+had; repeatable."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Text to take the held-out part of, if not the run's own.")
    ] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Batches, if not as many as in the run.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate the last checkpoint of a run on held-out text, as it was trained and rounded to few bits.

    Without --bits: 4-8-8, 4-4-16, 4-4-4 and 4-4-4+had, which also rotates the input of the down projections. The
    run folder stays as it is.
    """
    from rich.box import HEAVY_HEAD
    from rich.table import Table

    from trimtab.cli.console import console
    from trimtab.lab.evaluate import COLUMNS, evaluate_run

    result = evaluate_run(folder, bits or COLUMNS, data=data, batches=batches)
    if json_:
        console.print(json.dumps(result.to_dict(), indent=2, allow_nan=False), markup=False)
        return
    table = Table(box=HEAVY_HEAD if console.is_terminal else None)
    table.add_column("bits")
    for name in ("loss", "perplexity", *(("bits/byte",) if result.is_bytes else ()), "change in loss"):
        table.add_column(name, justify="right")
    for score in result.scores:
        per_byte = result.bits_per_byte(score)
        change = "" if score is result.scores[0] else f"{result.change(score):+.4f}"
        row = [f"{score.loss:.4f}", f"{score.perplexity:.4g}", *([f"{per_byte:.4f}"] if per_byte is not None else [])]
        table.add_row(str(score.bits), *row, change)
    console.print(f"step {result.step}, {result.tokens:,} held-out tokens of {result.data}", markup=False)
    console.print(table)
    console.print(
        f"excess kurtosis of the residual stream: {result.kurtosis_mean:.2f} on average, {result.kurtosis_max:.2f} at "
        "most (0 is Gaussian)"
    )
