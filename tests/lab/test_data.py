# SPDX-License-Identifier: Apache-2.0
"""Corpora and the sampler: what is read, what is held out, and that a batch is a function of (seed, step)."""

import hashlib
import json
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import MissingExtraError, TrimtabError
from trimtab.lab.data import CHUNK, Corpus, Sampler, eval_batches, load_corpus, split


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus()


def _text(path: Path, size: int = 4000) -> Path:
    path.write_bytes(bytes(97 + i % 26 for i in range(size)))
    return path


def _all_bytes(corpus: Corpus) -> bytes:
    return corpus.train.tobytes() + corpus.held_out.tobytes()


# The default corpus


def test_the_default_corpus_is_the_standard_library(stdlib: Corpus) -> None:
    assert stdlib.num_bytes > 8e6
    assert stdlib.vocab_size == 256
    assert stdlib.train.dtype == np.uint8
    assert len(stdlib.train) + len(stdlib.held_out) == stdlib.num_bytes
    assert len(stdlib.held_out) == pytest.approx(0.05 * stdlib.num_bytes, rel=0.1)
    assert b"class ArgumentParser" in _all_bytes(stdlib)


def test_the_standard_library_is_read_in_order_and_without_its_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.py", "a/z.py", "a.py", "a/tests/t.py", "test/t.py", "idlelib/idle_test/t.py", "readme.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name * 5)
    for name in ("site-packages/p.py", "__pycache__/c.py", ".venv/v.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    raw = "\n\n".join(name * 5 for name in ("a.py", "a/z.py", "b.py")).encode()
    assert load_corpus().sha256 == hashlib.sha256(raw).hexdigest()


def test_the_default_corpus_needs_the_interpreter_alone(
    stdlib: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.chdir(tmp_path)
    start = time.perf_counter()
    again = load_corpus("stdlib")
    assert time.perf_counter() - start < 5  # 0.4 s; the limit only guards against a slow walk
    assert (again.sha256, again.name) == (stdlib.sha256, stdlib.name)
    assert np.array_equal(again.train, stdlib.train)
    assert not any(tmp_path.iterdir())


# Files, folders, lines


def test_a_text_file_is_its_bytes(tmp_path: Path) -> None:
    path = _text(tmp_path / "speech.txt")
    corpus = load_corpus(path)
    assert corpus.name == "speech.txt"
    assert corpus.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sorted(_all_bytes(corpus)) == sorted(path.read_bytes())


def test_a_folder_is_its_text_files_in_order_without_hidden_and_binary_ones(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("second " * 40)
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "deep" / "x.py").write_text("first " * 40)
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n')
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    raw = b"first " * 40 + b"\n\n" + b"second " * 40 + b"\n\n" + b"third"
    assert load_corpus(str(tmp_path)).sha256 == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"text": "a b c", "content": "no"}, "a b c"),
        ({"content": "d e f", "id": 1}, "d e f"),
        ({"question": "two and two?", "answer": "four"}, "two and two?\nfour"),
        ({"text": "caf\u00e9 \u4e2d"}, "caf\u00e9 \u4e2d"),
    ],
)
def test_each_kind_of_json_line_is_read(tmp_path: Path, entry: dict, text: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([json.dumps(entry)] * 9) + "\n\n")
    raw = "\n\n".join([text] * 9).encode()
    assert load_corpus(path).sha256 == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "label": 1}', r"line 2 of .*has 'prompt', 'label'"),
        ('{"text": 3}', r"line 2 of .*has 'text'"),
        ('{"question": "only"}', r"line 2 of .*has 'question'"),
        ("{}", r"line 2 of .*has none"),
        ('["x"]', r"line 2 of .*is a list"),
        ('{"text": ', r"must be JSON, line 2 of"),
    ],
)
def test_a_bad_json_line_is_named_with_its_keys(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(TrimtabError, match=message):
        load_corpus(path)


def test_input_that_is_no_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=r"existing file or folder.*nowhere"):
        load_corpus(tmp_path / "nowhere")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(TrimtabError, match=r"must not be empty.*empty\.txt"):
        load_corpus(tmp_path / "empty.txt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.bin").write_bytes(b"\0\1")
    with pytest.raises(TrimtabError, match="must not be empty"):
        load_corpus(tmp_path / "folder")
    with pytest.raises(TrimtabError, match=r"must be UTF-8 text.*x\.bin"):
        load_corpus(tmp_path / "folder" / "x.bin")
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(TrimtabError, match=r"at least 20 tokens.*short\.txt has 9"):
        load_corpus(tmp_path / "short.txt")
    for holdout in (0.0, 0.6, -1.0, float("nan")):
        with pytest.raises(TrimtabError, match="holdout must be a share"):
            load_corpus(_text(tmp_path / "fine.txt"), holdout=holdout)


