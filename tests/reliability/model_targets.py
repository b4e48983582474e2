# SPDX-License-Identifier: Apache-2.0
"""What pretrained models are made of, as targets: a folder of Transformers, an adapter of peft, a GGUF file, a packed
folder, and the results of an evaluation.

Much of the reading is done by other packages here; what they raise on a damaged file must come out as trimtab's own
errors, and what they would allocate or loop over must be held against the file before.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

from targets import Target, each, make_words

sys.path.append(str(Path(__file__).parents[1]))
import llama

TURN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
make_llama = functools.partial(llama.make_llama, layers=2, width=16, positions=64, chat=TURN)

LETTERS = "abcdefghijklmnopqrstuvwxyz .,?!0123456789+=#:\n"


def make_model(folder: Path) -> None:
    make_words(folder)
    make_llama(folder / "llama")


def read_model(folder: Path) -> None:
    """As finetune, quantize and evaluate load it, as doctor looks at it, and as diagnose does."""
    from trimtab.lab.pretrained import load, shapes
    from trimtab.lab.subject import load_subject

    place = folder / "llama"

    def diagnosed() -> None:
        load_subject(place, folder / "../words.txt", unit="block", batches=1, batch=1, seq=8)

    each(
        lambda: load(place, dtype="fp32"),
        lambda: shapes(place),
        files={f"llama/{name}": diagnosed for name in ("tokenizer.json", "model.safetensors")},
    )


def make_packed_folder(folder: Path) -> None:
    """A model as `trimtab quantize` leaves it."""
    import torch

    from trimtab.lab.pretrained import load
    from trimtab.retrain.export import save_folder
    from trimtab.retrain.settings import Settings
    from trimtab.retrain.walk import retrain_

    pretrained = load(make_llama(folder.parent / "llama"), dtype="fp32")
    sequences = torch.randint(0, 200, (2, 8))
    retrained = retrain_(pretrained.model, sequences, Settings(bits=2, group=8, rank=2, epochs=1))
    save_folder(pretrained.model, retrained, folder / "packed")


def read_packed_folder(folder: Path) -> None:
    from trimtab.retrain.export import load_folder

    load_folder(folder / "packed")


def make_adapter(folder: Path) -> None:
    """A run of `trimtab finetune`, whose model and data lie elsewhere."""
    from trimtab.lab.finetune import finetune

    llama = make_llama(folder.parent / "llama")
    sums = folder.parent / "sums.jsonl"
    sums.write_text("".join(json.dumps({"question": f"{n}+1?", "answer": f"{n + 1}."}) + "\n" for n in range(30)))
    given = {"model": str(llama), "data": str(sums), "steps": 1, "batch": 1, "seq": 16, "eval_batches": 1, "lora_r": 2}
    finetune({**given, "device": "cpu", "threads": 1, "policy": {"max_high": 1}}, folder / "run")
    for name in ("metrics.jsonl", "trace.arrow", "checkpoints/step_000001.pt"):  # nobody looks at them here
        (folder / "run" / name).unlink()


def read_adapter(folder: Path) -> None:
    """The run as `trimtab evaluate --tasks` loads it and doctor looks at it."""
    from trimtab.cli.doctor import _subject
    from trimtab.lab.downstream.arm import load_arm

    run = folder / "run"
    each(lambda: load_arm(run), files={"run/run.json": lambda: _subject(run, ())})


def make_gguf(folder: Path) -> None:
    """A Llama of one layer in the form of llama.cpp, with its tokenizer."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = ["<unk>", "<s>", "</s>", *LETTERS, "th", "he"]
    width, ffn = 32, 64
    shapes = {
        "token_embd.weight": (len(tokens), width),
        "output_norm.weight": (width,),
        "output.weight": (len(tokens), width),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.attn_q.weight": (width, width),
        "blk.0.attn_k.weight": (width, width),
        "blk.0.attn_v.weight": (width, width),
        "blk.0.attn_output.weight": (width, width),
        "blk.0.ffn_gate.weight": (ffn, width),
        "blk.0.ffn_up.weight": (ffn, width),
        "blk.0.ffn_down.weight": (width, ffn),
    }
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_name("small")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        plain = len(shape) == 1
        kind = gguf.GGMLQuantizationType.F32 if plain else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, values if plain else gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(folder: Path) -> None:
    from trimtab.lab.pretrained import load, shapes

    each(lambda: load(folder / "model.gguf"), lambda: shapes(folder / "model.gguf"))


def make_results(folder: Path) -> None:
    """The results of the commonsense tasks, finished; the model and the tasks lie elsewhere."""
    llama, tasks = make_llama(folder.parent / "llama"), folder.parent / "data" / "tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    choices = json.dumps({"query": "why", "choices": ["so", "not so"], "gold": 1}) + "\n"
    for name in ("arc_easy", "arc_challenge", "piqa", "openbook_qa"):
        (tasks / f"{name}.jsonl").write_text(choices * 2)
    ends = json.dumps({"context_options": ["a did", "b did"], "continuation": "it.", "gold": 0}) + "\n"
    (tasks / "winogrande.jsonl").write_text(ends * 2)
    evaluated(folder, llama)


def read_results(folder: Path) -> None:
    """Gone on with (nothing is left to ask), shown, and compared with."""
    from trimtab.cli.evaluate import _show, _show_differences
    from trimtab.lab.downstream import compare
    from trimtab.lab.downstream import results as rooms

    def shown() -> None:
        _show(evaluated(folder, folder.parent / "llama"), folder / "results.json")

    def compared() -> None:
        other = rooms.read_results(folder / "results.json")
        found = compare(evaluated(folder.parent / "other", folder.parent / "llama"), other)
        json.dumps([one.to_dict() for one in found], allow_nan=False)
        _show_differences(found, other)

    each(shown, compared)


def evaluated(folder: Path, llama: Path) -> Any:
    from trimtab.lab.downstream import evaluate_model

    names = ["arc_easy", "arc_challenge", "piqa", "openbookqa", "winogrande"]
    return evaluate_model(llama, names, folder.parent / "data", out=folder / "results.json", batch=2)


ASK = "--tasks commonsense --batch 2 --data {0}/../data"
TARGETS: dict[str, Target] = {
    "model": Target(
        make_model,
        read_model,
        (
            "doctor {0}/llama",
            "diagnose {0}/llama {0}/../words.txt --batches 1 --batch 1 --seq 8 --unit block --no-roles",
            "finetune {0}/llama {0}/../nothing.jsonl --out {0}/out",
        ),
        keeps=True,
    ),
    "gguf": Target(make_gguf, read_gguf, ("doctor {0}/model.gguf",), keeps=True),
    "adapter": Target(
        make_adapter,
        read_adapter,
        ("doctor {0}/run", "evaluate {0}/run --tasks gsm8k --data {0}/..", "evaluate {0}/run"),
        keeps=True,
    ),
    "quantized": Target(make_packed_folder, read_packed_folder, keeps=True),
    "results": Target(
        make_results,
        read_results,
        (
            f"evaluate {{0}}/../llama {ASK} --out {{0}}/results.json",
            f"evaluate {{0}}/../llama {ASK} --against {{0}}/results.json --json",
        ),
    ),
}
