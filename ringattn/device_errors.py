"""Classifies errors of a device: out of memory, or the end of its process. Plain text; no torch."""

from __future__ import annotations

# Substrings of CUDA errors after which the context is lost: only a new process helps.
_STICKY = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "hardware stack error",
    "launch timed out",
    "CUDA error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
)
# CUDA errors of one launch, after which everything else goes on: a build for other cards, a kernel too large for this.
_OF_ONE_LAUNCH = (
    "no kernel image is available",
    "invalid configuration argument",
    "invalid argument",
    "too many resources requested for launch",
)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or "OutOfMemoryError" in names
        or any(mark.lower() in text for mark in _OUT_OF_MEMORY)
    )


def is_sticky(error: BaseException) -> bool:
    """Tell whether the process cannot use its device any more."""
    text = str(error)
    return any(mark in text for mark in _STICKY) and not any(mark in text for mark in _OF_ONE_LAUNCH)
