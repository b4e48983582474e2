# SPDX-License-Identifier: Apache-2.0
"""What the verbs that read a finished run share: its files, how its columns are called, a policy to start from."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from trimtab.control.policy import Policy
    from trimtab.report.imports import Log

FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN|FILE...",
        help="A run folder or trace.arrow; or TensorBoard event files, .csv, .jsonl, .json, .parquet of one run.",
    ),
]
ColumnsOption = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Columns that are norms of units, such as 'layers.*.gnorm'; repeatable."),
]
LossOption = Annotated[str | None, typer.Option(metavar="COLUMN", help="The column of the loss.")]
StepOption = Annotated[str | None, typer.Option(metavar="COLUMN", help="The column of the steps.")]


def none_yet(log: "Log", path: Path) -> str:
    """What to say of a log without a single norm."""
    if log.ours:
        return f"{path} holds no step yet: let the run go on for a while"
    return f"this needs gradient norms, and {path} has none: give a run folder, or name their columns with --columns"


def policy_of(log: "Log", sets: Sequence[str]) -> "tuple[Policy, Policy]":
    """The policy that a run was recorded under (or the default), and the same with some settings changed."""
    from trimtab.control.policy import Policy
    from trimtab.lab.config import load_settings

    own = Policy.from_dict(log.header.policy)
    settings = load_settings(None, sets)
    # A nested policy table is lifted to the top: here alpha=2 and policy.alpha=2 mean the same.
    asked = {k: v for k, v in settings.items() if k != "policy"} | dict(settings.get("policy", {}))
    base = Policy.preset(str(asked.pop("preset"))) if "preset" in asked else own
    return own, base.replace(**asked)


def table_of(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
    """A table for the terminal: the first column is text, the others are numbers."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from trimtab.report.names import visible

    table = Table(
        title=escape(visible(title)), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False
    )
    for place, head in enumerate(heads):
        table.add_column(escape(visible(head)), justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(visible(cell)) for cell in row))
    return table
