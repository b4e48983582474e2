# SPDX-License-Identifier: Apache-2.0
"""What trimtab reads: valid files of every kind, made with its own writers, and how its verbs read them.

A target has two functions: `make` writes files into an empty folder, `read` reads them. `fuzzing.py` damages the files
between the two. What pretrained models are made of is in `models.py`.
"""

import contextlib
import copy
import io
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.errors import MissingExtraError, TrimtabError

ALLOWED = (TrimtabError, MissingExtraError)
"""What a reader may raise."""


class Target(NamedTuple):
    """Something that trimtab reads."""

    make: Callable[[Path], Any]
    """Write valid files into an empty folder."""
    read: Callable[[Path], None]
    """Read them as trimtab's verbs do."""
    verbs: tuple[str, ...] = ()
    """How a person meets the files; {0} is the folder."""
    keeps: bool = False
    """Whatever is damaged, the other files stay as they are."""


# Everything is imported where it is used: a target that needs no torch loads none.


def record_run(folder: Path, units: Sequence[str], *, name: str = "a run", message: str = "", steps: int = 40) -> None:
    """A short run of trimtab's own recorder, in which the first unit spikes and runs high for a while."""
    import numpy as np

    from trimtab.control.policy import Policy
    from trimtab.control.record import Recorder

    policy, rng = Policy(max_high=2, alpha=1.5, warmup_steps=5), np.random.default_rng(0)
    recoverable = np.ones(len(units), bool)
    config = {"name": name, "steps": steps, "faults": [{"unit": units[0], "kind": "nan", "start": 20, "width": 3}]}
    event = {
        "step": 20,
        "kind": "persistent",
        "unit": units[0],
        "cause": "ratio",
        "message": message or f"{units[0]} high",
    }
    with Recorder(folder, run=config) as recorder:
        recorder.open_trace(units, recoverable, policy.to_dict(), 2, 5, steps, columns=("update",))
        for step in range(1, steps + 1):
            norms = rng.lognormal(0, 0.1, len(units)).astype(np.float32)
            seen, high = np.ones(len(units), bool), np.zeros(len(units), bool)
            high[0] = 20 < step < 26
            norms[0] *= 30 if step in (20, 23) else 1
            seen[-1] = step % 7 != 0
            if step == 30:
                norms[1] = np.nan
            events = [event] if step == 20 else []
            recorder.observe(step, norms, seen, high, float(norms[0]), events, {"update": norms})
            recorder.log(step, loss=5 / step, lr=1e-3, **({"eval_loss_high": 4 / step} if step % 10 == 0 else {}))
            if step % 20 == 0:
                recorder.flush()


UNITS = ("blocks.0.attn.q", "blocks.0.mlp.up", "blocks.1.mlp.down")


def make_run(folder: Path) -> None:
    record_run(folder, UNITS)


def read_folder(folder: Path) -> None:
    """What report, watch, postmortem, export and --resume look at."""
    from trimtab.lab.resume import stored_settings
    from trimtab.report.follow import Follower
    from trimtab.report.imports import read_log
    from trimtab.report.markdown import write_markdown
    from trimtab.report.postmortem import lines, postmortem, to_markdown

    each(
        lambda: json.dumps(following(Follower(folder)), allow_nan=False),
        lambda: write_markdown(folder, folder / "report.md"),
        lambda: [to_markdown(found := postmortem(read_log(folder))), list(lines(found)), json.dumps(found.to_dict())],
        lambda: stored_settings(folder),
    )


def following(follower: Any) -> Any:
    """What a live page is told."""
    for _ in range(3):
        follower.refresh()
    return follower.since()


TOUCHED: set[str] = set()
"""The files that are damaged now; empty: any may be."""


def each(*readers: Callable[[], Any], files: Mapping[str, Callable[[], Any]] | None = None) -> None:
    """Every reader gets its turn, whatever the others said; those of one file only if that one is damaged."""
    said = None
    some = [reader for name, reader in (files or {}).items() if not TOUCHED or name in TOUCHED]
    for reader in (*readers, *some):
        try:
            reader()
        except ALLOWED as error:
            said = error
    if said is not None:
        raise said


