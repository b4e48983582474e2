# SPDX-License-Identifier: Apache-2.0
"""What SECURITY.md promises: no file that is read can run code or claim more memory than it has, no spelling that could
is in the source, and no secret of the machine gets into what a run writes.

The source is walked as syntax trees, so that a new `torch.load` is a decision: each rule names the calls it is about,
and every place that may break it stands in `ALLOWED` with its reason. Files are attacked with what attackers use:
pickles that write a file when they are opened, archives and headers that claim terabytes."""

import ast
import io
import json
import os
import pickle
import random
import re
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.control import secrets
from trimtab.control.policy import Policy
from trimtab.control.record import Recorder
from trimtab.errors import TrimtabError
from trimtab.lab import checkpoint, dcp
from trimtab.report.follow import LONGEST_LINE, Follower
from trimtab.report.read import iter_trace, read_run, read_trace

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for room in ("trimtab", "examples", "scripts", "benchmarks") for path in (ROOT / room).rglob("*.py")
)

# The source


def name_of(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain; only the last parts where it hangs on a call or an index."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


def argument(call: ast.Call, name: str) -> object:
    """The constant that a keyword is given; None if it is absent, `...` if it is no constant."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
    return None


RULES: dict[str, Callable[[str, ast.Call], bool]] = {
    "torch.load without weights_only=True": lambda n, c: (
        n.endswith("torch.load") and argument(c, "weights_only") is not True
    ),
    "np.load with pickles": lambda n, c: n in ("np.load", "numpy.load") and argument(c, "allow_pickle") is True,
    "read_pickle": lambda n, c: n.endswith(".read_pickle"),
    "yaml that makes objects": lambda n, c: (
        n.startswith("yaml.") and n.split(".")[1] in ("load", "load_all", "full_load", "unsafe_load", "FullLoader")
    ),
    "eval, exec or compile": lambda n, c: (
        n in ("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec")
    ),
    "code of a model": lambda n, c: argument(c, "trust_remote_code") not in (None, False),
    "a model folder without trust_remote_code=False": lambda n, c: (
        bool(re.search(r"Auto\w+\.from_pretrained$|ForCausalLM\.from_config$", n))
        and argument(c, "trust_remote_code") is not False
        and not any(keyword.arg is None for keyword in c.keywords)  # **options: looked at below
    ),
    "an archive that is unpacked": lambda n, c: n.split(".")[-1] in ("extractall", "extract", "unpack_archive"),
    "a shell": lambda n, c: (
        argument(c, "shell") not in (None, False)
        or n in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn")
        or (n.startswith("os.") and n[3:7] in ("exec", "spaw"))
    ),
    "a temporary name that anybody can take": lambda n, c: n in ("tempfile.mktemp", "os.tempnam", "os.tmpnam"),
    "a template without a sandbox": lambda n, c: n.split(".")[-1] in ("Template", "Environment") and "jinja" in n,
    "an address that is fetched": lambda n, c: n.split(".")[-1] in ("urlopen", "urlretrieve", "hf_hub_download"),
    "a server for others": lambda n, c: (
        n.split(".")[-1] in ("HTTPServer", "ThreadingHTTPServer", "TCPServer", "_Server", "create_server")
        and not (c.args and isinstance(c.args[0], ast.Tuple) and name_of(c.args[0].elts[0]) == "HOST")
    ),
}
ALLOWED = {
    ("benchmarks/comm.py", "torch.load without weights_only=True"): "its own ranks wrote it, into a folder of its own",
    ("benchmarks/comm.py", "a shell"): "starts itself again, under unshare, with its own arguments: no shell",
    ("benchmarks/comm_learning.py", "torch.load without weights_only=True"): "its own ranks wrote it, likewise",
    ("trimtab/control/alerts.py", "an address that is fetched"): "a webhook of the user's own, which is POSTed to",
}


PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
BARE = ("torch.load", "numpy.load", "yaml.load", "os.system", "os.popen", "tempfile.mktemp")


def broken(source: str) -> set[str]:
    """The rules that a source breaks."""
    nodes = list(ast.walk(ast.parse(source)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    found = {rule for call in calls for rule, breaks in RULES.items() if breaks(name_of(call.func), call)}
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    parts = [f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names]
    found |= {"a pickle" for name in (*whole, *parts) if name.split(".")[0] in PICKLES}
    return found | {"a function whose calls the walk would not know" for name in parts if name in BARE}


def test_no_source_opens_a_file_in_a_way_that_can_run_it() -> None:
    found = {
        (str(path.relative_to(ROOT)), rule) for path in SOURCES for rule in broken(path.read_text(encoding="utf-8"))
    }
    assert len(SOURCES) > 150
    assert not found - ALLOWED.keys(), "use the safe spelling, or add the place to ALLOWED with its reason"
    assert not ALLOWED.keys() - found, "no longer there: take it out of ALLOWED"


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "torch.load(p, weights_only=flag)",
        "np.load(p, allow_pickle=True)",
        "import pickle",
        "from joblib import load",
        "from torch import load",
        "yaml.load(t, Loader=yaml.Loader)",
        "eval('1')",
        "exec(text)",
        "AutoConfig.from_pretrained(p)",
        "AutoTokenizer.from_pretrained(p, trust_remote_code=True)",
        "transformers.AutoModelForCausalLM.from_config(c)",
        "tarfile.open(p).extractall()",
        "subprocess.run(w, shell=True)",
        "os.system(w)",
        "tempfile.mktemp()",
        "jinja2.Template(t)",
        "ThreadingHTTPServer(('', 80), H)",
    ],
)
def test_the_walk_sees_each_unsafe_spelling(source: str) -> None:
    assert broken(source)


def test_options_of_a_model_folder_hold_the_refusal() -> None:
    """Calls that pass `**options` are not seen by the walk: their tables are."""
    for file in ("trimtab/lab/pretrained.py", "trimtab/retrain/export.py"):
        assert '"trust_remote_code": False' in (ROOT / file).read_text(encoding="utf-8")


# Files of strangers


class Bomb:
    """What runs when a pickle of it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture(name="little_memory")
def _little_memory() -> Iterator[None]:
    """4 GiB more address space than now: who allocates what a file claims fails here, and not on the user's machine."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def peak() -> int:
    """The most memory that this process has ever held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_checkpoint_that_is_a_pickle_of_code_does_not_run_it(tmp_path: Path) -> None:
    mark, path = tmp_path / "ran", tmp_path / "step_000001.pt"
    torch.save({"step": 1, "model": Bomb(mark)}, path)
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.read(path)
    path.write_bytes(pickle.dumps(Bomb(mark)))  # the format before archives
    with pytest.raises(zipfile.BadZipFile):
        checkpoint.read(path)
    assert not mark.exists()
    with pytest.raises(TrimtabError, match="none of the 1 checkpoints"):
        checkpoint.latest(tmp_path)
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb itself is a dud"


def saved_folder(path: Path) -> Path:
    """A checkpoint folder of one rank."""
    tensors = {"model.w": torch.arange(12.0).view(3, 4), "model.b": torch.ones(3)}
    dcp.save(path, tensors, {"step": 1}, dcp.World())
    return path


def test_a_folder_of_ranks_is_read_without_opening_its_pickle(tmp_path: Path) -> None:
    folder, mark = saved_folder(tmp_path / "step_000001"), tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    state = dcp.read(folder)
    assert torch.equal(dcp.weights(folder, state)["w"], torch.arange(12.0).view(3, 4))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entry: entry.update(size=[1 << 40, 4]), "claims"),
        (lambda entry: entry.update(size=[-3, 4]), "no size"),
        (lambda entry: entry["chunks"][0].__setitem__(2, "../../__0_0.distcp"), "no data file"),
        (lambda entry: entry["chunks"][0].__setitem__(2, "/etc/passwd"), "no data file"),
        (lambda entry: entry["chunks"][0].__setitem__(4, 1 << 40), "cut short"),
        (lambda entry: entry["chunks"][0].__setitem__(3, -8), "cut short"),
        (lambda entry: entry.update(dtype="load"), "no type"),
    ],
)
def test_an_index_that_lies_is_refused_before_anything_is_allocated(
    tmp_path: Path, change: Callable[[Any], Any], words: str
) -> None:
    folder = saved_folder(tmp_path / "step_000001")
    state = torch.load(folder / "rest.pt", weights_only=True)
    change(state["index"]["model.w"])
    torch.save(state, folder / "rest.pt")
    with pytest.raises(TrimtabError, match=words):
        dcp.read(folder)


