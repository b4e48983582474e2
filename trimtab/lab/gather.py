# SPDX-License-Identifier: Apache-2.0
"""Gather: from the run folders of a bench to the one dict that its table, its page and bench.json are made of.

Per cell and arm: each run's scores, their mean and 95 % interval over seeds, and paired differences of held-out loss,

    vs_low       arm minus low: does it help at all?
    vs_random    arm minus random units at its own count per step: does its *choice* help?

The gap closed, (low - arm) / (low - top), is taken seed by seed; `top` is `high`, or `clean` where faults are injected.
Where low and top lie close together its mean is noise over noise, so two more numbers stand beside it: `damage`, the
paired interval of low minus top, which says whether there is a gap at all, and `gap_pooled`, the ratio of the means.

A sweep over learning rates also has, per line and arm,

    largest_stable   the largest rate up to which, from the arm's best rate on, every run lived and the mean held-out
                     loss stayed within 10 % of the best
    sensitivity      mean over the rates of min(loss, first loss) - best loss (arXiv 2309.14322): 0 is a flat curve
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.control.record import RUN
from trimtab.control.secrets import without_secrets
from trimtab.control.writers import plain
from trimtab.errors import TrimtabError, one_line
from trimtab.lab.bench import DONE, Task, read_done
from trimtab.lab.config import Config
from trimtab.lab.intervals import Interval, gap_closed, interval, paired
from trimtab.lab.scores import METRICS, Scores, score_run
from trimtab.lab.suites import Cell, Suite
from trimtab.report.read import read_run
from trimtab.report.summary import known_faults

FORMAT = 1
POINTS = 100
"""Points of a curve."""
STABLE = 1.1
"""A rate is stable while the loss is at most this many times the best."""
LEARNED = 0.9
"""A line whose best loss is above this share of its first one has learned nothing, and has no stable rate."""
FACTS = ("versions", "platform", "cpu_count", "git")


def gather(
    suite: Suite, todo: Sequence[Task], *, command: Sequence[str] = (), given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything there is to say about the runs of a bench; plain values, no NaN."""
    cells = [_cell(suite, cell, [task for task in todo if task.cell == cell.name]) for cell in suite.cells]
    first = read_run(todo[0].folder, with_trace=False)
    said = {
        "format": FORMAT,
        "suite": suite.name,
        "family": suite.family,
        "what": suite.what,
        "command": list(command),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "given": dict(given or {}),
        "seeds": sorted({task.seed for task in todo}),
        **{key: first.info.get(key) for key in FACTS},
        "hardware": first.config.get("hardware"),
        "corpus": first.config.get("corpus"),
        "metrics": {name: vars(metric) for name, metric in METRICS.items()},
        "arms": {task.arm.name: task.arm.what for task in todo},
        "cells": cells,
        "sweeps": sweeps(cells),
    }
    return without_secrets(plain(said))  # the facts are from a file, which may say NaN


def _cell(suite: Suite, cell: Cell, mine: Sequence[Task]) -> dict[str, Any]:
    scores: dict[str, dict[int, Scores]] = {}
    died: dict[str, list[int]] = {}
    for task in mine:
        said = read_done(task.folder)
        if said is None:
            raise TrimtabError(
                f"{task.folder} has no {DONE}: the run is not finished, the same command goes on with it"
            )
        found = _scored(task) | {"peak_bytes": said["peak_bytes"]}
        if said["died"]:
            found |= {"eval_high": None, "eval_low": None}
            died.setdefault(task.arm.name, []).append(task.seed)
        scores.setdefault(task.arm.name, {})[task.seed] = found
    for runs in scores.values():
        for seed, found in runs.items():
            low, top = scores["low"][seed], scores[cell.top][seed]
            for path, gap in (("eval_high", "gap"), ("eval_low", "gap_low")):
                found[gap] = gap_closed(found[path], low[path], top[path])
    losses = {arm: column(runs, "eval_high") for arm, runs in scores.items()}
    after = {task.arm.name: task.arm.after for task in mine}
    arms = {}
    for arm, runs in scores.items():
        rival = rival_of(arm, after)
        arms[arm] = {
            "runs": {str(seed): found for seed, found in runs.items()},
            "died": died.get(arm, []),
            "stats": {name: interval(column(runs, name).values()).to_dict() for name in METRICS},
            "vs_low": None if arm == "low" else paired(losses[arm], losses["low"]).to_dict(),
            "vs_random": None if rival is None else paired(losses[arm], losses[rival]).to_dict(),
            "random": rival,
            "gap_pooled": _pooled(losses, arm, cell.top),
        }
    damage = paired(losses["low"], losses[cell.top])
    struck = next(
        task.folder for task in mine if task.arm.name == "low"
    )  # not every arm is: `clean` and `plain` are not
    return {
        "name": cell.name,
        "top": cell.top,
        "settings": dict(mine[0].settings) | {"seed": None, "faults": None},
        "windows": [list(w) for w in known_faults(read_run(struck, with_trace=False).config)],
        "faults": {str(task.seed): task.settings.get("faults", "") for task in mine},
        "axis": None if cell.axis is None else list(cell.axis),
        "group": cell.group,
        "damage": damage.to_dict() | {"clear": damage.excludes_zero and damage.mean > 0},
        "arms": arms,
        "curves": {arm: curve([t.folder for t in mine if t.arm.name == arm]) for arm in scores},
    }


