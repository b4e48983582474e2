# SPDX-License-Identifier: Apache-2.0
"""`trimtab replay`: what another policy would have decided on a run's recorded norms."""

from typing import Annotated

import typer

from trimtab.cli.logs import ColumnsOption, FilesArgument, LossOption, StepOption

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
    files: FilesArgument,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Policy setting, such as alpha=2."),
    ] = None,
    calibrate: Annotated[
        float | None, typer.Option(help="Set alpha and beta for this many false alarms per 1,000 of these steps.")
    ] = None,
    columns: ColumnsOption = None,
    loss: LossOption = None,
    step: StepOption = None,
) -> None:
    """Show what another policy would have decided on the norms that a run recorded, beside the run's own.

    A run of another tool will do (TensorBoard, CSV, JSONL, Parquet): its own policy is then the default one. A replay
    is open-loop: in the run, a unit that went high changed the norms that followed.
    """
    from trimtab.cli.console import console
    from trimtab.cli.logs import none_yet, policy_of, table_of
    from trimtab.control.policy import Policy
    from trimtab.errors import TrimtabError
    from trimtab.report.imports import read_log
    from trimtab.report.names import visible
    from trimtab.report.whatif import replayed

    log = read_log(*files, columns=columns or (), loss=loss, step=step)
    if not log.rows:
        raise TrimtabError(none_yet(log, files[0]))
    own, other = policy_of(log, set_ or ())
    if calibrate is not None:
        other = Policy.calibrated(log, calibrate, base=other, detector=log.header.detector)
    policies = {"the run's own" if log.ours else "default": own} | ({} if other == own else {"what if": other})
    results = replayed(log, policies)
    if not log.ours:
        for note in log.notes:
            console.print(visible(note), markup=False)
    rows = [
        [label, *(form.format(summary[key]) for summary in results.values())] for key, (label, form) in ROWS.items()
    ]
    console.print(table_of(f"{log.rows} steps, {len(log.header.units)} units", ["", *results], rows))
    if other != own:
        changed = {k: v for k, v in other.to_dict().items() if v != own.to_dict()[k]}
        console.print(
            "what if: " + ", ".join(f"{k}={_short(v)} (was {_short(own.to_dict()[k])})" for k, v in changed.items()),
            markup=False,
        )
        console.print("open-loop: the recorded norms already carry what the run's own decisions did to them")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
