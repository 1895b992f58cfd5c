"""What is trained on: texts, Python's library, files of tokens."""

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphfsdp.data import load_corpus
from graphfsdp.errors import ConfigError


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def test_text_is_read_as_bytes_and_its_end_held_out(tmp_path: Path) -> None:
    text = b"abcd" * 250
    corpus = load_corpus(write(tmp_path / "text", text))
    assert corpus.train.tobytes() == text[:950]
    assert corpus.validation.tobytes() == text[950:]


def test_a_directory_is_read_in_order_of_names_without_binary_and_hidden_files(
    tmp_path: Path,
) -> None:
    write(tmp_path / "b.txt", b"second")
    write(tmp_path / "a" / "x.py", b"first")
    write(tmp_path / "c.dat", b"\0binary")
    write(tmp_path / ".git" / "config", b"hidden")
    write(tmp_path / "empty.txt", b"")
    corpus = load_corpus(str(tmp_path))
    assert corpus.train.tobytes() + corpus.validation.tobytes() == b"first\nsecond"
    assert "2 files" in corpus.name


def test_a_token_file_is_mapped(tmp_path: Path) -> None:
    tokens = np.array([0, 7, 50256, 3] * 100, dtype="<u2")
    corpus = load_corpus(write(tmp_path / "tokens.bin", tokens.tobytes()))
    assert isinstance(corpus.train, np.memmap)
    assert np.array_equal(np.concatenate([corpus.train, corpus.validation]), tokens)


def test_the_default_corpus_is_python_source_without_tests_and_packages() -> None:
    corpus = load_corpus(None)
    text = corpus.train.tobytes()
    assert b"class JSONDecoder" in text
    assert b"class TestCase" in text  # unittest is part of the library, its tests are not
    assert len(text) > 5_000_000
    assert load_corpus(None).train.tobytes() == text


def write_megatron(prefix: Path, documents: list[list[int]], dtype: str, code: int) -> None:
    """As Megatron's _IndexWriter does: header, lengths, pointers, first sequences of documents."""
    tokens = np.array([token for document in documents for token in document], dtype=dtype)
    tokens.tofile(prefix.with_suffix(".bin"))
    lengths = np.array([len(document) for document in documents], dtype="<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * tokens.itemsize
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(lengths) + 1)
    prefix.with_suffix(".idx").write_bytes(
        header
        + lengths.tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    )


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4), ("u1", 1)])
@pytest.mark.parametrize("has_ends", [False, True])
def test_the_document_s_recipe_reads_megatron_s_files(
    has_ends: bool, dtype: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [[5, 6, 7], [8], [9, 10, 11, 12] * 9]
    ended = [[*document, 3] for document in documents]
    write_megatron(tmp_path / "data", ended if has_ends else documents, dtype, code)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    recipe = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.S) if ".idx" in block
    )
    exec(recipe.replace("50256", "3"))
    corpus = load_corpus("data.npy")
    both = np.concatenate([corpus.train, corpus.validation])
    assert both.tolist() == [token for document in ended for token in document]
    assert corpus.train.dtype == np.dtype(dtype)
    with pytest.raises(ConfigError, match=r"belongs to data.idx.*docs/data.md has the lines"):
        load_corpus("data.bin")


def test_numpy_s_files_hold_large_vocabularies(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.array([1, 128_255] * 50, dtype=np.uint32))
    corpus = load_corpus(str(tmp_path / "tokens.npy"))
    assert (int(corpus.train[1]), len(corpus.train)) == (128_255, 95)
    assert corpus.train.dtype == np.uint32


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (np.ones(4), r"holds float64 of shape \(4,\); expected tokens as integers"),
        *((text, r"is no .npy file that can be mapped") for text in (b"no", b"", b"PK\3\4 zipped")),
    ],
    ids=["floats", "text", "empty", "zip"],
)
def test_what_is_no_file_of_tokens_is_said(tokens: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    if isinstance(tokens, bytes):
        path.write_bytes(tokens)
    else:
        np.save(path, tokens)
    with pytest.raises(ConfigError, match=said):
        load_corpus(str(path))