def read_traces(folder: Path) -> None:
    """The trace alone: whole, in blocks, judged again; and by a recorder that goes on with it."""
    import numpy as np

    from trimtab.control.record import Recorder
    from trimtab.report.imports import read_log
    from trimtab.report.read import iter_trace, read_trace, scan_trace

    path = folder / "trace.arrow"

    def resume() -> None:
        size = path.stat().st_size if path.is_file() else 0
        recorder = Recorder.resume(folder, {"metrics": 0, "trace": size})
        try:
            recorder.open_trace(UNITS, np.ones(len(UNITS), bool), {}, 1, 1, None, columns=("update",))
        finally:
            recorder.close()

    each(
        lambda: read_trace(path),
        lambda: list(iter_trace(path, rows=7)),
        lambda: scan_trace(path),
        lambda: judge_again(read_log(path)),
        resume,
    )


def judge_again(log: Any) -> None:
    """What `trimtab replay` does with a log."""
    from trimtab.control.policy import Policy
    from trimtab.report.whatif import replayed

    if log.rows:
        replayed(log, {"its own": Policy.from_dict(log.header.policy)})


def make_tables(folder: Path) -> None:
    """The same log in every form."""
    import pyarrow as pa
    from pyarrow import parquet
    from tensorboard.compat.proto import event_pb2, summary_pb2

    rows = [
        {"step": n, "train/loss": 4 / n, "grad_norm": 1.0, "grad_norm/layers.0": 0.5, "grad_norm/layers.1": float(n)}
        for n in range(1, 40)
    ]
    rows[20]["train/loss"] = 90.0
    heads = list(rows[0])
    lines = [heads, *([str(row[head]) for head in heads] for row in rows)]
    (folder / "log.csv").write_text("".join(",".join(line) + "\n" for line in lines))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "log.json").write_text(json.dumps({"log_history": rows}))
    parquet.write_table(pa.Table.from_pylist(rows), folder / "log.parquet")
    records = []
    for row in rows:
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=row[tag]) for tag in heads[1:]]  # type: ignore[attr-defined]
        summary = summary_pb2.Summary(value=values)  # type: ignore[attr-defined]
        event = event_pb2.Event(step=int(row["step"]), summary=summary)  # type: ignore[attr-defined]
        records.append(event.SerializeToString())
    raw = b"".join(struct.pack("<QI", len(one), 0) + one + bytes(4) for one in records)
    (folder / "log.tfevents").write_bytes(raw)


def read_tables(folder: Path) -> None:
    from trimtab.report.imports import read_log
    from trimtab.report.postmortem import lines, postmortem

    def told(path: Path) -> None:
        log = read_log(path)
        judge_again(log)
        list(lines(postmortem(log)))

    logs = [path for path in sorted(folder.iterdir()) if path.name.startswith("log.")]
    each(files={path.name: lambda path=path: told(path) for path in logs})


CONFIG = """
model = "micro"
recipe = "saved4"
unit = ["blocks.*.q", "blocks.*.up"]
detector = "gnmr"
lr = 0.002
steps = 600
seq = 64
clip = 1.0
seed = 3
faults = "blocks.1.mlp.down:grad_scale:start=200,width=20,size=64"
bad_data = "start=3,width=2"
policy.preset = "steady"
policy.alpha = 2.5
policy.window = 10
optimizer_options.eps = 0.001
detector_options.full = true
recipe_options.scope = "forward"
"""


def make_config(folder: Path) -> None:
    (folder / "run.toml").write_text(CONFIG)
    (folder / "run.yaml").write_text(CONFIG.replace(" = ", ": "))
    (folder / "set.pairs").write_text(CONFIG.strip().replace(" = ", "="))


