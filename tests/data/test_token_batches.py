"""Texts and files of tokens, batches of them, and batches that a feed takes ahead."""

import contextlib
import itertools
import re
import struct
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import graphfsdp
from cuda_stand_in import library
from cuda_stand_in.orders import chosen
from forked_programs import run_source
from graphfsdp.data import (
    IGNORED_TARGET,
    Corpus,
    EpochOrder,
    Feed,
    TokenBatches,
    load_corpus,
)
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from time_limits import until


def make_batches(**options: Any) -> TokenBatches:
    """Each token is its own position, so that a batch tells where it was cut."""
    tokens = np.arange(1000, dtype=np.uint16)
    usual = {"seq_length": 8, "batch_size": 6, "seed": 1}
    return TokenBatches(Corpus("counting", tokens[:900], tokens[900:]), **{**usual, **options})


def take(batches: TokenBatches, count: int) -> torch.Tensor:
    """[count, 2, B, T]."""
    return torch.stack([torch.stack(next(batches)) for _ in range(count)])


@pytest.mark.parametrize("num_windows", [1, 2, 3, 7, 64, 65, 1000])
def test_each_epoch_visits_each_window_once_in_an_order_of_its_own(num_windows: int) -> None:
    order = EpochOrder(num_windows, seed=3)
    epochs = order(np.arange(3 * num_windows)).reshape(3, num_windows)
    assert (np.sort(epochs) == np.arange(num_windows)).all()
    if num_windows >= 64:
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert (epochs != EpochOrder(num_windows, seed=4)(np.arange(num_windows))).any()
        # As far from the order of the file as a random one: a third of the range on average.
        for epoch in epochs:
            assert np.abs(epoch - np.arange(num_windows)).mean() > num_windows / 5
            assert np.abs(np.diff(epoch)).mean() > num_windows / 5


def test_an_order_over_a_huge_corpus_takes_no_memory() -> None:
    num_windows = 2**41 + 12345
    found = EpochOrder(num_windows, seed=0)(np.arange(2**42, 2**42 + 1000))
    assert len(set(found.tolist())) == 1000
    assert 0 <= found.min() < num_windows // 10
    assert num_windows * 9 // 10 < found.max() < num_windows


def test_an_epoch_has_every_training_token_and_no_other() -> None:
    batches = make_batches(batch_size=4)  # 112 windows of 8, 900 training tokens
    seen = take(batches, 28)[:, 0].flatten()
    assert torch.equal(seen.sort().values, torch.arange(112 * 8))
    assert torch.cat(batches.batch(112)).max() < 900


def test_batches_depend_on_seed_and_position_alone() -> None:
    batches = make_batches()
    first = take(batches, 40)
    torch.manual_seed(99)
    np.random.seed(99)
    before = torch.get_rng_state()
    again = take(make_batches(), 40)
    list(batches.validation_batches(2, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(again, first)
    assert not torch.equal(take(make_batches(seed=2), 40), first)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(1, 1), (2, 1), (1, 2), (2, 3), (3, 2)])
def test_any_number_of_ranks_goes_on_with_the_same_tokens(saved_by: int, resumed_by: int) -> None:
    """In the middle of an epoch, and over the end of it: 112 windows, 6 in a batch."""
    whole = take(make_batches(), 40)
    before = [make_batches(rank=rank, num_ranks=saved_by) for rank in range(saved_by)]
    parts = [take(batches, 11) for batches in before]
    assert torch.equal(torch.cat(parts, dim=2), whole[:11])
    states = [batches.state_dict() for batches in before]
    assert states == [states[0]] * saved_by
    after = [make_batches(rank=rank, num_ranks=resumed_by) for rank in range(resumed_by)]
    for batches in after:
        batches.load_state_dict(states[0])
    parts = [take(batches, 29) for batches in after]
    assert torch.equal(torch.cat(parts, dim=2), whole[11:])


def test_validation_windows_are_fixed_and_held_out() -> None:
    batches = make_batches()

    def validation(*chosen: list[int]) -> torch.Tensor:
        return torch.stack([torch.stack(b) for b in batches.validation_batches(3, 4, *chosen)])

    everything = validation()
    assert everything.shape == (3, 2, 4, 8)
    assert (int(everything.min()), int(everything.max())) == (900, 999)
    next(batches)
    assert torch.equal(validation(), everything)
    assert torch.equal(validation([2, 0, 2]), everything[[2, 0, 2]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_length": 100}, r"--seq-length 100 needs .*held-out part"),
        ({"vocab_size": 5}, r"has tokens from \d+ to \d+, the vocabulary has 5; give a larger"),
        ({"positions": True}, r"does not say where documents end; give eod_token"),
        ({"mask_first": True}, r"does not say where documents end; give eod_token"),
    ],
)
def test_what_does_not_fit_a_corpus_is_refused(options: dict[str, Any], message: str) -> None:
    next(make_batches(vocab_size=1000))
    with pytest.raises(ConfigError, match=message):
        next(make_batches(**options))


