# SPDX-License-Identifier: Apache-2.0
"""`trimtab env`: versions and machine for a bug report, and settings as they resolve."""

import importlib.metadata
import json
import os
import platform
from typing import Any

from trimtab.cli.train import ConfigOption, SetOption

PACKAGES = ("torch", "numpy", "pyarrow", "plotly", "typer", "rich", "tokenizers", "transformers", "torchao")


def run(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Print versions and machine; with --config or --set, the settings as they resolve, as TOML."""
    from trimtab.cli.console import console
    from trimtab.lab.config import Config, load_settings

    if config is not None or set_:
        resolved = Config.from_dict(load_settings(config, set_ or ()))
        console.print(to_toml(resolved.to_dict() | {"policy": resolved.build_policy().to_dict()}), markup=False)
        return
    for name, value in facts().items():
        console.print(f"{name:<14}{value}", markup=False)


def facts() -> dict[str, str]:
    """What a bug report needs."""
    import torch

    import trimtab

    found = {"trimtab": trimtab.__version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "-"
    found["cpu"] = f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found["TRIMTAB"] = os.environ.get("TRIMTAB", "-")
    return found


def to_toml(values: dict[str, Any]) -> str:
    """Settings as TOML that --config reads back; what is none is written "none"."""
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [_toml_line(key, value) for key, value in values.items() if key not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]"] + [_toml_line(key, value) for key, value in table.items()]
    return "\n".join(lines)


def _toml_line(key: str, value: Any) -> str:
    return f"{key} = {_toml_value(value)}"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(_toml_line(key, item) for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps("none" if value is None else value, ensure_ascii=False, default=str)
