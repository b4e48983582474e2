# SPDX-License-Identifier: Apache-2.0
"""`trimtab bench`: a suite of experiments, arm against arm over seeds, with one table and one page."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.train import SetOption

if TYPE_CHECKING:
    from trimtab.lab.bench import Outcome, Task


def run(
    suite: Annotated[
        str | None, typer.Argument(metavar="SUITE", help="smoke, saved (A), blocks (B), experts (D), ...: see --list.")
    ] = None,
    arms: Annotated[str | None, typer.Option(metavar="A,B", help="Arms instead of the suite's own.")] = None,
    cells: Annotated[str | None, typer.Option(metavar="A,B", help="Cells to run, by name or pattern.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 3,
    device: Annotated[str, typer.Option(help="Same as --set device=...")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Where runs and report go.  [default: runs/bench/SUITE]")] = None,
    set_: SetOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each with one thread.")] = 1,
    list_: Annotated[bool, typer.Option("--list", help="Show suites, their cells, and arms.")] = False,
) -> None:
    """Run a suite: every cell with every arm and seed, into --out, with a table and report.html there.

    Interrupted, it goes on where it was: finished runs are not run again. low is always among the arms, and so are what
    is possible (high, or clean where faults are injected) and what an arm is measured by.
    """
    from trimtab.cli.console import console
    from trimtab.errors import MissingExtraError, TrimtabError
    from trimtab.lab.config import Config, load_settings
    from trimtab.lab.suites import find_suite

    if list_:
        _list()
        return
    if suite is None:
        raise TrimtabError("bench needs the name of a suite: trimtab bench smoke, or trimtab bench --list for all")
    if suite == "museum":
        _museum(out or Path("runs/bench/museum"), seeds)
        return
    chosen = find_suite(suite)
    if cells is not None:
        chosen = chosen.only(_words(cells))
    given = load_settings(None, set_ or ()) | ({"device": device} if device != "auto" else {})
    if "seed" in given:
        raise TrimtabError(f"a bench has its own seeds, 0 and up, got seed={given['seed']}: give --seeds N")
    Config.from_dict(given)  # refuse bad settings before torch is loaded

    from trimtab.control.secrets import command_line
    from trimtab.lab.bench import run_bench
    from trimtab.report.bench import plain_table, says, table, write_bench_page

    out = out or Path("runs/bench") / chosen.name
    progress = _Progress()
    try:
        result = run_bench(
            chosen,
            out,
            seeds=range(seeds),
            arms=None if arms is None else _words(arms),
            given=given,
            jobs=jobs,
            command=["trimtab", *command_line()[1:]],
            watch=progress.watch,
            told=progress.told,
        )
    except KeyboardInterrupt:
        console.print("the same command goes on where this one was")
        raise
    for cell in result["cells"]:
        console.print(f"\n{cell['name']}", markup=False)
        console.print(plain_table(*table(cell, result["metrics"])), markup=False)
    for row in result["sweeps"]:
        if row.get("largest_stable") is not None:
            rate, flat = row["largest_stable"], row["sensitivity"]
            console.print(
                f"{row['group']} {row['arm']}: stable up to lr {rate:g}, sensitivity {flat:.3f}", markup=False
            )
    console.print()
    for line in says(result):
        console.print(line, markup=False)
    try:
        console.print(f"report: {write_bench_page(result, out / 'report.html')}", markup=False)
    except MissingExtraError as error:  # nothing is lost: runs and bench.json are there
        console.print(f"report: not written. {error}, then the same command writes it", markup=False)


class _Progress:
    """On a terminal a bar while a run goes on; everywhere a line after it."""

    def __init__(self) -> None:
        self._began, self._ran = time.monotonic(), 0

    def watch(self, task: "Task") -> Any:
        from trimtab.cli.console import Display, console
        from trimtab.lab.run import Silent

        class Bar(Display):
            def evaluated(self, step: int, losses: Any) -> None:
                """The line after the run is enough."""

        return Bar(task.name, notes=False) if console.is_terminal else nullcontext(Silent())

    def told(self, number: int, total: int, task: "Task", outcome: "Outcome") -> None:
        from trimtab.cli.console import console

        self._ran += not outcome.before
        each = (time.monotonic() - self._began) / max(self._ran, 1)
        left = f", about {each * (total - number) / 60:.0f} min left" if self._ran and number < total else ""
        end = "died" if outcome.died else "found" if outcome.before else "done"
        console.print(f"{number}/{total}  {task.name}  {end}, {outcome.seconds:.0f} s{left}", markup=False)


def _words(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _list() -> None:
    from trimtab.cli.console import console
    from trimtab.lab.arms import ARMS
    from trimtab.lab.suites import SUITES

    console.print("suites")
    for name, suite in SUITES.items():
        letter = f" ({suite.family})" if suite.family else ""
        console.print(f"  {name + letter:<13}{suite.what}", markup=False)
        console.print(f"{'':<15}cells: {', '.join(cell.name for cell in suite.cells)}", markup=False)
        console.print(f"{'':<15}arms: {', '.join(suite.arms)}", markup=False)
    console.print("  museum       Small reproductions of failures that others have reported.")
    console.print("arms")
    for name, arm in ARMS.items():
        after = f" (after {arm.after})" if arm.after else ""
        console.print(f"  {name:<22}{arm.what}{after}", markup=False)


def _museum(out: Path, seeds: int) -> None:
    from trimtab.cli.console import Display, console
    from trimtab.control.secrets import command_line
    from trimtab.files import write_whole
    from trimtab.lab.museum import run_museum
    from trimtab.report.bench import plain_table
    from trimtab.report.museum import HEADS, cases, entries, to_json, write_museum_page

    command = ["trimtab", *command_line()[1:]]
    rows = run_museum(out, seeds=seeds, watch=lambda name: Display(name, notes=False))
    write_whole(out / "bench.json", to_json(rows, command))
    for case, mine in cases(rows).items():
        console.print(f"\n{case}: {mine[0]['what']}", markup=False)
        console.print(plain_table(HEADS, [entries(row) for row in mine]), markup=False)
    console.print(f"report: {write_museum_page(rows, out / 'report.html', command=command)}", markup=False)