def test_a_checkpoint_that_unpacks_to_more_than_it_is_is_refused(tmp_path: Path) -> None:
    path, packed = tmp_path / "plain.pt", tmp_path / "packed.pt"
    torch.save({"w": torch.zeros(1 << 20)}, path)
    with zipfile.ZipFile(path) as parts, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as into:
        for part in parts.namelist():
            into.writestr(part, parts.read(part))
    assert packed.stat().st_size < 100_000
    assert torch.equal(checkpoint.load(path)["w"], torch.zeros(1 << 20))
    with pytest.raises(TrimtabError, match="says that it unpacks to"):
        checkpoint.load(packed)


@pytest.mark.usefixtures("little_memory")
def test_a_checkpoint_whose_tensor_claims_terabytes_is_refused(tmp_path: Path) -> None:
    """The numbers in the pickle are an attacker's too: 4 bytes are there, 4 TiB are claimed."""
    path, huge = tmp_path / "small.pt", tmp_path / "huge.pt"
    torch.save({"w": torch.zeros(70_000)}, path)
    with zipfile.ZipFile(path) as parts, zipfile.ZipFile(huge, "w") as into:
        for part in parts.namelist():
            data = parts.read(part)
            if part.endswith("data.pkl"):
                number = b"J" + struct.pack("<i", 70_000)
                assert data.count(number) >= 2  # of the storage, and of the shape
                data = data.replace(number, b"\x8a\x06" + struct.pack("<q", 1 << 40)[:6])
            into.writestr(part, data)
    before = peak()
    with pytest.raises(RuntimeError):
        checkpoint.load(huge)
    assert peak() - before < 200 << 20


