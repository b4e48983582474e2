# SPDX-License-Identifier: Apache-2.0
"""`trimtab evaluate`: the held-out loss of a run's model and what is left of it in few bits, or tasks from files."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL", help="A run folder; with --tasks also a Hugging Face folder, a GGUF file, smollm2."
        ),
    ],
    bits: Annotated[
        list[str] | None,
        typer.Option(
            metavar="W-A-KV", help="Bits of weights, activations, keys and values: 4-4-16, 4-4-4+had; repeatable."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Text to take the held-out part of, if not the run's own; the folder of the tasks' files.",
        ),
    ] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Batches, if not as many as in the run.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="gsm8k, gsm8k_match, mmlu, arc_easy, arc_challenge, piqa, openbookqa, winogrande, lambada, wikitext2; "
            "commonsense; all.",
        ),
    ] = None,
    adapter: Annotated[Path | None, typer.Option(metavar="FOLDER", help="A PEFT adapter for the model.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Convert the linears: fp8, int8, ...")] = None,
    path: Annotated[str, typer.Option(metavar="low|high", help="Which path of the recipe.")] = "low",
    backend: Annotated[
        str, typer.Option(metavar="auto|emulated|real", help="Who carries the recipe out; auto is real on a GPU.")
    ] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="So many items of each task: a quick look.")] = None,
    shots: Annotated[int, typer.Option(min=0, help="Examples before a question of gsm8k and mmlu.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Ask gsm8k through the chat template.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a forward.")] = 8,
    context: Annotated[int | None, typer.Option(min=2, help="Most tokens of a row, if not 2048.")] = None,
    engine: Annotated[str, typer.Option(metavar="own|lm-eval", help="Who asks the model.")] = "own",
    dtype: Annotated[
        str | None, typer.Option(metavar="fp32|bf16|fp16", help="Of the weights, if not as stored.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to run; by default a GPU if there is one.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap and of what a recipe draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Results, item by item; finished tasks are kept.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the results in --out.")] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Results of another arm to compare with.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a run on held-out text, or, with --tasks, a model on tasks from local files.

    Of a run: its last checkpoint, as it was trained and rounded to few bits; without --bits 4-8-8, 4-4-16, 4-4-4 and
    4-4-4+had, which also rotates the input of the down projections. The run folder stays as it is.

    With --tasks: every item's answers, and with --against paired differences between the two arms with 95 % intervals.
    --limit is for quick looks; only whole sets give a verdict.
    """
    from trimtab.errors import TrimtabError

    given = {
        "adapter": adapter,
        "recipe": recipe,
        "limit": limit,
        "shots": shots,
        "chat": chat,
        "context": context,
        "dtype": dtype,
        "device": device,
        "out": out,
        "force": force,
    }
    if tasks is None:
        wrong = [f"--{name}" for name, value in ({"against": against} | given).items() if value]
        if wrong:
            raise TrimtabError(f"{', '.join(wrong)} need --tasks, such as --tasks gsm8k,commonsense")
        _run(Path(model), bits, data, batches, json_=json_)
        return
    if batches is not None:
        raise TrimtabError("--batches is for the held-out text of a run: --limit limits the items of a task")
    if data is None:
        raise TrimtabError("tasks are read from local files: name their folder with --data")
    if bits is not None and len(bits) > 1:
        raise TrimtabError(
            f"tasks are answered in one number of bits at a time, got {', '.join(bits)}: give one --bits"
        )
    if path not in ("low", "high"):
        raise TrimtabError(f"--path must be low or high, got {path!r}")
    if path == "high" and recipe is None:
        raise TrimtabError("--path chooses a path of a recipe: name it with --recipe")
    from trimtab.lab.downstream import compare, evaluate_model, read_results
    from trimtab.lab.downstream.tasks import parse_tasks

    names = parse_tasks(tasks)
    other = None if against is None else read_results(against)
    with _Bar(quiet=json_) as bar:
        results = evaluate_model(
            model,
            names,
            data,
            **given,
            path=path,
            backend=backend,
            bits=bits[0] if bits else None,
            batch=batch,
            engine=engine,
            seed=seed,
            against=other,
            progress=bar.moved,
        )
    found = [] if other is None else compare(results, other, seed=seed)
    if json_:
        tables = {name: {k: v for k, v in one.items() if k != "items"} for name, one in results["tasks"].items()}
        shown = results | {"tasks": tables}
        print(json.dumps(shown | ({"against": [one.to_dict() for one in found]} if found else {}), indent=2))
        return
    _show(results, out)
    if other is not None:
        _show_differences(found, other)