def _scored(task: Task) -> Scores:
    """The scores of a finished run; whatever a damaged one raises becomes one line."""
    try:
        return score_run(task.folder, triggers=triggers(task))
    except TrimtabError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise TrimtabError(
            f"{task.folder} cannot be scored ({one_line(error, 60)}), its {RUN} or metrics.jsonl "
            "is damaged: restore it, or move the folder away and the same command runs it again"
        ) from error


def rival_of(arm: str, after: Mapping[str, str | None]) -> str | None:
    """The random arm with an arm's own counts; None if there is none, because other counts would prove nothing."""
    return next((name for name in after if name.startswith("random") and after[name] == arm), None)


def triggers(task: Task) -> bool:
    """Whether a trigger chose the units of a run, and not a lot, a list or a rule without threshold."""
    settings = Config.from_dict(task.arm.over(task.settings))
    plain = settings.selection == "policy" and not settings.fixed_high and settings.guard != "clip_flagged"
    return task.arm.select is None and plain and not settings.detector_options.get("full")


def column(runs: Mapping[int, Scores], name: str) -> dict[int, float | None]:
    """One score of every seed."""
    return {seed: found[name] for seed, found in runs.items()}


def _pooled(losses: Mapping[str, Mapping[int, float | None]], arm: str, top: str) -> float | None:
    """The gap closed by means instead of seed by seed, over the seeds that all three finished."""
    columns = [losses[name] for name in (arm, "low", top)]
    whole = [seed for seed in columns[0] if all(c.get(seed) is not None for c in columns)]
    means: list[Interval] = [interval(c[seed] for seed in whole) for c in columns]
    return gap_closed(*(m.mean for m in means)) if whole else None


def curve(folders: Sequence[Path]) -> dict[str, list[float | None]]:
    """Training loss over steps: the mean over seeds, and the least and the most of them, in at most 100 stretches."""
    seeds = []
    for folder in folders:
        steps, losses = read_run(folder, with_trace=False).column("loss")
        seeds.append(dict(zip(steps.tolist(), losses.tolist(), strict=True)))
    steps = sorted({step for seed in seeds for step in seed})
    rows: dict[str, list[float | None]] = {"x": [], "y": [], "low": [], "high": []}
    size = math.ceil(len(steps) / POINTS)
    for at in range(0, len(steps), max(size, 1)):
        part = steps[at : at + size]
        stretch = [[seed[step] for step in part if step in seed] for seed in seeds]
        means = [float(np.mean(losses)) for losses in stretch if losses]
        rows["x"].append(round(float(np.mean(part)), 1))
        for key, value in (("y", float(np.mean(means))), ("low", min(means)), ("high", max(means))):
            rows[key].append(round(value, 5) if math.isfinite(value) else None)
    return rows


def sweeps(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per line of cells that share a group and an axis, and per arm: its points, and what the curve says."""
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        if cell["axis"]:
            lines.setdefault((cell["group"], cell["axis"][0]), []).append(cell)
    found = []
    for (group, axis), members in lines.items():
        members = sorted(members, key=lambda cell: cell["axis"][1])
        for arm in dict.fromkeys(arm for cell in members for arm in cell["arms"]):
            mine = [cell for cell in members if arm in cell["arms"]]
            row: dict[str, Any] = {"group": group, "axis": axis, "arm": arm, "x": [c["axis"][1] for c in mine]}
            for name in ("eval_high", "gap"):
                stats = [c["arms"][arm]["stats"][name] for c in mine]
                row[name] = [s["mean"] for s in stats]
                row[f"{name}_half"] = [s["half"] for s in stats]
            row["died"] = [len(c["arms"][arm]["died"]) for c in mine]
            if axis == "lr":
                starts = [c["curves"][arm]["y"][0] for c in mine]
                row |= rate_curve(row["x"], row["eval_high"], row["died"], starts)
            found.append(row)
    return found


def rate_curve(
    rates: Sequence[float], losses: Sequence[float | None], died: Sequence[int], starts: Sequence[float | None]
) -> dict[str, float | None]:
    """The largest stable rate and the sensitivity of one line; a run that died counts as one that learned nothing."""
    worst = max((start for start in starts if start is not None), default=math.inf)
    lived = [loss for loss, dead in zip(losses, died, strict=True) if loss is not None and not dead]
    if not lived or min(lived) > LEARNED * worst:
        return {"largest_stable": None, "sensitivity": None}
    best = min(lived)
    at = largest = losses.index(best)
    for i in range(at + 1, len(rates)):  # a rate below the best one learns slowly, which is not instability
        loss = losses[i]
        if died[i] or loss is None or loss > STABLE * best:
            break
        largest = i
    ends = [worst if dead or loss is None else min(loss, worst) for loss, dead in zip(losses, died, strict=True)]
    return {"largest_stable": rates[largest], "sensitivity": sum(end - best for end in ends) / len(ends)}
