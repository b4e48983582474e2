# SPDX-License-Identifier: Apache-2.0
"""`trimtab sweep`: what many policies would have decided on a run's recorded norms, and which to try first."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.logs import ColumnsOption, FilesArgument, LossOption, StepOption


def run(
    files: FilesArgument,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A policy setting of all of them, such as max_high=4."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,C", help="Values to cross with the other grids, such as alpha=1.5,2,3."),
    ] = None,
    alarms: Annotated[float, typer.Option(help="False alarms per 1,000 quiet steps that are acceptable.")] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Where to write the page; a run folder gets a sweep.html.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    columns: ColumnsOption = None,
    loss: LossOption = None,
    step: StepOption = None,
) -> None:
    """Try a grid of policies on the norms that a run recorded, or that another tool logged, and suggest one.

    How often each fires, what it costs, and how many steps before a loss spike. A sweep is open-loop: the norms were
    made under another policy.
    """
    import json
    import shlex

    from trimtab.cli.console import console
    from trimtab.cli.logs import none_yet, policy_of, table_of
    from trimtab.errors import TrimtabError
    from trimtab.report.imports import read_log
    from trimtab.report.names import visible
    from trimtab.report.whatif import (
        MEANINGS,
        OPEN_LOOP,
        bases_of,
        changed,
        grid_of,
        says,
        table,
        whatif,
        write_sweep_page,
    )

    if not alarms >= 0:
        raise TrimtabError(f"--alarms must be a number of at least 0, got {alarms}")
    log = read_log(*files, columns=columns or (), loss=loss, step=step)
    if not log.rows:
        raise TrimtabError(none_yet(log, files[0]))
    own, base = policy_of(log, set_ or ())
    asked = grids(grid or ())
    found = whatif(log, grid_of(base, asked), most_alarms=alarms, calibrate=() if asked else bases_of(base))
    target = out or (log.folder / "sweep.html" if log.folder is not None else None)
    page = write_sweep_page(found, target) if target is not None else None
    if json_:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
        return
    for note in log.notes:
        console.print(visible(note), markup=False)
    heads, rows = table(found)
    rows = [[f"{row[0]} *" if row[0] == found.suggested else row[0], *row[1:]] for row in rows]
    title = f"{log.rows:,} steps, {len(log.header.units):,} units"
    console.print(table_of(title, heads, rows), width=None if console.is_terminal else 120)
    for head in heads[1:]:
        console.print(f"{head}: {MEANINGS[head]}", markup=False)
    for line in says(found):
        console.print(line, markup=False)
    if log.header.quotas:
        console.print("the run had a budget for each stage: here each policy has one for all units")
    console.print(OPEN_LOOP)
    if page is not None:
        console.print(str(page), markup=False)
    settings = changed(found.advice.row.policy, own)
    if settings:
        console.print(f"next: trimtab replay {shlex.join(map(str, files))} {settings}", markup=False)


def grids(pairs: Sequence[str]) -> dict[str, list]:
    """`alpha=1.1,2` as values, each read as a setting is."""
    from trimtab.errors import TrimtabError
    from trimtab.lab.config import parse_value

    found: dict[str, list] = {}
    for pair in pairs:
        key, equals, values = pair.partition("=")
        if not equals or not key or not values:
            raise TrimtabError(f"--grid must be KEY=A,B,C, got {pair!r}")
        found[key.strip().removeprefix("policy.")] = [parse_value(value) for value in values.split(",")]
    return found