def settle(settings: dict[str, Any]) -> None:
    """What is made of settings before anything heavy is built."""
    from trimtab.cli.env import to_toml
    from trimtab.lab.config import Config
    from trimtab.lab.faults import parse_faults
    from trimtab.lab.finetune_config import FinetuneConfig
    from trimtab.lab.noise import parse_bad_data
    from trimtab.linear.recipes import Recipe

    def pretraining() -> None:
        config = Config.from_dict(settings)
        to_toml(config.to_dict() | {"policy": config.build_policy().to_dict()})
        config.build_policy().resolve(8, config.steps)
        parse_faults(config.faults)
        parse_bad_data(config.bad_data)
        if config.recipe != "none":
            Recipe.named(config.recipe, **config.recipe_options)

    own = {key: value for key, value in settings.items() if key != "bad_data"}
    each(pretraining, lambda: FinetuneConfig.from_dict({"data": "a.jsonl", **own}).build_policy())


def read_config(folder: Path) -> None:
    from trimtab.lab.config import load_settings

    pairs = folder / "set.pairs"  # stands for a command line, which is always there
    text = pairs.read_text(encoding="utf-8", errors="replace") if pairs.is_file() else ""
    each(
        files={
            "run.toml": lambda: settle(load_settings(folder / "run.toml")),
            "run.yaml": lambda: settle(load_settings(folder / "run.yaml")),
            "set.pairs": lambda: settle(load_settings(None, text.split("\n"))),
        }
    )


