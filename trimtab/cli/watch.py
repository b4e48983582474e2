# SPDX-License-Identifier: Apache-2.0
"""`trimtab watch`: a page on this machine that shows runs while they go on."""

from pathlib import Path
from typing import Annotated

import typer


def run(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, shown side by side.")],
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; by default 8642, or a free one if that is taken.")
    ] = None,
    open_: Annotated[
        bool, typer.Option("--open/--no-browser", help="Also open the page in a browser; by default only print it.")
    ] = False,
) -> None:
    """Show runs while they go on: loss, every unit's ratio, who is high, events. Ends with Ctrl-C.

    The page is served to this machine only, changes nothing, and goes on when a run is resumed or started again.
    From elsewhere: `ssh -L 8642:127.0.0.1:8642 HOST`, then http://localhost:8642/ there.
    """
    import webbrowser

    from trimtab.cli.console import console
    from trimtab.report.live import Live

    with Live(folders, port) as live:
        console.print(f"watching {', '.join(map(str, folders))} at {live.url} (Ctrl-C ends it)", markup=False)
        console.file.flush()
        if open_:
            webbrowser.open(live.url)
        try:
            live.serve()
        except KeyboardInterrupt:
            console.print("stopped")
