"""What CUDA's capture errors mean, and what to do about each."""

import re
from dataclasses import dataclass

from graphfsdp.errors import HazardKind


@dataclass(frozen=True)
class CudaCaptureError:
    """One error code of CUDA's stream capture.

    Attributes:
        code: Number in CUDA's driver_types.h.
        text: Part of what cudaGetErrorString says, for builds that print no code.
    """

    code: int
    name: str
    text: str
    meaning: str
    remedy: str
    kind: HazardKind

    def __str__(self) -> str:
        return f"CUDA error {self.code} ({self.name}): {self.meaning}. Remedy: {self.remedy}"


_FIRST_LAUNCH = (
    "a kernel was loaded, which waits for the device: one of Triton's, or one that torch compiles "
    "when it is first used, was launched for the first time",
    "launch it once before the capture, with the same dtypes and shapes: more warmup_steps if a "
    "later iteration takes another way, or one call of it by hand",
    HazardKind.SYNCHRONIZE,
)
_ERRORS = (
    CudaCaptureError(
        900,
        "cudaErrorStreamCaptureUnsupported",
        "Triton Error [CUDA]: operation not permitted when stream is capturing",
        *_FIRST_LAUNCH,
    ),
    CudaCaptureError(
        900,
        "cudaErrorStreamCaptureUnsupported",
        "CUDA driver error: operation not permitted when stream is capturing",
        *_FIRST_LAUNCH,
    ),
    CudaCaptureError(
        900,
        "cudaErrorStreamCaptureUnsupported",
        "not permitted when stream is capturing",
        "an operation that is not permitted while a stream is capturing, mostly a host read "
        "(.item(), bool(tensor)), a copy between pageable host memory and the device "
        "(torch.tensor(x, device='cuda')), or a synchronize",
        "keep the value on the device, or make the tensor before the iteration",
        HazardKind.HOST_READ,
    ),
    # Torch's own refusals, before it asks the driver.
    CudaCaptureError(
        900,
        "cudaErrorStreamCaptureUnsupported",
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture",
        "a copy between pageable host memory and the device (torch.tensor(x, device='cuda'), "
        ".cuda(), .cpu())",
        "keep the value on the device, make the tensor before the iteration, or pin its memory",
        HazardKind.HOST_READ,
    ),
    CudaCaptureError(  # before torch 2.14, which knows every generator that is drawn from
        900,
        "cudaErrorStreamCaptureUnsupported",
        "Attempt to increase offset for a CUDA generator not in capture mode",
        "a draw from a generator that the capture does not know: one that is neither the default "
        "one nor an attribute of a module",
        "make the generator an attribute of the module that draws from it, before capture",
        HazardKind.GENERATOR,
    ),
    CudaCaptureError(
        901,
        "cudaErrorStreamCaptureInvalidated",
        "due to a previous error during capture",
        "the capture was invalidated by an earlier error, by a call on another thread that waits "
        "for the device (torch.cuda.synchronize), or by running out of memory",
        "look at the first error; wait on other threads for an event or a stream of their own "
        "(stream.synchronize()); check that the model fits with warmup_steps done",
        HazardKind.EXCEPTION,
    ),
    CudaCaptureError(
        902,
        "cudaErrorStreamCaptureMerge",
        "merge of two independent capture",
        "two independent captures would be merged",
        "capture one step at a time, and do not wait on events of another capture",
        HazardKind.STREAM,
    ),
    CudaCaptureError(
        903,
        "cudaErrorStreamCaptureUnmatched",
        "capture was not initiated in this stream",
        "the capture was not initiated in this stream",
        "do not change the current stream inside the iteration without changing it back",
        HazardKind.STREAM,
    ),
    CudaCaptureError(
        904,
        "cudaErrorStreamCaptureUnjoined",
        "unjoined work",
        "a stream that was forked from the capture was not joined to it",
        "end each use of a side stream with current_stream().wait_stream(side_stream)",
        HazardKind.STREAM,
    ),
    CudaCaptureError(
        905,
        "cudaErrorStreamCaptureIsolation",
        "dependency created on uncaptured work",
        "a dependency crosses the border of the capture: an event from before it was waited on",
        "record and wait on events inside one iteration only; start collectives inside it",
        HazardKind.STREAM,
    ),
    CudaCaptureError(
        906,
        "cudaErrorStreamCaptureImplicit",
        "implicit dependency",
        "a disallowed dependency on the legacy default stream, mostly an autograd node that was "
        "made on the default stream",
        "delete losses and outputs of forward passes that ran before graphfsdp.capture",
        HazardKind.STREAM,
    ),
    CudaCaptureError(  # torch's own refusal
        906,
        "cudaErrorStreamCaptureImplicit",
        "has a stale reference to the default stream",
        "an autograd node was made on the default stream, and something still holds it",
        "delete losses and outputs of forward passes that ran before graphfsdp.capture",
        HazardKind.STREAM,
    ),
    CudaCaptureError(
        907,
        "cudaErrorCapturedEvent",
        "operation not permitted on an event last recorded in a capturing stream",
        "an event that was last recorded in a capturing stream was queried",
        "do not time or query events inside the iteration",
        HazardKind.SYNCHRONIZE,
    ),
    CudaCaptureError(
        908,
        "cudaErrorStreamCaptureWrongThread",
        "attempted to terminate a thread-local capture sequence from another thread",
        "the capture was ended from another thread",
        "call the captured step from one thread only",
        HazardKind.THREAD,
    ),
)


def find_capture_error(text: str) -> CudaCaptureError | None:
    match = re.search(r"CUDA error:? \(?(90[0-8])\b", text)
    found = [error for error in _ERRORS if error.text in text]
    found += [error for error in _ERRORS if error.name in text]
    found += [error for error in _ERRORS if match and error.code == int(match[1])]
    return found[0] if found else None


def explain(error: BaseException) -> CudaCaptureError | None:
    """Return the first capture error in a chain of exceptions.

    Ending a broken capture raises again (901), with the cause as its context; the innermost
    one is what happened.
    """
    found = None
    link: BaseException | None = error
    links: list[BaseException] = []
    # A refusal that the model has turned into another error is the cause and the end of it.
    while link is not None and not any(link is each for each in links):
        links.append(link)
        found = find_capture_error(str(link)) or found
        link = link.__cause__ or link.__context__
    return found