UNITS = 3


def trace_of(folder: Path, **options: Any) -> Path:
    """A short run; returns its trace."""
    with Recorder(folder) as recorder:
        recorder.open_trace(
            [f"u{i}" for i in range(UNITS)], np.ones(UNITS, bool), Policy().to_dict(), 1, 2, 10, **options
        )
        for step in range(1, 41):
            recorder.observe(step, np.ones(UNITS, np.float32), np.ones(UNITS, bool), np.zeros(UNITS, bool), 1.0)
            recorder.log(step, loss=1.0)
    return folder / "trace.arrow"


def rewritten(path: Path, header: dict[str, Any] | None = None, **options: Any) -> Path:
    """The trace once more, with other words in its header or other options of Arrow's writer."""
    pa = pytest.importorskip("pyarrow")
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_stream(file).read_all()
    told = json.loads(table.schema.metadata[b"trimtab"]) | (header or {})
    schema = table.schema.with_metadata({b"trimtab": json.dumps(told).encode()})
    other = path.with_name("other.arrow")
    with (
        pa.OSFile(str(other), "wb") as file,
        pa.ipc.new_stream(file, schema, options=pa.ipc.IpcWriteOptions(**options)) as out,
    ):
        out.write_table(table.cast(schema))
    return other


def test_a_trace_whose_batches_unpack_to_any_size_is_refused(tmp_path: Path) -> None:
    path = trace_of(tmp_path / "run")
    assert len(read_trace(rewritten(path))) == 40
    with pytest.raises(TrimtabError, match="compressed batches"):
        read_trace(rewritten(path, compression="zstd"))


