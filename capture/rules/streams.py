"""Feeds the book of streams from calls of torch.cuda's streams and events.

Not run on a GPU yet.
"""

from types import FrameType

import torch

from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp._capture.trace.stream_book import StreamBook
from graphfsdp.base.hazards import SourceLine


class StreamWatch:
    """The streams of one iteration on a CUDA device.

    Attributes:
        book: What is known of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.book = StreamBook(_key(torch.cuda.current_stream(device)))

    def on_op(self, op: str, module_path: str | None, source: SourceLine | None) -> None:
        """Note an operator on the current stream.

        Autograd runs the gradient of what ran on a side stream there as well; it forks and joins
        that stream by itself, below Python, so of a backward pass only the iteration's own stream
        counts. Whether a hook joins what it has forked is left to the driver.
        """
        stream = _key(torch.cuda.current_stream(self._device))
        if stream == self.book.main or torch._C._current_graph_task_id() == -1:
            self.book.use(stream, op, module_path, source)

    def on_call(self, frame: FrameType) -> Refusal | None:
        """Note a call in torch/cuda/streams.py; only Event.record and Event.wait matter.

        All other ways to order streams are made of these two.
        """
        event = frame.f_locals.get("self")
        if not isinstance(event, torch.cuda.Event):
            return None
        stream = frame.f_locals.get("stream")
        if stream is None:
            stream = torch.cuda.current_stream(self._device)
        if frame.f_code.co_name == "record":
            self.book.record(id(event), _key(stream), keep=event)
        elif frame.f_code.co_name == "wait":
            return self.book.wait(_key(stream), id(event))
        return None


def _key(stream: torch.cuda.Stream) -> int:
    return int(stream.cuda_stream)
