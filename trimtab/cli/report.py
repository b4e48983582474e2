# SPDX-License-Identifier: Apache-2.0
"""`trimtab report`: one self-contained HTML page about a run, or about several; or a short summary and a picture."""

from pathlib import Path
from typing import Annotated

import typer


def run(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run folder; several are compared.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write it, if not in the run folder (several: beside the first).")
    ] = None,
    md: Annotated[bool, typer.Option("--md", help="A short summary in Markdown and a picture instead.")] = False,
) -> None:
    """Write one HTML page about a run: verdict, loss, every unit's ratio, who ran high and why. Opens offline.

    Several runs get one page that compares them. With --md: a Markdown summary and an SVG, for an issue or a chat.
    """
    from trimtab.cli.console import console
    from trimtab.report.compare import compare, verdict, write_comparison, write_comparison_markdown
    from trimtab.report.markdown import write_markdown
    from trimtab.report.names import visible
    from trimtab.report.page import write_page
    from trimtab.report.summary import summarize

    if len(folders) > 1:
        runs = compare(folders)
        path = write_comparison_markdown(runs, out) if md else write_comparison(runs, out)
        told = verdict(runs)
    else:
        path = write_markdown(folders[0], out) if md else write_page(folders[0], out)
        told = visible(summarize(folders[0]).verdict)
    console.print(told, markup=False)
    console.print(visible(str(path)), markup=False)
