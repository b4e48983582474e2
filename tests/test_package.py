# SPDX-License-Identifier: Apache-2.0
"""The package: its public names, what its import costs, which torch it takes, and that installing its wheel leaves a
vendor's pre-release torch where it is."""

import base64
import hashlib
import shutil
import statistics
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import trimtab

ROOT = Path(__file__).parents[1]
NAMES = [
    "Controller",
    "Policy",
    "Plan",
    "Event",
    "Recorder",
    "replay",
    "Decisions",
    "convert_",
    "revert_",
    "running",
    "Recipe",
    "Path",
    "doctor",
    "TrimtabError",
    "NonFiniteError",
    "NoEffectWarning",
    "__version__",
]


def script(source: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Names.


def test_the_public_names_are_these() -> None:
    assert sorted(trimtab.__all__) == sorted(NAMES)
    assert dir(trimtab) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_resolves_to_what_bears_it(name: str) -> None:
    value = getattr(trimtab, name)
    assert getattr(value, "__name__", name) == name
    assert getattr(trimtab, name) is value


@pytest.mark.parametrize("room", ["control", "lab", "linear", "nn", "optim", "report", "retrain"])
def test_each_room_is_reached_by_its_name(room: str) -> None:
    assert script(f"import trimtab; print(trimtab.{room}.__name__)").strip() == f"trimtab.{room}"


def test_an_unknown_name_raises_and_lists_the_known() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'convert'; it has .*convert_"):
        _ = trimtab.convert
    with pytest.raises(ImportError):
        exec("from trimtab import convert")


def test_the_version_is_the_projects() -> None:
    assert f'version = "{trimtab.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


# Import.


def test_import_alone_loads_neither_torch_nor_numpy() -> None:
    assert script("import sys, trimtab; print({'torch', 'numpy'} & set(sys.modules))").strip() == "set()"


def test_import_costs_at_most_a_fifth_of_torchs() -> None:
    """In one process: torch first, then everything that a training script takes from trimtab."""
    timed = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter()\n"
        "import trimtab; trimtab.Controller, trimtab.convert_, trimtab.Policy, trimtab.Recorder\n"
        "print((time.perf_counter() - a) / (b - a))"
    )
    assert statistics.median(float(script(timed)) for _ in range(3)) <= 1.2


FLOOR = """
import importlib.metadata as metadata, sys
real = metadata.version
def version(name):
    if name != "torch":
        return real(name)
    if {version!r} is None:
        raise metadata.PackageNotFoundError(name)
    return {version!r}
metadata.version = version
try:
    import trimtab
    print("fine")
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("version", ["2.5.0", "2.5.1+cu124", "1.13.1", "2.0.0a0+git"])
def test_an_older_torch_is_refused_with_the_remedy(version: str) -> None:
    expected = f"trimtab needs torch >= 2.6, found {version}: pip install --upgrade 'torch>=2.6'"
    assert script(FLOOR.format(version=version)).strip() == expected


@pytest.mark.parametrize("version", ["2.6.0", "2.6.0a0+df5bbc09d1.nv24.11", "2.11.0a0+x", "2.13.0+cpu", "3.0", None])
def test_the_floor_and_all_above_are_taken(version: str | None) -> None:
    assert script(FLOOR.format(version=version)).strip() == "fine"


# Wheel.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy so that the tree stays as it is."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "trimtab", source / "trimtab", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("trimtab-*.whl"))


def stand_in(folder: Path, name: str, version: str) -> Path:
    """A wheel of an empty package under somebody else's name."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f'__version__ = "{version}"\n',
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return target


def test_the_wheel_holds_all_that_runs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("trimtab/")}
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "trimtab").rglob("*")
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts
    }
    assert held == wanted
    assert {"trimtab/py.typed", "trimtab/report/template.html", "trimtab/report/page.js"} <= held


def test_the_metadata_says_plain_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(needed) == ["numpy", "torch"]
    assert metadata["Requires-Python"] == ">=3.11"


def test_installing_leaves_a_vendors_torch_untouched(wheel: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    vendor, numpy = stand_in(shelf, "torch", "2.11.0a0+x"), stand_in(shelf, "numpy", "2.0.0")
    stand_in(shelf, "torch", "2.13.0")  # what pip would take if ours asked for a floor
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--no-index"]
    subprocess.run([*pip, "--no-deps", str(vendor), str(numpy)], check=True, capture_output=True, timeout=120)
    torch_files = sorted((tmp_path / "venv").rglob("torch*/*"))
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in torch_files if path.is_file()}
    done = subprocess.run(
        [*pip, "--find-links", str(shelf), str(wheel)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert before
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
    check = (
        "import importlib.metadata as m, torch, trimtab; print(m.version('torch'), torch.__version__, trimtab.__file__)"
    )
    found = subprocess.run([python, "-c", check], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60)
    metadata, version, file = found.stdout.split()
    assert (metadata, version) == ("2.11.0a0+x", "2.11.0a0+x")
    assert Path(file).is_relative_to(tmp_path / "venv")