# Tokenizers


def _save_tokenizer(path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["[UNK]", "red", "green", "blue", "red green"])}
    words["blue"] = 300  # ids may have holes
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_sets_tokens_and_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "colours.txt"
    path.write_text("red green blue\n" * 20_000)  # long enough to be cut into pieces
    corpus = load_corpus(path, tokenizer=_save_tokenizer(tmp_path / "tokenizer.json"))
    assert corpus.vocab_size == 301
    assert corpus.train.dtype == np.uint16
    assert len(corpus.train) + len(corpus.held_out) == 60_000
    assert set(np.unique(corpus.train)) == {1, 2, 300}
    assert corpus.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_tokenizer_that_cannot_be_used_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = _text(tmp_path / "a.txt")
    with pytest.raises(TrimtabError, match=r"tokenizer must be a JSON file.*a\.txt"):
        load_corpus(text, tokenizer=text)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[tokenizers\]'"):
        load_corpus(text, tokenizer="tokenizer.json")


# The held-out part


@given(num=st.integers(20, 5000), every=st.integers(2, 20))
def test_each_token_is_trained_on_or_held_out_and_never_both(num: int, every: int) -> None:
    train, held_out = split(np.arange(num), every=every)
    assert sorted([*train, *held_out]) == list(range(num))
    assert 0 < len(held_out) <= len(train) + 1
    assert len(held_out) == pytest.approx(num / every, rel=0.7, abs=2)


def test_the_held_out_part_is_spread_over_the_corpus() -> None:
    _, held_out = split(np.arange(CHUNK * 60 + 17), every=20)
    expected = [np.arange(start * CHUNK, (start + 1) * CHUNK) for start in (10, 30, 50)]
    assert np.array_equal(held_out, np.concatenate(expected))


def test_no_training_batch_contains_a_held_out_token() -> None:
    train, held_out = split(np.arange(30_000), every=20)
    forbidden = set(held_out.tolist())
    sampler = Sampler(train, batch=64, seq=32, seed=1)
    for step in range(30):
        inputs, targets = sampler.batch_at(step)
        assert forbidden.isdisjoint(inputs.flatten().tolist())
        assert forbidden.isdisjoint(targets.flatten().tolist())


# The sampler


def _philox(key: tuple[int, int], counter: list[int], num: int) -> list[int]:
    """Philox4x64-10 as Salmon et al. (2011) define it; numpy raises the counter before each block."""
    mask, words = 2**64 - 1, []
    while len(words) < num:
        value = sum(word << 64 * i for i, word in enumerate(counter)) + 1
        counter = [value >> 64 * i & mask for i in range(4)]
        (k0, k1), (x0, x1, x2, x3) = key, counter
        for _ in range(10):
            low, high = 0xD2E7470EE14C6C93 * x0, 0xCA5A826395121157 * x2
            x0, x1, x2, x3 = (high >> 64) ^ x1 ^ k0, high & mask, (low >> 64) ^ x3 ^ k1, low & mask
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
        words += [x0, x1, x2, x3]
    return words[:num]


