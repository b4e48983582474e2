# SPDX-License-Identifier: Apache-2.0
"""`trimtab diagnose`: which units low precision hurts, without training anything."""

import json
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trimtab.lab.diagnosis import Row


def run(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A run folder, a checkpoint of one, a Hugging Face folder, a GGUF file, or smollm2."
        ),
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A file or folder of text, or stdlib.")],
    recipe: Annotated[str, typer.Option(help="What low and high mean: fp8, fp4, saved4, ...")] = "fp8",
    unit: Annotated[str, typer.Option(help='linear, block, expert, or patterns: ["*.q", "*.down"].')] = "linear",
    batches: Annotated[int, typer.Option(min=1, help="Batches that means and intervals are over.")] = 8,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per batch, if not the run's own.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence, if not the run's own.")] = None,
    keep: Annotated[
        str, typer.Option(metavar="N", help="Length of the keep-high list: a count, or a share of the units.")
    ] = "0.05",
    by: Annotated[
        str, typer.Option(metavar="gap|own", help="Rank by what is worth recovering, or by what is broken.")
    ] = "gap",
    roles: Annotated[
        bool, typer.Option("--roles/--no-roles", help="Also which product of a unit it is: up to twice the passes.")
    ] = True,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 20,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page there.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str | None, typer.Option(help="Where to run; by default a GPU if there is one.")] = None,
) -> None:
    """Measure, for each unit, what its low path does to the gradient and the loss, and rank the units.

    The recovery gap of a unit is the squared gradient error with everything low, less what is left of it when this
    unit alone runs high: what is worth recovering. Its own error is that of its own parameters' gradient with only
    this unit low: what is broken. Nothing is trained and nothing is written but the page that is asked for.
    """
    from rich.console import Console

    from trimtab.cli.console import console
    from trimtab.errors import TrimtabError
    from trimtab.lab.config import parse_value
    from trimtab.lab.diagnose import diagnose
    from trimtab.lab.diagnosis import RANKINGS
    from trimtab.lab.subject import load_subject
    from trimtab.linear.paths import ROLES
    from trimtab.report.diagnosis import verdict, write_diagnosis

    if by not in RANKINGS:
        raise TrimtabError(f"--by must be {' or '.join(RANKINGS)}, got {by!r}")
    subject = load_subject(
        model, data, recipe=recipe, unit=parse_value(unit), batches=batches, batch=batch, seq=seq, device=device
    )
    began = time.perf_counter()
    with _Bar(quiet=json_) as bar:
        result = diagnose(
            subject.model,
            subject.batches,
            loss_fn=subject.loss_fn,
            roles=ROLES if roles else (),
            max_high=parse_value(keep),
            progress=bar.moved,
        )
    seconds = round(time.perf_counter() - began, 1)
    about = {"model": subject.name, "step": subject.step, "data": subject.data, "seconds": seconds}
    found = about | result.to_dict()
    if page is not None:
        write_diagnosis(found, page)
    if json_:
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    at = "" if subject.step is None else f" at step {subject.step}"
    console.print(
        f"{subject.name}{at}, {len(result.units)} units, {batches} batches of {subject.data}, {result.passes:,} passes "
        f"in {seconds:.0f} s; recipe {subject.report.recipe.short_str()}",
        markup=False,
    )
    low = found["all_low"]
    error, change = _percent(low["relative"]), _change(low["loss_change"])
    console.print(f"everything low: gradient error {error} of the gradient, loss {change}")
    rows = result.ranked(by)
    wide = console if console.is_terminal else Console(width=400, highlight=False)  # a pipe has no edge to cut names at
    wide.print(_table(rows[:top], console.is_terminal))
    if len(rows) > top:
        console.print(f"and {len(rows) - top} more (--top {len(rows)})")
    console.print(verdict(found), markup=False)
    tuning = None if subject.step is not None else f"trimtab finetune {shlex.quote(str(model))} DATA.jsonl"
    if tuning is not None and unit != "block":
        tuning += f" --set {shlex.quote(f'unit={unit}')}"
    for line in _advice(found, subject.report.recipe, tuning):
        console.print(line, markup=False)
    if page is not None:
        console.print(str(page), markup=False)