STARTS = [0, 3, 7, 8, 450, 903, 1000]


@pytest.mark.parametrize("part", ["training", "held-out"])
def test_packed_documents_have_positions_and_no_target_in_the_next(part: str) -> None:
    """The last token before each start ends a document."""
    tokens = np.arange(1000, dtype=np.uint16)
    tokens[np.array(STARTS[1:]) - 1] = 5000
    corpus = Corpus("packed", tokens[:900], tokens[900:])
    batches = TokenBatches(
        corpus,
        seq_length=9,
        batch_size=99,
        eod_token=5000,
        positions=True,
        mask_first=True,
    )
    if part == "training":
        batch = next(batches)
    else:
        (batch,) = batches.validation_batches(1, 5)
    assert all(each.dtype == torch.int64 and each.is_contiguous() for each in batch)
    num_masked = 0
    whole = np.concatenate([corpus.train, corpus.validation])
    base = 0 if part == "training" else 900
    for tokens_of, targets_of, positions_of in zip(*(t.tolist() for t in batch), strict=True):
        place = next(n for n in range(base, 1000) if whole[n : n + 9].tolist() == tokens_of)
        for index in range(9):
            begin = max(place, max(start for start in STARTS if start <= place + index))
            assert positions_of[index] == place + index - begin
            masked = place + index + 1 in STARTS
            num_masked += masked
            expected = IGNORED_TARGET if masked else whole[place + index + 1]
            assert targets_of[index] == expected
    assert num_masked == (4 if part == "training" else 1)


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def test_text_is_read_as_bytes_in_order_of_names_and_its_end_held_out(tmp_path: Path) -> None:
    """Of a directory without binary and hidden files."""
    text = b"abcd" * 250
    corpus = load_corpus(write(tmp_path / "text", text))
    assert (corpus.train.tobytes(), corpus.validation.tobytes()) == (text[:950], text[950:])
    write(tmp_path / "b.txt", b"second")
    write(tmp_path / "a" / "x.py", b"first")
    write(tmp_path / "text", b"\0binary")
    write(tmp_path / ".git" / "config", b"hidden")
    write(tmp_path / "empty.txt", b"")
    corpus = load_corpus(str(tmp_path))
    assert corpus.train.tobytes() + corpus.validation.tobytes() == b"first\nsecond"
    assert "2 files" in corpus.name