@pytest.mark.parametrize(("seed", "step", "micro"), [(0, 0, 0), (0, 1, 0), (7, 123_456, 3), (2**64 - 1, 2**40, 1)])
def test_offsets_follow_the_published_generator(seed: int, step: int, micro: int) -> None:
    tokens = np.arange(50_021)
    words = _philox((seed, 0), [0, 0, micro, step], 10)
    expected = [word % (50_021 - 16) for word in words]
    inputs, targets = Sampler(tokens, batch=10, seq=16, seed=seed).batch_at(step, micro)
    assert inputs[:, 0].tolist() == expected
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(16))
    assert torch.equal(targets, inputs + 1)


@given(
    num=st.integers(2, 60),
    batch=st.integers(1, 5),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**40),
    data=st.data(),
)
def test_a_batch_is_a_function_of_seed_and_step(
    num: int, batch: int, seed: int, step: int, data: st.DataObject
) -> None:
    seq = data.draw(st.integers(1, num - 1))
    tokens = np.arange(num, dtype=np.uint8)
    used, fresh = (Sampler(tokens, batch=batch, seq=seq, seed=seed) for _ in range(2))
    for earlier in range(3):
        used.batch_at(earlier)
    for one, other in zip(used.batch_at(step), fresh.batch_at(step), strict=True):
        assert torch.equal(one, other)
        assert one.shape == (batch, seq)
        assert one.dtype == torch.int64
        assert one.is_contiguous()


def test_seeds_steps_and_micro_batches_differ() -> None:
    tokens = np.arange(10_000)
    batches = [
        tuple(Sampler(tokens, batch=4, seq=8, seed=seed).offsets(step, micro).tolist())
        for seed in range(3)
        for step in range(3)
        for micro in range(3)
    ]
    assert len(set(batches)) == 27


def test_every_offset_can_come_up() -> None:
    sampler = Sampler(np.arange(12), batch=50, seq=8, seed=0)
    assert set(np.concatenate([sampler.offsets(step) for step in range(4)])) == {0, 1, 2, 3}


def test_evaluation_windows_cover_the_tokens_once() -> None:
    batches = list(eval_batches(np.arange(103), batch=3, seq=10))
    assert [len(inputs) for inputs, _ in batches] == [3, 3, 3, 1]
    assert torch.cat([inputs for inputs, _ in batches]).flatten().tolist() == list(range(100))
    assert torch.cat([targets for _, targets in batches]).flatten().tolist() == list(range(1, 101))


def test_a_limit_spreads_the_evaluation_windows() -> None:
    batches = list(eval_batches(np.arange(1001), batch=2, seq=10, limit=2))
    assert [inputs[:, 0].tolist() for inputs, _ in batches] == [[0, 250], [500, 750]]


def test_windows_that_do_not_fit_are_refused() -> None:
    tokens = np.arange(8)
    with pytest.raises(TrimtabError, match=r"seq \+ 1 = 9 tokens, there are 8"):
        Sampler(tokens, batch=1, seq=8, seed=0)
    with pytest.raises(TrimtabError, match=r"seq \+ 1 = 9 tokens, there are 8"):
        eval_batches(tokens, batch=1, seq=8)
    with pytest.raises(TrimtabError, match="at least 1, got 0 and 4"):
        Sampler(tokens, batch=0, seq=4, seed=0)
    with pytest.raises(TrimtabError, match="seed must lie in"):
        Sampler(tokens, batch=1, seq=4, seed=-1)
    with pytest.raises(TrimtabError, match="must not be negative, got -1 and 0"):
        Sampler(tokens, batch=1, seq=4, seed=0).batch_at(-1)
    with pytest.raises(TrimtabError, match="limit must be at least 1"):
        eval_batches(tokens, batch=1, seq=4, limit=0)
