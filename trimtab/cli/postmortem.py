# SPDX-License-Identifier: Apache-2.0
"""`trimtab postmortem`: where a run's loss left its range, and what its gradient norms did before."""

from typing import Annotated

import typer

from trimtab.cli.logs import ColumnsOption, FilesArgument, LossOption, StepOption


def run(
    files: FilesArgument,
    md: Annotated[bool, typer.Option("--md", help="Print Markdown, for an issue or a chat.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    columns: ColumnsOption = None,
    loss: LossOption = None,
    step: StepOption = None,
) -> None:
    """Say where a run went wrong, from whatever it logged: loss, global norm, norms of single units.

    Loss and global norm are enough for the when and for the warning there was; with the norms of single units also for
    the who. What cannot be known is said, and so are the three lines of code that record it next time.
    """
    import json

    from trimtab.cli.console import console
    from trimtab.report.imports import read_log
    from trimtab.report.postmortem import lines, postmortem, to_markdown

    found = postmortem(read_log(*files, columns=columns or (), loss=loss, step=step))
    if json_:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    elif md:
        print(to_markdown(found), end="")
    else:
        for line in lines(found):
            console.print(line, markup=False)
