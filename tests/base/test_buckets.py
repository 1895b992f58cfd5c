"""Padding to buckets: what is padded never reaches the loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import graphfsdp
from graphfsdp import Buckets, masked_mean
from graphfsdp.training.gpt import GPT, GPTConfig

TEXT = """Beautiful is better than ugly.
Explicit is better than implicit.
Simple is better than complex.
Flat is better than nested.
Errors should never pass silently. Unless explicitly silenced.
Now is better than never."""


def lines() -> list[tuple[Tensor, Tensor]]:
    """Every line of the text as ids and the ids that follow."""
    ids = [torch.tensor(list(line.encode())) for line in TEXT.splitlines()]
    return [(line[:-1], line[1:]) for line in ids]


def gpt() -> GPT:
    config = GPTConfig(
        vocab_size=128,
        seq_length=64,
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        position_embedding_type="rope",
    )
    return GPT(config).double()


def test_padding_text_changes_neither_the_loss_nor_the_gradients() -> None:
    """The mean is over the tokens of all lines, whatever their lengths and the empty rows."""
    samples = lines()
    torch.manual_seed(0)
    model = gpt()
    model(*Buckets((32, 64), num_rows=8).collate(samples, (0, -100))).backward()
    got = [param.grad for param in model.parameters()]
    model.zero_grad()

    num_tokens = sum(len(targets) for _, targets in samples)
    losses = [model(ids[None], targets[None]) * len(targets) for ids, targets in samples]
    (torch.stack(losses).sum() / num_tokens).backward()
    expected = [param.grad for param in model.parameters()]
    # Sums in another order, of at most 2 ** 14 terms in float64.
    torch.testing.assert_close(got, expected, rtol=2**14 * 2.0**-53, atol=1e-13)


def test_the_shortest_bucket_that_holds_the_longest_sample_is_taken() -> None:
    ids, targets = Buckets((31, 40, 64), num_rows=4).collate(lines()[:3], (0, -100))
    assert ids.shape == targets.shape == (4, 40)  # the longest of the three has 32 ids
    short, _ = lines()[0]
    assert torch.equal(ids[0, : len(short)], short)
    assert ids[0, len(short) :].eq(0).all()
    assert targets[0, len(short) :].eq(-100).all()
    assert targets[3].eq(-100).all()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.data())
def test_collate_and_pad_agree_for_any_lengths(sizes: list[int], data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([(), (3,)]))
    samples = [{"x": torch.rand(size, *width), "mask": torch.ones(size)} for size in sizes]
    buckets = Buckets((4, 8, 20), num_rows=5)
    batch = buckets.collate(samples, {"x": -1.5, "mask": 0})
    length = buckets.length_for(max(sizes))
    assert batch["x"].shape == (5, length, *width)
    assert int(batch["mask"].sum()) == sum(sizes)
    for row, sample in enumerate(samples):
        assert torch.equal(batch["x"][row, : len(sample["x"])], sample["x"])
        assert batch["x"][row, len(sample["x"]) :].eq(-1.5).all()
    cut = {name: leaf[: len(sizes), : max(sizes)] for name, leaf in batch.items()}
    again = buckets.pad(cut, {"x": -1.5, "mask": 0})
    assert all(torch.equal(again[name], batch[name]) for name in batch)


def test_one_fill_serves_all_and_what_fits_is_not_copied() -> None:
    buckets = Buckets((4,))
    x = torch.ones(2, 4)
    assert buckets.pad([x], 0)[0] is x
    assert torch.equal(buckets.pad((x[:, :1],), 7)[0][0], torch.tensor([1.0, 7, 7, 7]))


def test_masked_mean_ignores_what_is_masked_and_stands_an_empty_mask(device: torch.device) -> None:
    values = torch.tensor([[1.0, torch.nan], [3.0, torch.inf]], device=device, requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 0]], device=device)
    mean = masked_mean(values, mask)
    mean.backward()
    assert mean.item() == 2.0
    assert values.grad is not None
    assert values.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]
    assert masked_mean(values, mask.bool() & False).item() == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buckets(()), "ascending positive"),
        (lambda: Buckets((8, 4)), "ascending positive"),
        (lambda: Buckets((4, 4)), "ascending positive"),
        (lambda: Buckets((4,), num_rows=0), "ascending positive"),
        (lambda: Buckets((4,)).length_for(5), "length 5 fits into no bucket; the longest is 4"),
        (lambda: Buckets((4,)).collate([], 0), "no sample"),
        (lambda: Buckets((4,), 1).collate([torch.ones(2)] * 2, 0), "2 rows does not fit"),
        (lambda: Buckets((4,)).collate([(torch.ones(2), torch.ones(3))], 0), "one T per sample"),
        (lambda: Buckets((4,)).pad(torch.ones(3), 0), r"\[B, T, ...\]"),
        (lambda: Buckets((4,)).pad((torch.ones(2, 3), torch.ones(1, 3)), 0), "one B and one T"),
        (lambda: Buckets((4,)).pad({"x": torch.ones(2, 3)}, {"y": 0}), "nested otherwise"),
        (lambda: Buckets((4,)).pad(["text"], 0), "needs tensors"),
    ],
)
def test_what_cannot_be_padded_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(graphfsdp.ConfigError, match=message):
        make()
