# SPDX-License-Identifier: Apache-2.0
"""Who imports whom, read from the syntax trees: rooms know each other in one direction, what reads run folders needs no
torch, and every file opens alike. A subprocess checks the same through all that is imported on the way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "trimtab").rglob("*.py"))
ROOMS = ("comm", "control", "linear", "nn", "optim", "retrain", "lab", "report", "integrations", "cli")
TORCH_FREE = (
    *(f"control.{name}" for name in ("judge", "decide", "advance", "policy", "tally", "replay", "values", "record")),
    "control.sweep",
    *(f"control.{name}" for name in ("detectors", "columns", "zscore", "surprise", "sources", "estimates", "measures")),
    *("control.writers", "errors", "__init__", "lab.config", "lab.suites", "lab.intervals"),
)

# What a room may import of the other rooms: modules, or whole rooms.
ALLOWED = {
    "comm": (),
    "control": (),
    "linear": ("trimtab.control.units",),
    "nn": (),
    "optim": (),
    "retrain": ("trimtab.linear.quantize", "trimtab.linear.hadamard", "trimtab.nn"),
    "report": ("trimtab.control",),
    "lab": tuple(f"trimtab.{room}" for room in ("comm", "control", "linear", "nn", "optim", "retrain", "report")),
    "integrations": ("trimtab.control", "trimtab.linear"),
    "cli": tuple(
        f"trimtab.{room}" for room in ("comm", "control", "linear", "nn", "optim", "retrain", "report", "lab")
    ),
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("trimtab.")


def imports_of(path: Path) -> set[str]:
    """Every module that a file names in an import, late and type-checking ones included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def in_room(room: str) -> list[Path]:
    return [path for path in FILES if path.is_relative_to(ROOT / "trimtab" / room)]


def test_the_rooms_are_all_there() -> None:
    assert len(FILES) > 40
    assert set(ROOMS) <= {path.name for path in (ROOT / "trimtab").iterdir()}


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    others = tuple(f"trimtab.{other}" for other in ROOMS if other != room)
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in in_room(room)
        for name in imports_of(path)
        if is_within(name, others) and not is_within(name, ALLOWED[room])
    }
    assert in_room(room)
    assert not wrong


def test_what_every_room_uses_knows_no_room() -> None:
    rooms = tuple(f"trimtab.{room}" for room in ROOMS)
    for name in ("errors", "checks", "modules", "shards"):
        assert not [one for one in imports_of(ROOT / "trimtab" / f"{name}.py") if is_within(one, rooms)]


def test_only_the_door_imports_the_command_line() -> None:
    wanting = {module_of(path) for path in FILES if any(is_within(n, ("trimtab.cli",)) for n in imports_of(path))}
    assert wanting - {module_of(path) for path in in_room("cli")} == {"__main__"}


def test_what_judges_and_reads_imports_no_torch() -> None:
    free = [path for path in FILES if module_of(path) in TORCH_FREE] + in_room("report")
    assert len(free) >= len(TORCH_FREE) + 8
    assert not [path for path in free if any(is_within(name, ("torch",)) for name in imports_of(path))]


@pytest.mark.parametrize(
    "name", ["trimtab.control.replay", "trimtab.control.record", "trimtab.report.page", "trimtab.lab.config"]
)
def test_nor_does_anything_it_imports(name: str) -> None:
    script = f"import sys, {name}\nassert 'torch' not in sys.modules\nassert {name!r} in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_no_star_is_imported() -> None:
    stars = [path for path in FILES if any(name.endswith(".*") for name in imports_of(path))]
    assert not stars


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_file_opens_with_its_license_and_a_docstring(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.startswith('# SPDX-License-Identifier: Apache-2.0\n"""')
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring is not None
    assert docstring.splitlines()[0].rstrip().endswith((".", ":"))
