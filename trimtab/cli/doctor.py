# SPDX-License-Identifier: Apache-2.0
"""`trimtab doctor`: the known traps of a model, a recipe and this machine, each with its remedy."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.train import SetOption

CONFIGS = (".toml", ".yaml", ".yml")


def run(
    subject: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL_OR_CONFIG]",
            help="A Hugging Face folder, a GGUF file, smollm2, a run folder, or a .toml or .yaml of settings.",
        ),
    ] = None,
    set_: SetOption = None,
    recipe: Annotated[str | None, typer.Option(help="What low means, if the settings do not say: fp8, ...")] = None,
    backend: Annotated[str | None, typer.Option(metavar="auto|emulated|real", help="Which kernels.")] = None,
    compile_: Annotated[
        str | None, typer.Option("--compile", metavar="MODE", help="The mode of torch.compile, if it is used.")
    ] = None,
    checkpointing: Annotated[
        str | None, typer.Option(metavar="none|reentrant|nonreentrant", help="Activation checkpointing.")
    ] = None,
    clipping: Annotated[
        str, typer.Option(metavar="none|before|after", help="When gradients are clipped, seen from controller.step().")
    ] = "none",
    fp8_all_gather: Annotated[bool, typer.Option("--fp8-all-gather", help="FSDP gathers weights in FP8.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Name the known traps of a model, a recipe and this machine, each with its remedy. Loads no weights.

    With --set (or a file of settings, or a run folder) the model is the lab's own; without anything only the recipe and
    the machine are looked at. The exit code is 1 if there is an error, 0 if there are none or only warnings.
    """
    from trimtab.cli.console import console
    from trimtab.lab.doctor import Machine, doctor, is_healthy

    options: dict[str, Any] = {"recipe": "fp8"} | _subject(subject, set_ or ())
    name = options.pop("name", "no model")
    asked = {"recipe": recipe, "backend": backend, "checkpointing": checkpointing, "compile_mode": compile_}
    options |= {key: value for key, value in asked.items() if value is not None}
    if options["recipe"] == "none":
        options["recipe"] = None
    machine = Machine.here()
    found = doctor(**options, clipping=clipping, fp8_all_gather=fp8_all_gather, machine=machine)
    if json_:
        facts = {"model": name, "recipe": options["recipe"], "machine": dataclasses.asdict(machine)}
        listed = [dataclasses.asdict(finding) for finding in found]
        print(json.dumps(facts | {"healthy": is_healthy(found), "findings": listed}, indent=2))
    else:
        console.print(f"{name}, recipe {options['recipe']}, on {machine.name}", markup=False)
        for finding in found:
            console.print(str(finding), markup=False)
        console.print("none of the known traps" if not found else _counts(found), markup=False)
    if not is_healthy(found):
        raise typer.Exit(1)


def _counts(found: Any) -> str:
    errors = sum(finding.severity == "error" for finding in found)
    return f"{errors} error{'s' * (errors != 1)}, {len(found) - errors} warning{'s' * (len(found) - errors != 1)}"


def _subject(path: Path | None, sets: Any) -> dict[str, Any]:
    """What to look at: a model of shapes only, and what its settings say."""
    from trimtab.control.record import RUN
    from trimtab.errors import TrimtabError
    from trimtab.lab.config import Config, load_settings
    from trimtab.lab.finetune_config import FinetuneConfig
    from trimtab.lab.pretrained import shapes

    is_run = path is not None and (path / RUN).is_file()
    if path is not None and not is_run and path.suffix not in CONFIGS:
        if sets:
            raise TrimtabError(
                f"--set is for the lab's own model, and {str(path)!r} is a model of its own: leave it out"
            )
        if path.is_dir() and not (path / "config.json").is_file():
            raise TrimtabError(
                f"a model is a Hugging Face folder (config.json), a .gguf file or smollm2, or a run folder (run.json), "
                f"got {str(path)!r}: there is neither"
            )
        name, model = shapes(path)
        return {"name": name, "model": model}
    if path is not None and is_run:
        from trimtab.lab.resume import stored_settings

        settings = {**(stored_settings(path) or {}), **load_settings(None, sets)}
        if "lora_r" in settings:  # a fine-tuning run: the model is the one it started from
            tuned = FinetuneConfig.from_dict(settings)
            name, model = shapes(tuned.model)
            return {"name": name, "model": model, "recipe": tuned.recipe, "backend": tuned.backend}
    elif path is not None or sets:
        settings = load_settings(path, sets)
    else:
        return {}
    from trimtab.lab.doctor import decoder

    config = Config.from_dict(settings)
    recompute = "nonreentrant" if config.checkpointing else "none"
    shown = {"name": f"{config.model} of the lab", "backend": config.backend, "checkpointing": recompute}
    return shown | {"model": decoder(config), "recipe": config.recipe}
