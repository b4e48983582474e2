# SPDX-License-Identifier: Apache-2.0
"""docs/reproduce.md keeps step with the code and with configs/paper: its commands parse, its rows carry a verdict and
cover every table it knows of, its ratios are those of its figures, and each config builds what its paper trained."""

import ast
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer

from trimtab.cli.main import _app
from trimtab.control.policy import Policy
from trimtab.lab.config import Config, load_settings
from trimtab.lab.model import SIZES, Decoder, ModelConfig
from trimtab.lab.optimizers import OPTIMIZERS, TRANSFORMS, Update
from trimtab.lab.task import build_model
from trimtab.linear.paths import Recipe

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
CONFIGS = sorted((ROOT / "configs" / "paper").glob("*.toml"))
VERDICTS = ("reproduced", "same direction", "not reproduced", "impossible here", "open")
PAPERS = {"2606.00539", "2507.08784", "2102.02888", "2506.19697", "2504.13932", "2402.05147"}
PAPERS |= {"2501.06842", "2502.17055"}  # SPAM and its successors
HELD = {  # what each paper shows, as far as we know; tables of settings left out
    "GNMR": "Tables 1 to 7, Tables 9 to 15, Figures 1 to 4",
    "SPAM": "Table 1, Figures 1 to 5",
    "Stable-SPAM": "Tables 1 to 4, Figures 1 to 9",
    "GradientStabilizer": "Tables 1 to 4, Table 9, Figures 1 to 10",
    "OSP": "Figure 2",
    "GreedyLore": "Tables III, IV, V, VI, Figures 1 to 5",
    "1-bit Adam": "Figure 1",
    "Saliency-aware": "",
    "ApiQ": "Figure 1",
}
OSP_TABLES = ("Ablation table", "Open-model table", "PTQ table", "Throughput table")
TOKENS = {"osp": 4_194_304}  # per step; all others follow GaLore: 512 sequences of 256


class Row(NamedTuple):
    section: str
    what: str
    published: str
    command: str
    result: str
    verdict: str

    @property
    def paper(self) -> str:
        """The row's own prefix where a section holds several papers, else the section's."""
        named = [paper for paper in HELD if self.what.startswith(f"{paper},")]
        return (named or [paper for paper in HELD if self.section.startswith(paper)])[0]


def rows() -> list[Row]:
    found, section, inside = [], "", False
    for line in PAGE.splitlines():
        if line.startswith("##"):
            section = line.lstrip("# ")
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        inside = cells == ["what", "published", "command", "result", "verdict"] or (inside and bool(cells))
        if inside and cells[0] not in ("what", "---"):
            found.append(Row(section, *cells))
    return found


ROWS = rows()


def shown(text: str) -> set[str]:
    """The tables and figures that a text names, each by itself: `Tables 2, 3` and `Figures 1 to 4` are six."""
    number = r"(?:[IVX]+|\d+)\b"
    found = set()
    for kind, numbers in re.findall(rf"\b(Table|Figure)s? ({number}(?:(?:, | to ){number})*)", text):
        for part in numbers.split(", "):
            first, _, last = part.partition(" to ")
            many = [first] if not last else [str(n) for n in range(int(first), int(last) + 1)]
            found |= {f"{kind} {n}" for n in many}
    return found


def commands() -> list[str]:
    """Every command of the page: the lines of its shell blocks, and code in its text that begins like one."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE))
    starts = ("trimtab ", "python ", "pytest ")
    return sorted({" ".join(line.split()) for line in (*lines, *inline) if line.startswith(starts)})


# The rows.


def test_every_row_has_five_cells_and_a_verdict() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        assert row.verdict in VERDICTS, row
        assert row.what, row
        assert row.published, row
        assert row.command, row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.paper}: {row.what}")
def test_a_verdict_goes_with_a_result_and_a_result_with_a_command(row: Row) -> None:
    assert (row.result == "-") == (row.verdict == "open")  # what was run is judged, and why it is impossible is said
    runs = row.command.startswith(("`", "block "))
    assert runs or row.command.startswith("none")
    if row.verdict in ("reproduced", "same direction", "not reproduced"):
        assert runs
    if row.verdict == "impossible here":
        assert row.command == "none"


def test_every_paper_has_a_section_and_every_table_a_row() -> None:
    headings = "\n".join(re.findall(r"^##.*", PAGE, re.MULTILINE))
    assert set(re.findall(r"arXiv ([\d.]+\d)", headings)) == PAPERS
    for paper, held in HELD.items():
        mine = [row for row in ROWS if row.paper == paper]
        assert mine, paper
        assert shown(held) <= shown("; ".join(row.what for row in mine)), paper
    for table in OSP_TABLES:
        assert any(row.paper == "OSP" and row.what.startswith(table) for row in ROWS), table


def test_every_ratio_is_that_of_its_figures() -> None:
    ratios = re.findall(r"(\d+\.\d+) / (\d+\.\d+) = (\d+\.(\d+))", PAGE)
    assert len(ratios) > 10
    for a, b, ratio, digits in ratios:
        assert f"{float(a) / float(b):.{len(digits)}f}" == ratio, (a, b, ratio)


def test_shown_expands_lists_and_ranges() -> None:
    assert shown("X, Tables 2, 3 and Figures 1 to 3") == {"Table 2", "Table 3", "Figure 1", "Figure 2", "Figure 3"}
    assert shown("Table V, Figures 4, 5") == {"Table V", "Figure 4", "Figure 5"}
    assert shown("Memory table, ten tasks") == set()


# The commands.


def test_every_block_that_a_row_names_exists() -> None:
    named = {name for row in ROWS for name in re.findall(r"\bblock ([A-Z])\b", row.command)}
    assert named
    assert named == set(re.findall(r"^# Block ([A-Z]):", PAGE, re.MULTILINE))


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("trimtab ")])
def test_a_trimtab_command_parses_and_its_settings_hold(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, verb, *args = shlex.split(command)
    verbs = typer.main.get_command(_app(typer)).commands
    assert verb in verbs
    given = verbs[verb].make_context(verb, list(args)).params  # parsed in full, nothing is run
    if verb == "train":
        check(Config.from_dict(load_settings(given["config"], given["set_"])))
    if verb == "replay":
        Policy().replace(**load_settings(None, given["set_"]))


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("python ")])
def test_a_benchmark_of_the_page_exists_with_these_options(command: str) -> None:
    _, script, *args = shlex.split(command)
    tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "add_argument"]
    flags = {n.args[0].value: any(k.arg == "action" for k in n.keywords) for n in calls}
    several = {n.args[0].value for n in calls if any(k.arg == "nargs" for k in n.keywords)}
    while args:
        flag = args.pop(0)
        assert flag in flags
        value = None if flags[flag] else args.pop(0)
        while flag in several and args and not args[0].startswith("--"):
            args.pop(0)
        if flag == "--arms":
            assert {arm.replace("/", ", ") for arm in value.split(",")} <= keys(tree, "ARMS")


def keys(tree: ast.Module, name: str) -> set[str]:
    """The keys of a module's table."""
    tables = [n.value for n in tree.body if isinstance(n, ast.AnnAssign) and getattr(n.target, "id", "") == name]
    return {key.value for table in tables for key in table.keys}