@pytest.mark.parametrize("name", ["window", "span"])
def test_a_trace_cannot_ask_for_a_memory_without_end(tmp_path: Path, name: str) -> None:
    path = trace_of(tmp_path / "run")
    asked = {**Policy(history="window").to_dict(), name: 10**9}
    rewritten(path, {"policy": asked}).replace(path)
    with pytest.raises(TrimtabError, match=f"{name} must be at most"):
        Policy.from_dict(next(iter_trace(path)).policy)
    follower = Follower(path.parent)
    follower.refresh()
    assert f"{name} must be at most" in follower.problem


@pytest.mark.usefixtures("little_memory")
def test_a_message_of_a_trace_that_claims_terabytes_is_a_torn_tail(tmp_path: Path) -> None:
    path = trace_of(tmp_path / "run")
    whole = path.read_bytes()
    body = whole.rindex(b"\xff\xff\xff\xff")
    length = struct.unpack_from("<i", whole, body + 4)[0]
    message = bytearray(whole[body + 8 : body + 8 + length])
    size = struct.pack("<q", len(whole) - body - 8 - length)
    assert message.count(size) == 1
    claimed = message.replace(size, struct.pack("<q", 1 << 42))
    before = peak()
    path.write_bytes(whole[: body + 8] + bytes(claimed) + whole[body + 8 + length :])
    assert len(read_trace(path)) == 0
    path.write_bytes(whole + b"\xff\xff\xff\xff\xf0\xff\xff\x7f")  # metadata of two gigabytes
    assert len(read_trace(path)) == 40
    assert peak() - before < 200 << 20


def test_lines_that_break_parsers_are_counted_and_passed_over(tmp_path: Path) -> None:
    folder = trace_of(tmp_path / "run").parent
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"[" * 100_000 + b"\n")  # deeper than any stack
        file.write(b'{"step": 1' + b"0" * 30 + b"}\n")  # a step beyond 64 bits
        file.write(b'{"step": 41, "loss": 1' + b"0" * 400 + b"}\n")  # a number beyond doubles: not finite
        file.write(b'{"step": 42, "loss": "' + b"x" * (LONGEST_LINE + 10) + b'"}\n')
        file.write(b'{"step": 43, "loss": 2.0, "events": [{"kind": "rerun", "message": "' + b"m" * 9999 + b'"}]}\n')
    follower = Follower(folder)
    follower.refresh()
    told = follower.since()
    assert (told["step"], told["last"]["loss"]) == (43, 2.0)
    assert any("broken lines" in note for note in told["notes"])
    assert len(told["events"][-1]["message"]) == 1000
    json.dumps(told, allow_nan=False)
    with pytest.raises(TrimtabError, match="line 41"):
        read_run(folder)


def test_a_packed_folder_is_compared_with_its_file_before_it_is_built(
    tmp_path: Path, tiny_llama: Path, little_memory: None
) -> None:
    transformers = pytest.importorskip("transformers")
    from trimtab.retrain import load_folder
    from trimtab.retrain.packed import save_packed

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    save_packed(model, {}, tmp_path / "packed.safetensors")
    config = json.loads((tiny_llama / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert sum(p.numel() for p in load_folder(tmp_path)[0].parameters()) == sum(p.numel() for p in model.parameters())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 1 << 34}), encoding="utf-8")
    with pytest.raises(TrimtabError, match=r"is of another model: .*mlp"):
        load_folder(tmp_path)