@pytest.mark.parametrize(("name", "dtype"), [("tokens.bin", "<u2"), ("tokens.npy", "<u4")])
def test_a_token_file_is_mapped(name: str, dtype: str, tmp_path: Path) -> None:
    tokens = np.array([0, 7, np.iinfo(dtype).max, 3] * 100, dtype=dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    tokens.tofile(tmp_path / "tokens.bin")
    corpus = load_corpus(str(tmp_path / name))
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.dtype == tokens.dtype
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


class Numbers:
    """An iterator with a position, which a thread may have moved further than it seems."""

    def __init__(self, *, end: int = 10**9, fails_at: int = -1) -> None:
        self.position = 0
        self._end, self._fails_at = end, fails_at

    def __iter__(self) -> "Numbers":
        return self

    def __next__(self) -> dict[str, Any]:
        if self.position == self._end:
            raise StopIteration
        if self.position == self._fails_at:
            raise OSError("the disk is gone")
        self.position += 1
        return {"x": torch.full((3,), float(self.position)), "name": "a text"}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def values(batches: Iterator[Any], count: int) -> list[float]:
    return [float(next(batches)["x"][0]) for _ in range(count)]


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_state_is_that_of_the_batch_handed_out_last(ahead: int, device: torch.device) -> None:
    loader = Numbers()
    feed = Feed(loader, device, ahead=ahead)
    assert feed.state_dict() == {"position": 0}
    batches = iter(feed)
    batch = next(batches)
    assert batch["x"].device.type == device.type
    assert batch["name"] == "a text"
    assert values(batches, 4) == [2, 3, 4, 5]
    assert until(lambda: loader.position >= 5 + ahead, 20)
    assert feed.state_dict() == {"position": 5}
    with pytest.raises(ConfigError, match="is being iterated over"):
        feed.load_state_dict({"position": 1})
    batches.close()
    assert loader.position == 5  # what was taken ahead comes again
    assert values(iter(feed), 2) == [6, 7]
    feed.load_state_dict({"position": 40})
    assert feed.state_dict() == {"position": 40}
    assert values(iter(feed), 1) == [41]
    assert feed.waited_s > 0


def test_it_ends_and_fails_where_the_loader_does(device: torch.device) -> None:
    before = threading.active_count()
    assert [float(b["x"][0]) for b in Feed(Numbers(end=3), device)] == [1, 2, 3]
    assert list(Feed(Numbers(end=0), device)) == []
    feed = Feed(Numbers(fails_at=2), device)
    batches = iter(feed)
    assert values(batches, 2) == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert feed.state_dict() == {"position": 2}
    for _ in Feed(Numbers(), device):
        break
    assert threading.active_count() == before


def test_it_says_how_long_it_made_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one each time somebody looks, or the loop computes."""
    seconds = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr("graphfsdp.data.time", clock)
    feed = Feed(Numbers(end=6))
    for _ in feed:
        next(seconds)
    assert feed.waited_s == 6
    with pytest.raises(ConfigError, match="ahead must be at least 1, got 0"):
        Feed(Numbers(), ahead=0)


def test_an_ordinary_loader_begins_anew_each_time(device: torch.device) -> None:
    feed = Feed(DataLoader(torch.arange(6.0), batch_size=2), device)  # type: ignore[arg-type]
    assert len(feed) == 3
    for _ in range(2):
        assert [batch.tolist() for batch in feed] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("scope", ["none", "full_iteration"])
def test_a_captured_loop_trains_on_the_same_batches(scope: str, device: torch.device) -> None:
    """Several kinds of leaves, and more batches in flight than are held."""

    def train(ahead: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).to(device)
        optimizer = FusedAdam(model.parameters(), lr=0.1)
        loader = Numbers(end=12)

        def loss_fn(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            loss: torch.Tensor = (model(batch["x"]) - 1).square().mean()
            return loss

        source: Any = (
            ({"x": batch["x"].to(device), "name": batch["name"]} for batch in loader)
            if ahead is None
            else Feed(loader, device, ahead=ahead)
        )
        with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, scope=scope) as step:
            losses = [step(batch) for batch in source]
        return [*losses, *(param.detach() for param in model.parameters())]

    expected = train(None)
    assert len(expected) == 14
    for ahead in (1, 2):
        assert all(map(torch.equal, train(ahead), expected))


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_loader_may_fill_the_same_tensor_anew(
    ahead: int, is_pinned: bool, device: torch.device
) -> None:
    buffer = torch.empty(4, pin_memory=is_pinned and device.type == "cuda")
    batches = Feed((buffer.fill_(float(number)) for number in range(12)), device, ahead=ahead)
    assert [batch.tolist() for batch in batches] == [[number] * 4 for number in range(12)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdata_s_loader_resumes_in_the_middle_of_an_epoch(
    num_workers: int, device: torch.device
) -> None:
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Feed:
        generator = torch.Generator().manual_seed(7)
        options = {"batch_size": 4, "shuffle": True, "generator": generator}
        samples = torch.arange(24.0)
        return Feed(StatefulDataLoader(samples, num_workers=num_workers, **options), device)

    whole = [batch.tolist() for batch in make()]
    first = make()
    batches = iter(first)
    begun = [next(batches).tolist() for _ in range(2)]
    state = first.state_dict()
    batches.close()
    second = make()
    second.load_state_dict(state)
    assert begun + [batch.tolist() for batch in second] == whole
    assert len(whole) == 6


# In a process of its own, since the time limit of tests has the timer that is the most exact.
INTERRUPTED = """
import contextlib, random, signal, time
from graphfsdp.data import Feed

def interrupt(*_):
    raise InterruptedError

def endless():
    while True:
        time.sleep(2e-4)
        yield 1

signal.signal(signal.SIGALRM, interrupt)
for _ in range(1500):
    batches = iter(Feed(endless(), ahead=2))
    next(batches)
    with contextlib.suppress(InterruptedError):
        signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-4, 2.5e-3))
        for _ in batches:
            pass
    batches.close()  # joins the thread
"""


def test_an_interrupt_at_any_place_lets_it_end() -> None:
    """A handler that raises leaves a lock of Python's own taken, if it comes at the wrong time."""
    done = run_source(INTERRUPTED)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["cuda", None])
@pytest.mark.gpu
def test_batches_that_a_loader_makes_on_a_gpu_are_those_of_the_loop_itself(
    target: str | None,
) -> None:
    """On the device and the stream of who iterates; the loader may fill the same memory anew."""
    device = torch.cuda.device_count() - 1

    def loader() -> Iterator[Tensor]:
        batch = torch.zeros(1 << 12, device="cuda")
        for number in range(20):
            yield batch.fill_(number)

    stream = torch.cuda.Stream(device)
    # Above the stand-in nothing runs before something waits for it, as on a busy GPU.
    lazily = chosen(streams=3) if library.is_below() else contextlib.nullcontext()
    with lazily, torch.cuda.device(device), torch.cuda.stream(stream):
        sums = [batch.sum() for batch in Feed(loader(), target)]
        assert {each.device.index for each in sums} == {device}
        assert [float(each) for each in sums] == [number * 4096.0 for number in range(20)]
