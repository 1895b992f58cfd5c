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


def make_sampler(
    device: torch.device, *, seed: int = 1, seq_length: int = 8, batch_size: int = 5, **part: int
) -> BatchSampler:
    corpus = counting_corpus(1000)
    return BatchSampler(
        corpus, seq_length=seq_length, batch_size=batch_size, seed=seed, device=device, **part
    )


def test_text_is_read_as_bytes_and_its_end_held_out(tmp_path: Path) -> None:
    text = b"aaab" * 250
    corpus = load_corpus(write(tmp_path / "text", text))
    assert corpus.train.tobytes() == text[:950]
    assert corpus.validation.tobytes() == text[950:]
    assert corpus.vocab_size == 256
    assert corpus.is_bytes
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))  # weighed by frequency
    assert math.isclose(corpus.unigram_entropy, entropy)


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
    before = torch.get_rng_state()
    sampler.training_batch(4)
    list(sampler.validation_batches(2, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(sampler.training_batch(3)[0], first)
    assert torch.equal(make_sampler(device).training_batch(3)[0], first)
    assert not torch.equal(sampler.training_batch(4)[0], first)
    assert not torch.equal(make_sampler(device, seed=2).training_batch(3)[0], first)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_share_the_batch_of_one_process(num_ranks: int, device: torch.device) -> None:
    def batch(rank: int, num_ranks: int) -> torch.Tensor:
        sampler = make_sampler(device, batch_size=6, rank=rank, num_ranks=num_ranks)
        return torch.stack(sampler.training_batch(3))

    parts = [batch(rank, num_ranks) for rank in range(num_ranks)]
    assert parts[0].shape == (2, 6 // num_ranks, 8)
    assert torch.equal(torch.cat(parts, dim=1), batch(0, 1))


def test_training_reaches_every_training_token_and_no_other(device: torch.device) -> None:
    sampler = make_sampler(device)
    seen = torch.cat([torch.cat(sampler.training_batch(step)).flatten() for step in range(2000)])
    assert torch.equal(seen.unique().cpu(), torch.arange(900))


def test_validation_windows_are_fixed_and_held_out(device: torch.device) -> None:
    sampler = make_sampler(device)

    def batches(*chosen: list[int]) -> torch.Tensor:
        return torch.stack([torch.stack(b) for b in sampler.validation_batches(3, 4, *chosen)])

    everything = batches()
    assert everything.shape == (3, 2, 4, 8)
    assert (int(everything.min()), int(everything.max())) == (900, 999)
    assert torch.equal(batches(), everything)
    assert torch.equal(batches([2, 0, 2]), everything[[2, 0, 2]])


def test_the_longest_possible_sequence_works(device: torch.device) -> None:
    sampler = make_sampler(device, seq_length=99)
    (tokens, _), *_ = sampler.validation_batches(1, 1)
    assert tokens[0, 0] == 900
    sampler.training_batch(0)
    with pytest.raises(ConfigError, match=r"--seq-length 100 needs .*held-out part"):
        make_sampler(device, seq_length=100)


def test_a_prompt_starts_with_a_line(tmp_path: Path, device: torch.device) -> None:
    text = b"x" * 950 + b"\n  indented\ndef function(): pass\n"
    corpus = load_corpus(write(tmp_path / "text", text + b" " * (1000 - len(text))))
    sampler = BatchSampler(corpus, seq_length=8, batch_size=1, seed=0, device=device)
    assert bytes(sampler.prompt(12)[0].tolist()) == b"def function"