def test_code_beside_a_model_is_never_run(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.lab.pretrained import load, load_model
    from trimtab.retrain import load_folder

    mark, folder = tmp_path / "ran", tmp_path / "model"
    folder.mkdir()
    for file in tiny_llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "evil.py").write_text(
        f"open({str(mark)!r}, 'w')\nclass Model: ...\nclass Config: ...\n", encoding="utf-8"
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "packed.safetensors").write_bytes(b"")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")  # who is asked says yes
    for reads in (load, load_model, load_folder):
        with pytest.raises(TrimtabError):
            reads(folder)
    assert not asked
    assert not mark.exists()
    config |= {"model_type": "llama", "auto_map": None, "attn_implementation": "somebody/kernel"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(TrimtabError, match="kernel from a hub"):
        load(folder)


def test_an_adapter_without_weights_is_not_looked_for_on_a_hub(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = pytest.importorskip("peft.utils.save_and_load")
    from trimtab.lab.downstream.arm import _adapted
    from trimtab.lab.pretrained import load

    asked: list[str] = []
    monkeypatch.setattr(theirs, "file_exists", lambda repo_id, **_: asked.append(repo_id))
    monkeypatch.chdir(tmp_path)
    adapter = Path("runs/adapter")  # also the name of somebody's repository
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]})
    )
    with pytest.raises(TrimtabError, match=r"holds an adapter_model\.safetensors"):
        _adapted(load(tiny_llama), adapter)
    assert not asked


# Secrets

PLANTED = "s3cr3t-p1anted-Zq9"
DATA = f"{PLANTED}.txt"


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["train.py", "--api-key", PLANTED, "--lr", "0.1"], ["train.py", "--api-key", "***", "--lr", "0.1"]),
        (["x", f"--wandb_api_key={PLANTED}"], ["x", "--wandb_api_key=***"]),
        (["x", "--set", f"token={PLANTED}"], ["x", "--set", "token=***"]),
        (["x", f"https://me:{PLANTED}@host.example/a.git"], ["x", "https://***@host.example/a.git"]),
        (["x", f"https://hooks.slack.com/services/T0/B0/{PLANTED}"], ["x", "https://hooks.slack.com/***"]),
        (["x", f"https://discord.com/api/webhooks/1/{PLANTED}"], ["x", "https://discord.com/api/webhooks/***"]),
        (
            ["x", f"https://h.example/?page=2&access_token={PLANTED}"],
            ["x", "https://h.example/?page=2&access_token=***"],
        ),
        (["x", "hf_" + "a1B2" * 8], ["x", "***"]),
        (["x", "sk-proj-" + "a1B2" * 8], ["x", "***"]),
        (["x", "ghp_" + "a1B2" * 9], ["x", "***"]),
        (["x", "AKIA" + "ABCD" * 4], ["x", "***"]),
        (["--token"], ["--token"]),
        (["--token", ""], ["--token", ""]),
    ],
)
def test_secrets_of_a_command_are_hidden(words: list[str], kept: list[str]) -> None:
    assert secrets.without_secrets(words) == kept


def test_what_is_no_secret_stays_as_it_is() -> None:
    plain = {
        "eos_token": "<|end|>",
        "tokens": 1000,
        "sort_key": "name",
        "num_key_value_heads": 4,
        "tokenizer": "/data/sk-models/tokenizer.json",
        "data": "https://host.example/corpus.txt?part=2",
        "faults": ["blocks.1.mlp.up:grad_scale:start=3,width=2"],
        "secret": None,
        "password": False,
        "policy": {"alpha": 1.1, "rebase_at": (1, 2)},
    }
    assert secrets.without_secrets(plain) == plain
    words = ["trimtab", "train", "--set", "policy.alpha=2", "--set", "data=/x/y", "--out", "runs/a"]
    assert secrets.without_secrets(words) == words


def test_values_of_the_environments_secrets_are_hidden_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", PLANTED)
    monkeypatch.setenv("OTHER_KEY", "abc")  # too short to look for
    monkeypatch.setenv("SSH_KEY", "/home/somebody/.ssh/id")  # a path is none
    found = secrets.without_secrets({"note": f"with {PLANTED} inside", "list": [("abc", "/home/somebody/.ssh/id")]})
    assert found == {"note": "with *** inside", "list": [("abc", "/home/somebody/.ssh/id")]}


