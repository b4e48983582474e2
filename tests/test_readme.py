# SPDX-License-Identifier: Apache-2.0
"""The README's code runs, its two commands exist, its table and tree name real files, and its links lead somewhere."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        for block in self.blocks:
            x = x + block(x).tanh()
        return SimpleNamespace(loss=x.square().mean())


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == language]


def names() -> dict[str, object]:
    model = Toy()
    return {
        "model": model,
        "loader": [torch.randn(4, 8) for _ in range(12)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
    }


def test_the_first_code_block_observes_and_leaves_a_folder_for_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(blocks("python")[0], scope := names())
    assert scope["controller"].steps == 12
    from trimtab.report.page import write_page

    assert write_page("runs/mine").stat().st_size < 6_000_000


def test_the_diff_turns_a_plain_loop_into_a_controlled_one() -> None:
    lines = blocks("diff")[0].splitlines()
    added = [line for line in lines if line.startswith("+")]
    assert len(added) <= 6
    exec("\n".join(line[2:] for line in lines if not line.startswith("+")), names())  # the plain loop runs as well
    exec("\n".join(line[2:] for line in lines), scope := names())
    assert scope["controller"].mode == "act"
    assert scope["controller"].steps == 12


def test_the_other_methods_train_a_model() -> None:
    scope = names()
    scope["model"].embed = nn.Embedding(3, 8)  # OSP wants something that is not a matrix to multiply by
    exec(blocks("python")[1], scope)
    for optimizers in ([scope["optimizer"]], [scope["muon"], scope["adamw"]]):
        before = scope["model"](scope["loader"][0]).loss
        for _ in range(20):
            scope["model"](scope["loader"][0]).loss.backward()
            scope["stabilizer"].step_()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert scope["model"](scope["loader"][0]).loss < before


def test_every_make_target_and_verb_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    verbs = {path.stem for path in (ROOT / "trimtab" / "cli").glob("*.py")}
    commands = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines() if line]
    assert {c[1] for c in commands if c[0] == "make"} == {"demo", "test"}
    assert {c[1] for c in commands if c[0] == "make"} <= targets
    used = {c[1] for c in commands if c[0] == "trimtab"}
    assert used
    assert used <= verbs


def test_every_link_and_every_file_of_the_tree_exists() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    room = None
    for line in next(b for b in blocks("") if b.startswith("trimtab/")).splitlines():
        if match := re.match(r"  (\w+)/", line):
            room = ROOT / "trimtab" / match.group(1)
        for name in re.findall(r"\b(\w+\.py)\b", line):
            assert room is not None
            assert (room / name).is_file(), name


def test_the_line_counts_of_the_methods_are_about_right() -> None:
    for row in re.findall(r"^\|.*\|\s*(?:\d+)\s*\|.*\|$", README, re.MULTILINE):
        files = re.findall(r"\]\((trimtab/[^)]+)\)", row)
        stated = int(re.search(r"\|\s*(\d+)\s*\|", row).group(1))
        real = sum(len((ROOT / name).read_text().splitlines()) for name in files)
        assert abs(real - stated) <= 0.15 * real + 10, row