def _show(results: Mapping[str, Any], out: Path | None) -> None:
    from trimtab.cli.console import console

    about = results["about"]
    how = [about[key] for key in ("adapter", "bits") if about[key]]
    how += [f"{about['recipe']} {about['path']}"] if about["recipe"] else []
    console.print(f"{about['model']}{''.join(f', {one}' for one in how)}, {about['dtype']}", markup=False)
    table = _table("task", "items", "measure", "value", "95 %")
    for name, task in results["tasks"].items():
        for number, (measure, one) in enumerate(task["scores"].items()):
            ends = "" if one["low"] is None else f"{one['low']:.4g} to {one['high']:.4g}"
            items = f"{task['n']:,}" if task["n"] == task["of"] else f"{task['n']:,} of {task['of']:,}"
            first = (name, items) if number == 0 else ("", "")
            table.add_row(*first, measure, "not finite" if one["value"] is None else f"{one['value']:.4f}", ends)
    _print(table)
    if "commonsense" in results:
        common = results["commonsense"]
        names = ", ".join(f"{name} {measure}" for name, measure in common["of"].items())
        console.print(f"commonsense average {common['average']:.4f} of {names} ({common['note']})", markup=False)
    if any(task["n"] < task["of"] for task in results["tasks"].values()):
        console.print("a quick look: no conclusion without whole sets (leave --limit out)")
    if out is not None:
        console.print(f"next: trimtab evaluate OTHER ... --against {out}", markup=False)


def _show_differences(found: Any, other: Mapping[str, Any]) -> None:
    from trimtab.cli.console import console

    about = other["about"]
    tag = "".join(f", {about[key]}" for key in ("adapter", "bits", "recipe", "path") if about[key])
    console.print(f"against {about['model']}{tag}; more is better, of perplexities the log-likelihood's", markup=False)
    table = _table("task", "measure", "this", "that", "difference", "95 %")
    table.add_column("verdict")
    for one in found:
        ends = "" if one.low != one.low else f"{one.low:+.4g} to {one.high:+.4g}"
        row = (one.task, one.measure, f"{one.ours:.4f}", f"{one.theirs:.4f}", f"{one.mean:+.4g}", ends, one.verdict)
        table.add_row(*row)
    _print(table)


def _print(table: Any) -> None:
    from rich.console import Console

    from trimtab.cli.console import console

    wide = console if console.is_terminal else Console(width=400, highlight=False)  # a pipe has no edge to cut at
    wide.print(table)


def _table(*names: str) -> Any:
    from rich.box import HEAVY_HEAD
    from rich.table import Table

    from trimtab.cli.console import console

    table = Table(box=HEAVY_HEAD if console.is_terminal else None)
    for name in names:
        table.add_column(name, justify="left" if name in ("task", "measure") else "right")
    return table


def _run(folder: Path, bits: list[str] | None, data: str | None, batches: int | None, *, json_: bool) -> None:
    """The last checkpoint of a run."""
    from trimtab.cli.console import console
    from trimtab.lab.evaluate import COLUMNS, evaluate_run

    result = evaluate_run(folder, bits or COLUMNS, data=data, batches=batches)
    if json_:
        console.print(json.dumps(result.to_dict(), indent=2, allow_nan=False), markup=False)
        return
    table = _table("bits", "loss", "perplexity", *(("bits/byte",) if result.is_bytes else ()), "change in loss")
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


class _Bar:
    """How far a task is: a bar on a terminal, a line now and then elsewhere, nothing beside JSON."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._bar, self._rows, self._due = quiet, None, {}, 0.0

    def __enter__(self) -> "_Bar":
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from trimtab.cli.console import LINE_SECONDS, console

        self._due = time.monotonic() + LINE_SECONDS
        if console.is_terminal and not self._quiet:
            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("[bold]{task.description}"), *columns, console=console, transient=True)
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def moved(self, task: str, done: int, total: int) -> None:
        """Show how many requests of a task are answered."""
        from trimtab.cli.console import LINE_SECONDS, console

        if self._bar is not None:
            if task not in self._rows:
                self._rows[task] = self._bar.add_task(task, total=total)
            self._bar.update(self._rows[task], completed=done)
        elif not self._quiet and time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_SECONDS
            console.print(f"{task} {done:,} of {total:,} requests")
            sys.stdout.flush()
