"""Corpora and batches."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from graphfsdp.errors import ConfigError
from graphfsdp.training.data import BatchSampler, Corpus, load_corpus


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def counting_corpus(num_tokens: int) -> Corpus:
    """Each token is its own position, so that a batch tells where it was cut."""
    tokens = np.arange(num_tokens, dtype=np.uint16)
    border = num_tokens * 9 // 10
    return Corpus("counting", tokens[:border], tokens[border:], num_tokens, 1.0, is_bytes=False)


def make_sampler(device: torch.device, *, seed: int = 1, seq_length: int = 8) -> BatchSampler:
    corpus = counting_corpus(1000)
    return BatchSampler(corpus, seq_length=seq_length, batch_size=5, seed=seed, device=device)


def test_text_is_read_as_bytes_and_its_end_held_out(tmp_path: Path) -> None:
    text = bytes(range(200)) * 5
    corpus = load_corpus(write(tmp_path / "text", text))
    assert corpus.train.tobytes() == text[:950]
    assert corpus.validation.tobytes() == text[950:]
    assert corpus.vocab_size == 256
    assert corpus.is_bytes
    assert math.isclose(corpus.unigram_entropy, math.log(200))


def test_unigram_entropy_weighs_tokens_by_frequency(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "text", b"aaab" * 10))
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert math.isclose(corpus.unigram_entropy, expected)


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


def test_a_token_file_is_mapped_and_its_vocabulary_counted(tmp_path: Path) -> None:
    tokens = np.array([0, 7, 50256, 3] * 100, dtype="<u2")
    corpus = load_corpus(write(tmp_path / "tokens.bin", tokens.tobytes()))
    assert isinstance(corpus.train, np.memmap)
    assert corpus.vocab_size == 50257
    assert not corpus.is_bytes
    assert np.array_equal(np.concatenate([corpus.train, corpus.validation]), tokens)


def test_the_default_corpus_is_python_source_without_tests_and_packages() -> None:
    corpus = load_corpus(None)
    text = corpus.train.tobytes()
    assert b"class JSONDecoder" in text
    assert b"class TestCase" in text  # unittest is part of the library, its tests are not
    assert len(text) > 5_000_000
    assert 3.0 < corpus.unigram_entropy < 3.5
    assert load_corpus(None).train.tobytes() == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "holds no text"),
        ("empty.bin", b"", "0 bytes"),
        ("odd.bin", b"123", "3 bytes"),
        ("folder/file.dat", b"\0", "holds no text file"),
    ],
)
def test_data_without_tokens_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=f"^--data .*{message}"):
        load_corpus(str(Path(path).parent) if "folder" in name else path)


def test_data_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data .*No such file"):
        load_corpus(str(tmp_path / "absent.txt"))


def test_targets_are_the_tokens_one_later(device: torch.device) -> None:
    tokens, targets = make_sampler(device).training_batch(0)
    assert tokens.shape == targets.shape == (5, 8)
    assert tokens.dtype == torch.int64
    assert tokens.device.type == device.type
    assert torch.equal(targets, tokens + 1)
    assert tokens.is_contiguous()
    assert targets.is_contiguous()


def test_a_batch_depends_on_seed_and_step_alone(device: torch.device) -> None:
    sampler = make_sampler(device)
    first = sampler.training_batch(3)[0]
    torch.manual_seed(99)
    np.random.seed(99)
    sampler.training_batch(4)
    assert torch.equal(sampler.training_batch(3)[0], first)
    assert torch.equal(make_sampler(device).training_batch(3)[0], first)
    assert not torch.equal(sampler.training_batch(4)[0], first)
    assert not torch.equal(make_sampler(device, seed=2).training_batch(3)[0], first)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_share_the_batch_of_one_process(num_ranks: int, device: torch.device) -> None:
    def batch(rank: int, num_ranks: int) -> torch.Tensor:
        sampler = BatchSampler(
            counting_corpus(1000), seq_length=8, batch_size=6, seed=1, device=device,
            rank=rank, num_ranks=num_ranks,
        )  # fmt: skip
        return torch.stack(sampler.training_batch(3))

    parts = [batch(rank, num_ranks) for rank in range(num_ranks)]
    assert parts[0].shape == (2, 6 // num_ranks, 8)
    assert torch.equal(torch.cat(parts, dim=1), batch(0, 1))


def test_batches_draw_nothing_from_torch(device: torch.device) -> None:
    before = torch.get_rng_state()
    sampler = make_sampler(device)
    sampler.training_batch(0)
    list(sampler.validation_batches(2, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_training_reaches_every_training_token_and_no_other(device: torch.device) -> None:
    sampler = make_sampler(device)
    seen = torch.cat([torch.cat(sampler.training_batch(step)).flatten() for step in range(2000)])
    assert torch.equal(seen.unique().cpu(), torch.arange(900))


def test_validation_windows_are_fixed_and_held_out(device: torch.device) -> None:
    sampler = make_sampler(device)
    batches = list(sampler.validation_batches(3, 4))
    assert [tuple(tokens.shape) for tokens, _ in batches] == [(4, 8)] * 3
    everything = torch.stack([torch.stack(batch) for batch in batches])
    assert everything.min() == 900
    assert everything.max() == 999
    again = torch.stack([torch.stack(batch) for batch in sampler.validation_batches(3, 4)])
    assert torch.equal(again, everything)
    chosen = torch.stack([torch.stack(b) for b in sampler.validation_batches(3, 4, [2, 0, 2])])
    assert torch.equal(chosen, everything[[2, 0, 2]])


@pytest.mark.parametrize(("seq_length", "part"), [(100, "held-out"), (900, "training")])
def test_a_sequence_longer_than_a_part_is_refused(
    seq_length: int, part: str, device: torch.device
) -> None:
    with pytest.raises(ConfigError, match=f"--seq-length {seq_length} needs .*{part} part"):
        make_sampler(device, seq_length=seq_length)


def test_the_longest_possible_sequence_works(device: torch.device) -> None:
    sampler = make_sampler(device, seq_length=99)
    (tokens, _), *_ = sampler.validation_batches(1, 1)
    assert tokens[0, 0] == 900
    sampler.training_batch(0)


def test_a_prompt_starts_with_a_line(tmp_path: Path, device: torch.device) -> None:
    text = b"x" * 950 + b"\n  indented\ndef function(): pass\n"
    corpus = load_corpus(write(tmp_path / "text", text + b" " * (1000 - len(text))))
    sampler = BatchSampler(corpus, seq_length=8, batch_size=1, seed=0, device=device)
    assert bytes(sampler.prompt(12)[0].tolist()) == b"def function"