def _table(rows: "list[Row]", terminal: bool) -> Any:
    from rich.box import HEAVY_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=HEAVY_HEAD if terminal else None)
    table.add_column("unit", overflow="fold")
    for name in ("gap", "95 %", "of all", "own error", "error alone low", "loss alone low"):
        table.add_column(name, justify="right")
    table.add_column("worst role")
    for row in rows:
        low = {name: found.to_dict() for name, found in row.only_low.items()}
        share = "-" if row.share is None else f"{100 * row.share:.1f}%"
        half = "" if row.gap.half != row.gap.half else f"+-{row.gap.half:.2g}"
        cells = (
            f"{row.gap.mean:.3g}",
            half,
            share,
            _percent(low["own"]),
            _percent(low["relative"]),
            _change(low["loss_change"]),
        )
        table.add_row(escape(row.unit), *cells, row.worst_role or "-")
    return table


def _advice(found: Mapping[str, Any], recipe: Any, tuning: str | None) -> list[str]:
    """The keep-high list, and how to follow it.

    Args:
        tuning: how a pretrained model would be fine-tuned; None for a run of our own.
    """
    keep = found["keep_high"]
    if not keep["units"]:
        return ["keep high: none"]
    lines = [f"keep high: {', '.join(keep['units'])}"]
    others = [row["pattern"] for row in found["units"] if row["unit"] not in keep["units"]]
    if tuning is not None:  # where adapters are put around the model, so that names begin with more
        patterns = shlex.quote(f"fixed_high={json.dumps([f'*{unit}' for unit in keep['units']])}")
        lines.append(f"  {tuning} --set recipe={recipe.name} --set {patterns}")
    elif others:
        patterns = shlex.quote(f"unit={json.dumps(sorted(others))}")
        lines.append(f"  trimtab train --set recipe={recipe.name} --set {patterns}")
    lines.append(
        f"  trimtab.convert_(model, {recipe.name!r}, filter_fn=lambda _, path: "
        f"not any(fnmatch(path, p) for p in {keep['patterns']!r}))"
    )
    if not recipe.high.is_plain:
        lines.append(f"  (left out, they run in the model's own precision, not in {recipe.high.name})")
    return lines


def _percent(value: Mapping[str, Any]) -> str:
    return "not finite" if value["mean"] is None else f"{100 * value['mean']:.2f}%"


def _change(value: Mapping[str, Any]) -> str:
    return "not finite" if value["mean"] is None else f"{value['mean']:+.5f}"


class _Bar:
    """How far it is: a bar on a terminal, a line now and then elsewhere, nothing beside JSON."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._bar, self._task = quiet, None, None
        self._began = self._due = 0.0

    def __enter__(self) -> "_Bar":
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from trimtab.cli.console import LINE_SECONDS, console

        self._began = time.monotonic()
        self._due = self._began + LINE_SECONDS
        if console.is_terminal and not self._quiet:
            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("passes"), TimeRemainingColumn())
            self._bar = Progress(TextColumn("[bold]diagnose"), *columns, console=console, transient=True)
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def moved(self, done: int, total: int) -> None:
        """Show that another pass is done, and how long the rest will take."""
        from trimtab.cli.console import LINE_SECONDS, console

        now = time.monotonic()
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("diagnose", total=total)
            self._bar.update(self._task, completed=done)
        elif not self._quiet and now >= self._due:
            self._due = now + LINE_SECONDS
            left = (now - self._began) / done * (total - done)
            console.print(f"pass {done:,} of {total:,}, about {left:.0f} s left")
            sys.stdout.flush()
