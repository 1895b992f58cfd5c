"""The table of docs/fused_adam.md."""

from benchmarks import adam_table


def test_the_document_shows_the_present_table() -> None:
    text = adam_table.DOCUMENT.read_text(encoding="utf-8")
    assert "<!-- bytes: begin -->" in text
    assert adam_table.updated(text) == text, "run: python -m benchmarks.adam_table"