def make_text(folder: Path) -> None:
    """A text, a JSONL corpus, questions and answers, and a tokenizer of few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = "the quick brown fox jumps over the lazy dog and runs on through the wood until the night falls\n" * 4
    (folder / "text.txt").write_text(words)
    rows = [{"text": words}, {"content": words}, {"question": "why?", "answer": words}]
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = [
        {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]},
        {"prompt": "a", "answer": "b"},
        {"instruction": "say", "input": "it", "output": "it"},
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    tokenizer = Tokenizer(models.BPE(unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.train_from_iterator(
        [words], trainers.BpeTrainer(vocab_size=60, special_tokens=["[unk]"], show_progress=False)
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def read_texts(folder: Path) -> None:
    from trimtab.lab.chat import read_source
    from trimtab.lab.data import load_corpus

    each(
        files={
            "text.txt": lambda: load_corpus(folder / "text.txt"),
            "docs.jsonl": lambda: load_corpus(folder / "docs.jsonl"),
            "tokenizer.json": lambda: load_corpus(folder / "text.txt", tokenizer=folder / "tokenizer.json"),
            "chat.jsonl": lambda: read_source(folder / "chat.jsonl"),
        }
    )


def make_tasks(folder: Path) -> None:
    """Rows of each kind of downstream task, and the results of an arm."""
    from trimtab.lab.downstream.results import FORMAT

    choices = {"query": "Question: why", "choices": ["so", "not so"], "gold": 1}
    ends = {"context_options": ["a did", "b did"], "continuation": "it.", "gold": 0}
    question = "Is it?,a,b,c,d,1\n"
    page = ' = First = \n\n One , two @-@ three ( four ) . It \'s " so " .\n\n = Second = \n\n More [ of it ] .\n'
    files = {
        "gsm8k/test.jsonl": json.dumps({"question": "2 + 3?", "answer": "5\n#### 5"}) + "\n",
        "gsm8k/train.jsonl": json.dumps({"question": "1 + 1?", "answer": "2\n#### 2"}) + "\n",
        "mmlu/test/law_test.csv": question * 2,
        "mmlu/dev/law_dev.csv": question,
        "tasks/arc_easy.jsonl": (json.dumps(choices) + "\n") * 2,
        "tasks/winogrande.jsonl": json.dumps(ends) + "\n",
        "tasks/lambada_openai.jsonl": json.dumps({"context": "he said", "continuation": "so"}) + "\n",
        "wikitext-2/test.txt": page,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    items = {"id": ["0", "1", "2"], "gold_ll": [-1.0, -2.5, -0.5], "gold_tokens": [3, 4, 2], "greedy": [0, 1, 0]}
    score = {"value": -0.5, "low": -0.7, "high": -0.3}
    task = {"n": 3, "of": 3, "sha256": "ab", "shots": 0, "chat": False, "seconds": 0.1, "scores": {"gold_ll": score}}
    about = {"model": "m", "adapter": None, "bits": None, "recipe": None, "path": None, "dtype": "float32"}
    results = {"format": FORMAT, "about": about, "versions": {}, "tasks": {"gsm8k": task | {"items": items}}}
    (folder / "results.json").write_text(json.dumps(results))


def read_tasks(folder: Path) -> None:
    from trimtab.cli.evaluate import _show_differences
    from trimtab.lab.downstream.compare import compare
    from trimtab.lab.downstream.results import load_sets, read_results

    def against() -> None:
        other = read_results(folder / "results.json")
        ours = copy.deepcopy(VALID["results"])
        _show_differences(compare(ours, other), other)

    if "results" not in VALID:  # the first call reads valid files
        VALID["results"] = json.loads((folder / "results.json").read_text())
    names = ("gsm8k", "mmlu", "arc_easy", "winogrande", "lambada", "wikitext2")
    each(
        *(lambda name=name: load_sets([name], folder) for name in names),
        lambda: load_sets(["gsm8k", "mmlu"], folder, shots=1),
        files={"results.json": against},
    )


VALID: dict[str, Any] = {}
"""What a target has read from its valid files."""


def make_checkpoint(folder: Path) -> None:
    """A run of the lab, with a checkpoint in its middle and one at its end."""
    from trimtab.lab.train import train

    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    settings = {"data": str(text), "steps": 4, "checkpoint_every": 2, "batch": 2, "seq": 8, "eval_batches": 1}
    train(settings, folder / "run")


def read_checkpoint(folder: Path) -> None:
    """Go on for a step, as --resume does; and what `trimtab evaluate` looks at first."""
    from trimtab.lab.train import train

    train({"steps": 5}, folder / "run", resume=True)


def make_sharded(folder: Path) -> None:
    """A checkpoint folder as several ranks write it."""
    import torch

    from trimtab.lab import dcp
    from trimtab.lab.parallel import World

    rest = {"step": 3, "steps": 9, "optimizer": {}, "offsets": {"metrics": 0, "trace": 0}, "config": {}}
    tensors = {
        "model.a": torch.arange(12.0).view(3, 4),
        "model.b": torch.ones(2),
        "optimizer.a.exp_avg": torch.ones(3, 4),
    }
    dcp.save(folder / "step_000003", tensors, rest, World())
    (folder / "step_000003" / ".metadata").unlink()  # never read


def read_sharded(folder: Path) -> None:
    from trimtab.lab import checkpoint, dcp

    found = checkpoint.latest(folder)
    if found is not None:
        checkpoint.weights(*found)
        dcp.sizes(found[1], "optimizer")


def make_packed(folder: Path) -> None:
    """A packed model, a stored saliency, and a finished block of a retraining with its manifest."""
    import torch

    from trimtab.retrain import packed
    from trimtab.retrain.fisher import StoredSaliency
    from trimtab.retrain.settings import Settings
    from trimtab.retrain.walk import _Store

    model, settings = _small(), Settings(bits=2, group=8, rank=2)
    torch.manual_seed(0)
    factors = torch.randn(2, 16).half(), torch.randn(8, 2).half()
    codes = torch.randint(0, 4, (8, 16), dtype=torch.uint8)
    zero = torch.randint(0, 4, (8, 2), dtype=torch.uint8)
    one = packed.Packed.make(codes, torch.rand(8, 2).half(), zero, *factors, settings=settings)
    packed.save_packed(model, {"0": one}, folder / "model.safetensors")
    StoredSaliency.save(folder / "saliency.safetensors", {"0": torch.rand(8, 16)}, source="ab")
    store = _Store(folder / "blocks", settings, torch.ones(2, 4, dtype=torch.long), {"0": model[0]}, None)  # type: ignore[dict-item]
    tensors, header = packed.to_file({"0": one})
    source = packed.fingerprint({"0": model[0].weight})  # type: ignore[dict-item]
    packed.write(store.path(0), tensors, header | {"source": source, "before": 1.0, "after": 0.5})


def _small() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[3].weight = model[2].weight  # tied, as embeddings are
    return model


def read_packed(folder: Path) -> None:
    import torch

    from trimtab.retrain import packed
    from trimtab.retrain.fisher import StoredSaliency
    from trimtab.retrain.settings import Settings
    from trimtab.retrain.walk import _Store

    def stored() -> None:
        if StoredSaliency.header(folder / "saliency.safetensors") is not None:
            dict(StoredSaliency(folder / "saliency.safetensors"))

    def block() -> None:
        model, settings = _small(), Settings(bits=2, group=8, rank=2)
        store = _Store(folder / "blocks", settings, torch.ones(2, 4, dtype=torch.long), {"0": model[0]}, None)
        found = store.load(0, {"0": model[0]})
        if found is not None:
            found[0]["0"].weight()

    each(
        stored,
        block,
        files={"model.safetensors": lambda: packed.load_packed_(_small(), folder / "model.safetensors")},
    )


def make_pair(folder: Path) -> None:
    """Two runs to compare."""
    for name in ("a", "b"):
        record_run(folder / name, UNITS, name=name, steps=30)


def read_pages(folder: Path) -> None:
    """The pages that are made from runs: of one, of two, of a sweep; and lists of units to keep high."""
    from trimtab.control.policy import Policy
    from trimtab.report import keep, whatif
    from trimtab.report.compare import compare, comparison_markdown, render_comparison, verdict
    from trimtab.report.imports import read_log
    from trimtab.report.page import render
    from trimtab.report.read import read_run

    def compared() -> None:
        runs = compare([folder / "a", folder / "b"])
        render_comparison(runs)
        comparison_markdown(runs, "picture.svg")
        verdict(runs)

    def swept() -> None:
        log = read_log(folder / "a")
        own = Policy.from_dict(log.header.policy)
        found = whatif.whatif(log, whatif.grid_of(own, {"alpha": [1.5, 3.0]}), calibrate=whatif.bases_of(own))
        whatif.render_sweep(found)
        json.dumps(found.to_dict(), allow_nan=False)
        whatif.table(found)
        whatif.says(found)
        whatif.changed(found.advice.row.policy, own)

    def kept() -> None:
        units = keep.keep_list(folder / "a", 2)
        for write in keep.TARGETS.values():
            write(units, read_run(folder / "a", with_trace=False).name)

    each(compared, lambda: render(read_run(folder / "b", with_trace=False)), swept, kept)


SMALL = {"model": "micro", "steps": 8, "batch": 1, "seq": 16, "eval_batches": 1, "device": "cpu", "threads": 1}
"""Settings of a run that takes a second."""
FAULTS = "blocks.1.mlp.up:grad_scale:start=4,width=2,size=64"
BENCH = " ".join(
    [
        "--seeds 1 --arms gnmr,random --set data={0}/../words.txt",
        *(f"--set {key}={value}" for key, value in SMALL.items()),
        *(f"--set {pair}" for pair in (f"faults={FAULTS}", "policy.max_high=2", "policy.warmup_steps=2")),
    ]
)


def make_words(folder: Path) -> Path:
    """A text beside the folder, which is not damaged."""
    text = folder.parent / "words.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return text


def make_bench(folder: Path) -> None:
    """A bench of four arms, finished."""
    make_words(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        run_bench(folder)
    (folder / "bench.json").unlink()  # an output, which nobody reads


def read_bench(folder: Path) -> None:
    """The same command once more: what is finished is found, and all of it gathered into a table and a page."""
    from trimtab.report.bench import plain_table, render_bench, says, table

    result = run_bench(folder)
    for cell in result["cells"]:
        plain_table(*table(cell, result["metrics"]))
    list(says(result))
    render_bench(result)


def run_bench(folder: Path) -> Any:
    from trimtab.cli.bench import _Progress
    from trimtab.lab.bench import run_bench
    from trimtab.lab.suites import SUITES

    given = SMALL | {"faults": FAULTS, "policy": {"max_high": 2, "warmup_steps": 2}}
    given |= {"data": f"{folder}/../words.txt"}
    return run_bench(SUITES["smoke"], folder, seeds=(0,), arms=("gnmr", "random"), given=given, told=_Progress().told)


def make_subject(folder: Path) -> None:
    """A finished run, whose model is looked at."""
    from trimtab.lab.train import train

    text = make_words(folder)
    train(SMALL | {"data": str(text), "steps": 2, "recipe": "fp8"}, folder / "run")
    for name in ("metrics.jsonl", "trace.arrow"):  # nobody looks at them here
        (folder / "run" / name).unlink()


def read_subject(folder: Path) -> None:
    """What diagnose and evaluate make of a run and of its checkpoint, and doctor of its settings."""
    from trimtab.cli.doctor import _subject
    from trimtab.lab.diagnose import diagnose
    from trimtab.lab.evaluate import evaluate_run
    from trimtab.lab.subject import load_subject

    def diagnosed(path: Path) -> None:
        subject = load_subject(path, folder / "../words.txt", recipe="fp8", unit="block", batches=1, batch=1)
        found = diagnose(subject.model, subject.batches, loss_fn=subject.loss_fn, roles=())
        json.dumps({"step": subject.step} | found.to_dict(), allow_nan=False)

    file = "run/checkpoints/step_000002.pt"
    each(
        files={
            "run/run.json": lambda: _subject(folder / "run", ()),
            file: lambda: each(
                lambda: evaluate_run(folder / "run", ["4-4-16"], batches=1).to_dict(),
                lambda: diagnosed(folder / file),
                lambda: diagnosed(folder / "run"),
            ),
        }
    )


TARGETS: dict[str, Target] = {
    "run": Target(
        make_run,
        read_folder,
        (
            *("report {0} --md --out {0}/out.md", "replay {0}", "sweep {0} --grid alpha=1.5,3 --out {0}/s.html"),
            *("postmortem {0}", "export {0} --to torchao --top 2", "train --resume --out {0}"),
        ),
    ),
    "trace": Target(
        make_run, read_traces, ("replay {0}/trace.arrow --set alpha=2", "postmortem {0}/trace.arrow --json")
    ),
    "tables": Target(
        make_tables,
        read_tables,
        tuple(
            f"{verb} {{0}}/log.{kind}"
            for kind in ("csv", "jsonl", "json", "parquet", "tfevents")
            for verb in ("postmortem", "replay")
        ),
    ),
    "config": Target(make_config, read_config, ("env --config {0}/run.toml", "env --config {0}/run.yaml")),
    "text": Target(
        make_text,
        read_texts,
        ("train --set data={0}/docs.jsonl --set tokenizer={0}/tokenizer.json --set model=none --out {0}/x",),
    ),
    "tasks": Target(
        make_tasks,
        read_tasks,
        ("evaluate {0}/nothing --tasks gsm8k,mmlu --data {0} --against {0}/results.json",),
    ),
    "packed": Target(make_packed, read_packed),
    "sharded": Target(make_sharded, read_sharded),
    "checkpoint": Target(make_checkpoint, read_checkpoint, ("train --resume --out {0}/run --set steps=5",)),
    "pages": Target(
        make_pair,
        read_pages,
        (
            *("report {0}/a {0}/b --md --out {0}/out.md", "report {0}/a {0}/b --out {0}/out.html", "report {0}/a"),
            *("sweep {0}/a --json", "export {0}/a --to megatron --top 2", "export {0}/b --to te --top 2"),
        ),
        keeps=True,
    ),
    "bench": Target(make_bench, read_bench, (f"bench smoke {BENCH} --out {{0}}",), keeps=True),
    "subject": Target(
        make_subject,
        read_subject,
        (
            "diagnose {0}/run {0}/../words.txt --batches 1 --batch 1 --unit block --no-roles",
            "diagnose {0}/run/checkpoints/step_000002.pt {0}/../words.txt --batches 1 --batch 1 --unit block --json",
            "evaluate {0}/run --bits 4-4-16 --batches 1",
            "doctor {0}/run",
        ),
        keeps=True,
    ),
}
