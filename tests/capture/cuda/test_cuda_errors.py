"""What CUDA's capture errors mean, read from messages as torch writes them."""

import pytest

from graphfsdp._capture.cuda.errors import explain, find_capture_error

# cudaGetErrorString of CUDA 13.0, and the name that torch adds in newer releases.
MESSAGES = {
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: (
        "cudaErrorStreamCaptureInvalidated",
        "operation failed due to a previous error during capture",
    ),
    902: (
        "cudaErrorStreamCaptureMerge",
        "operation would result in a merge of two independent capture sequences",
    ),
    903: ("cudaErrorStreamCaptureUnmatched", "capture was not initiated in this stream"),
    904: ("cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"),
    905: (
        "cudaErrorStreamCaptureIsolation",
        "dependency created on uncaptured work in another stream",
    ),
    906: (
        "cudaErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream: "
        "disallowed implicit dependency",
    ),
    907: (
        "cudaErrorCapturedEvent",
        "operation not permitted on an event last recorded in a capturing stream",
    ),
    908: (
        "cudaErrorStreamCaptureWrongThread",
        "attempted to terminate a thread-local capture sequence from another thread",
    ),
}


@pytest.mark.parametrize("who", ["Triton Error [CUDA]", "CUDA driver error"])
def test_the_first_launch_of_a_kernel_is_told_from_a_host_read(who: str) -> None:
    error = find_capture_error(f"{who}: {MESSAGES[900][1]}")
    assert error is not None
    assert error.code == 900
    assert "launched for the first time" in str(error)
    assert "warmup_steps" in str(error)


@pytest.mark.parametrize("code", MESSAGES)
def test_every_code_is_found_by_name_by_text_and_by_number(code: int) -> None:
    name, text = MESSAGES[code]
    for message in (
        f"CUDA error: {text}\nSearch for `{name}' in https://docs.nvidia.com for details.",
        f"CUDA error: {text}",
        f"AcceleratorError: CUDA error: {name}",
        f"CUDA error {code} in a driver call",
        f"CUDA error: ({code}) something",
    ):
        found = find_capture_error(message)
        assert found is not None, message
        assert found.code == code, message
        assert found.name == name
        assert f"CUDA error {code} ({name}): " in str(found)
        assert "Remedy: " in str(found)


@pytest.mark.parametrize(
    "message",
    ["", "CUDA error: out of memory", "CUDA error 700: illegal address", "found 900 tokens"],
)
def test_other_errors_are_left_alone(message: str) -> None:
    assert explain(RuntimeError(message)) is None


def chain(*messages: str) -> RuntimeError:
    """Return the last of several errors, each raised while the one before was handled."""
    previous: RuntimeError | None = None
    for message in messages:
        error = RuntimeError(message)
        error.__context__ = previous
        previous = error
    assert previous is not None
    return previous


def of_a_cause() -> RuntimeError:
    error = RuntimeError("capture failed")
    error.__cause__ = RuntimeError("CUDA error: cudaErrorStreamCaptureUnjoined")
    error.__context__ = RuntimeError("CUDA error: cudaErrorStreamCaptureMerge")
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        # Ending a capture that an illegal call broke raises 901, which tells nobody anything.
        (chain(f"CUDA error: {MESSAGES[900][1]}", f"CUDA error: {MESSAGES[901][1]}"), 900),
        (chain("shapes differ", f"CUDA error: {MESSAGES[901][1]}", "and so on"), 901),
        (of_a_cause(), 904),
    ],
    ids=["the first one", "among other errors", "a cause before a context"],
)
def test_what_happened_is_found_in_a_chain_of_errors(error: RuntimeError, code: int) -> None:
    found = explain(error)
    assert found is not None
    assert found.code == code
