"""The stream that computes on this thread, asked for each saved tensor.

Private names: ``torch._C._cuda_getCurrentRawStream``, ``torch._C._cuda_isCurrentStreamCapturing``.
Would be replaced by: `torch.accelerator.current_stream` giving the same object each time, and quickly.
Run on: torch 2.11, 2.13 (CPU builds; on CUDA by the tests marked ``gpu``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def stream_reader(device: torch.device) -> Callable[[], torch.Stream]:
    """Something that gives the stream that computes on a device for the thread that asks.

    On CUDA streams are told apart by their raw handles, so that the object is made once for each: streams of torch live
    as long as the process, and one with the same handle is the same stream. Elsewhere torch is asked each time.
    """
    current = torch.accelerator.current_stream
    read_raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if device.type != "cuda" or read_raw is None:
        return lambda: current(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    known: dict[int, torch.Stream] = {}

    def read() -> torch.Stream:
        handle = read_raw(index)
        stream = known.get(handle)
        if stream is None:
            stream = known[handle] = current(device)
        return stream

    return read


is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Whether this thread's stream is being captured into a CUDA graph. To be asked on CUDA only."""
