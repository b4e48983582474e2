# SPDX-License-Identifier: Apache-2.0
"""`trimtab export`: what a run says to keep high, in another tool's own form."""

from pathlib import Path
from typing import Annotated

import typer


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[str, typer.Option(metavar="torchao|te|megatron", help="Whose form.")],
    top: Annotated[
        int | None,
        typer.Option(metavar="N", help="The N units with the most steps high, not only persistent offenders."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it, if not to the terminal.")] = None,
) -> None:
    """Write the persistent offenders of a run as a static keep-high list for torchao, Transformer Engine or Megatron.

    torchao: a Python file with a module_filter_fn. te: one that puts a nested autocast around the modules. megatron:
    the YAML of --te-precision-config-file, with Megatron's names.
    """
    from trimtab.checks import meant
    from trimtab.cli.console import console
    from trimtab.errors import TrimtabError
    from trimtab.report.keep import TARGETS, keep_list
    from trimtab.report.read import read_run

    if to not in TARGETS:
        raise TrimtabError(f"--to must be one of {', '.join(TARGETS)}, got {to!r}: {meant(to, TARGETS)}")
    units = keep_list(folder, top)
    text = TARGETS[to](units, read_run(folder, with_trace=False).name)
    if out is None:
        print(text, end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    console.print(f"{len(units)} units to keep high: {out}", markup=False)
