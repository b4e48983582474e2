# SPDX-License-Identifier: Apache-2.0
"""`trimtab report`: one self-contained HTML page about a run."""

from pathlib import Path
from typing import Annotated

import typer


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path | None, typer.Option(help="Where to write it, if not in the run folder.")] = None,
) -> None:
    """Write one HTML page about a run: verdict, loss, every unit's ratio, who ran high and why. Opens offline."""
    from trimtab.cli.console import console
    from trimtab.report.page import write_page
    from trimtab.report.summary import summarize

    path = write_page(folder, out)
    console.print(summarize(folder).verdict)
    console.print(str(path))
