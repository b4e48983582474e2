# SPDX-License-Identifier: Apache-2.0
"""`trimtab replay`: what another policy would have decided on a run's recorded norms."""

from pathlib import Path
from typing import Annotated

import typer

ROWS = {
    "false_alarms_per_1k": ("alarms per 1,000 quiet steps", "{:.1f}"),
    "promotion_ratio": ("unit-steps high (promotion_ratio)", "{:.3%}"),
    "hit_maxO": ("steps with the budget full (hit_maxO)", "{:.1%}"),
    "exceed_gnmr": ("unit-steps with ratio > alpha (exceed_gnmr)", "{:.3%}"),
    "exceed_delta": ("unit-steps with jump > beta (exceed_delta)", "{:.3%}"),
    "denied": ("triggered unit-steps denied", "{:.0f}"),
    "switches_per_1k": ("switches per 1,000 steps", "{:.1f}"),
    "nonfinite": ("steps with a non-finite norm", "{:.0f}"),
    "median_ratio": ("median ratio", "{:.2f}"),
}


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a trace.arrow.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Policy setting, such as alpha=2."),
    ] = None,
    calibrate: Annotated[
        float | None, typer.Option(help="Set alpha and beta for this many false alarms per 1,000 of these steps.")
    ] = None,
) -> None:
    """Show what another policy would have decided on the norms that a run recorded, beside the run's own.

    A replay is open-loop: in the run, a unit that went high changed the norms that followed.
    """
    from rich.table import Table

    from trimtab.cli.console import console
    from trimtab.control.policy import Policy
    from trimtab.control.record import TRACE
    from trimtab.control.replay import replay
    from trimtab.errors import TrimtabError
    from trimtab.lab.config import load_settings
    from trimtab.report.read import read_run, read_trace
    from trimtab.report.summary import quiet_steps

    path = folder / TRACE if folder.is_dir() else folder
    if not path.is_file():
        raise TrimtabError(f"a replay needs a recorded trace, and there is no {path}: give a run folder")
    trace = read_trace(path)
    if not len(trace):
        raise TrimtabError(f"{path} holds no step yet: let the run go on for a while")
    own = Policy.from_dict(trace.policy)
    asked = {key.removeprefix("policy."): value for key, value in _flat(load_settings(None, set_ or ())).items()}
    base = Policy.preset(str(asked.pop("preset"))) if "preset" in asked else own
    other = base.replace(**asked)
    if calibrate is not None:
        other = Policy.calibrated(trace, calibrate, base=other, detector=trace.detector)
    config = read_run(folder, with_trace=False).config if folder.is_dir() else {}
    quiet = quiet_steps(trace.steps, config)
    columns = {"the run's own": own} | ({} if other == own else {"what if": other})
    results = {
        name: replay(
            trace.norms,
            policy,
            seen=trace.seen,
            recoverable=trace.recoverable,
            total_steps=trace.total_steps,
            detector=trace.detector,
            columns=trace.columns,
        ).summary(quiet)
        for name, policy in columns.items()
    }
    table = Table(title=f"{len(trace)} steps, {len(trace.units)} units", title_justify="left")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    for key, (label, form) in ROWS.items():
        table.add_row(label, *(form.format(summary[key]) for summary in results.values()))
    console.print(table)
    if other != own:
        changed = {k: v for k, v in other.to_dict().items() if v != own.to_dict()[k]}
        console.print(
            "what if: " + ", ".join(f"{k}={_short(v)} (was {_short(own.to_dict()[k])})" for k, v in changed.items())
        )
        console.print("open-loop: the recorded norms already carry what the run's own decisions did to them")


def _flat(settings: dict) -> dict:
    """Settings with a nested policy table lifted to the top: here alpha=2 and policy.alpha=2 mean the same."""
    return {k: v for k, v in settings.items() if k != "policy"} | dict(settings.get("policy", {}))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