def holding(folder: Path, secret: str) -> list[str]:
    """The files below a folder that hold a secret, in their bytes or in the parts of an archive."""

    def contents(path: Path) -> bytes:
        data = path.read_bytes()
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as parts:
                data += b"".join(parts.read(name) for name in parts.namelist())
        return data

    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path.relative_to(folder)) for path in files if secret.encode() in contents(path)]


WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


@pytest.fixture(name="called")
def _called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command line in this process, with secrets in the environment and in the remote of its repository."""
    from trimtab.cli.main import main

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    remote = f"https://me:{PLANTED}@host.example/a.git"
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", remote], check=True)
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SLACK_WEBHOOK_URL", "DB_PASSWORD"):
        monkeypatch.setenv(name, PLANTED)
    (tmp_path / DATA).write_text(" ".join(random.Random(0).choices(WORDS, k=1200)), encoding="utf-8")

    def call(*args: object) -> None:
        monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, args)])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code in (0, None), capsys.readouterr().err

    return call


def sets(*pairs: str) -> list[str]:
    return [part for pair in pairs for part in ("--set", pair)]


def test_no_secret_of_the_machine_gets_into_a_run_or_what_is_made_of_it(called: Any, tmp_path: Path) -> None:
    """A path is the one setting of a run that takes any text, so the secret is put there."""
    pairs = ("device=cpu", "steps=4", "batch=2", "seq=16", "eval_batches=1", "policy.warmup_steps=1")
    called("train", *sets(f"data={DATA}", *pairs), "--out", "runs/a")
    called("report", "runs/a", "--md")
    called("postmortem", "runs/a", "--md")
    called("doctor", "runs/a")
    called("replay", "runs/a")
    info = json.loads((tmp_path / "runs/a/run.json").read_text(encoding="utf-8"))
    assert info["config"]["data"] == "***.txt"
    assert "data=***.txt" in info["command"]
    assert len(list((tmp_path / "runs/a").rglob("*.*"))) >= 6
    assert not holding(tmp_path / "runs", PLANTED)
    assert holding(tmp_path / ".git", PLANTED), "nothing was planted"


def test_no_secret_gets_into_a_bench(called: Any, tmp_path: Path) -> None:
    fault = "blocks.1.mlp.up:grad_scale:start=3,width=2,size=64"
    small = sets(f"data={DATA}", "steps=4", "batch=2", "seq=16", "eval_batches=1", f"faults={fault}")
    called("bench", "smoke", "--seeds", 1, "--arms", "low", "--out", "runs/bench", "--device", "cpu", *small)
    assert "data=***.txt" in json.loads((tmp_path / "runs/bench/bench.json").read_text(encoding="utf-8"))["command"]
    assert not holding(tmp_path / "runs", PLANTED)


def test_no_secret_gets_into_a_model_that_is_tuned_or_packed(called: Any, tmp_path: Path, tiny_llama: Path) -> None:
    pytest.importorskip("peft")
    lines = [{"question": f"{a} plus {b}?", "answer": f"It is {a + b}."} for a in range(4) for b in range(4)]
    sums = tmp_path / f"{PLANTED}.jsonl"
    sums.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    small = sets("device=cpu", "steps=2", "batch=2", "seq=32", "eval_batches=1", "policy.warmup_steps=1")
    called("finetune", tiny_llama, sums, "--out", "runs/tuned", *small)
    quick = ("--device", "cpu", "--sequences", 2, "--length", 16, "--epochs", 1, "--rank", 2, "--group", 16)
    called("quantize", tiny_llama, "--data", DATA, "--out", "runs/packed", "--eval-tokens", 64, *quick)
    assert not holding(tmp_path / "runs", PLANTED)


def test_a_folder_of_a_run_says_nothing_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSUSPICIOUS", PLANTED)
    trace_of(tmp_path / "run")
    assert not holding(tmp_path / "run", PLANTED)
    assert not holding(tmp_path / "run", os.uname().nodename)