def test_what_pytest_is_asked_to_run_exists() -> None:
    for command in commands():
        if command.startswith("pytest "):
            assert (ROOT / shlex.split(command)[1]).exists(), command


def test_every_link_leads_somewhere() -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", PAGE):
        path = ROOT / "docs" / (target or "reproduce.md")
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), anchor


def anchors(page: str) -> set[str]:
    """What the headings of a page can be linked by."""
    return {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)", page, re.M)}


# The configs.


def check(config: Config) -> None:
    """What it names exists, and takes the options it is given."""
    assert config.model in SIZES
    assert config.optimizer in OPTIMIZERS
    assert config.transform in ("none", *TRANSFORMS)
    small = ModelConfig.size("micro", width=16, heads=2, ffn=24, max_seq=8)
    Update(Decoder(small, seed=0), config)
    if config.recipe != "none":
        recipe = Recipe.named(config.recipe)
        assert config.roles is None or recipe.only(*config.roles.split(","))


def test_the_page_names_exactly_the_configs_that_exist() -> None:
    assert set(re.findall(r"([\w-]+\.toml)", PAGE)) == {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_builds_what_its_paper_trained(path: Path) -> None:
    config = Config.from_dict(load_settings(path))
    check(config)
    size = SIZES[config.model]
    with torch.device("meta"):
        model = build_model(config, size.vocab_size)
    family = path.stem.split("-")[0]
    assert config.batch * config.accumulate * model.config.max_seq == TOKENS.get(family, 131_072)
    assert model.config.norm == config.norm
    assert any("embproj" in type(m).__name__.lower() for m in model.modules()) == config.embproj
    assert config.dtype == ("fp32" if family == "osp" else "bf16")
    assert (config.mode == "act") == (family == "gnmr")
    assert "preset" in config.policy or family != "gnmr"
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert re.match(r"# .* \(arXiv (\d{4}\.\d{5})", first).group(1) in PAPERS


def settings(name: str) -> dict[str, object]:
    return Config.from_dict(load_settings(ROOT / "configs" / "paper" / f"{name}.toml")).to_dict()


SIZES_OF = {"spam": ("60m", "130m", "350m", "1b"), "gradstab": ("130m", "350m")}
PAIRS = [
    *((f"spam-{size}", f"spam-{size}-adam", {"optimizer", "optimizer_options"}) for size in SIZES_OF["spam"]),
    *(
        (f"gradstab-{size}{fp4}-stabilizer", f"gradstab-{size}{fp4}-adam", {"transform", "transform_options"})
        for size in SIZES_OF["gradstab"]
        for fp4 in ("", "-fp4")
    ),
    *(
        (f"gradstab-{size}-{arm}", f"gradstab-{size}-fp4-{arm}", {"recipe", "roles", "path"})
        for size in SIZES_OF["gradstab"]
        for arm in ("adam", "stabilizer")
    ),
    ("osp-muon", "osp-adam", {"optimizer", "lr"}),
    ("osp-muon", "osp-muon-everywhere", {"optimizer_options"}),
    ("osp-muon", "osp-ssnorm", {"norm"}),
    ("osp-muon", "osp-embproj", {"embproj"}),
    ("osp-muon", "osp-all", {"norm", "embproj"}),
    ("gnmr-b6-1b", "gnmr-b8-1b", {"recipe", "policy"}),
    ("gnmr-a-130m", "gnmr-a-matched-130m", {"lr", "policy"}),
    ("gnmr-b6-130m", "gnmr-ablation-130m", {"policy"}),
]


@pytest.mark.parametrize(("one", "other", "varied"), PAIRS)
def test_rows_of_a_table_differ_in_what_it_varies_and_in_nothing_else(one: str, other: str, varied: set[str]) -> None:
    a, b = settings(one), settings(other)
    assert {key for key in a if a[key] != b[key]} == varied
