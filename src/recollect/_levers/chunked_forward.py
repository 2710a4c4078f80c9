"""Runs a module that handles each token on its own on a few tokens at a time, in forward and again in backward.

What it saves for backward exists for one chunk at a time, so it needs the memory of one chunk; between forward and
backward only its input is held. Gradients of its parameters are summed over chunks in float32, or float64. A module
that draws random numbers draws the same ones again, but not those that it would draw without chunks.

Not done: gradients of gradients; modules that write into their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TOKENS = -2  # the dimension that is cut: the last are a token's features


def call_in_chunks(
    own: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], tokens: Tensor, *, chunks: int
) -> Tensor:
    """What a module's own ``forward`` gives for all tokens, computed chunk by chunk.

    Args:
        own: the module's ``forward``.
        parameters: all that it uses.
        tokens: its input, ``[..., tokens, features]``.
        chunks: how many parts; fewer if there are fewer tokens.
    """
    if chunks < 2 or tokens.shape[TOKENS] < 2:  # noqa: PLR2004
        return own(tokens)
    if not torch.is_grad_enabled() or not any(one.requires_grad for one in (tokens, *parameters)):
        return torch.cat([own(part.contiguous()) for part in tokens.chunk(chunks, TOKENS)], TOKENS)
    made: Tensor = _InChunks.apply(_Job(own=own, chunks=chunks), tokens, *parameters)  # type: ignore[no-untyped-call]
    return made


@dataclass(slots=True, kw_only=True)
class _Job:
    """What is to be run, and in what surroundings.

    Attributes:
        own: the module's ``forward``.
        chunks: how many parts.
        device: whose random numbers and casts are meant.
        states: of the random generators, before the first part.
        cast: the type of autocast; None if there is none.
    """

    own: Callable[[Tensor], Tensor]
    chunks: int
    device: torch.device | None = None
    states: tuple[Tensor, ...] = ()
    cast: torch.dtype | None = None

    def remember(self, device: torch.device) -> None:
        """Note the surroundings of forward."""
        self.device = device
        self.states = (torch.get_rng_state(),)
        if device.type == "cuda":
            self.states += (torch.cuda.get_rng_state(device),)
        self.cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None

    def again(self) -> ExitStack:
        """The surroundings of forward, while the returned context is open."""
        assert self.device is not None
        with ExitStack() as stack:
            devices = [self.device] if self.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices))
            torch.set_rng_state(self.states[0])
            if devices:
                torch.cuda.set_rng_state(self.states[1], self.device)
            stack.enter_context(torch.autocast(self.device.type, self.cast, enabled=self.cast is not None))
            stack.enter_context(torch.enable_grad())
            return stack.pop_all()


class _InChunks(torch.autograd.Function):
    """The module's call as one node."""

    @staticmethod
    def forward(ctx: Any, job: _Job, tokens: Tensor, *parameters: Tensor) -> Tensor:
        job.remember(tokens.device)
        ctx.job = job
        ctx.save_for_backward(tokens, *parameters)
        made: Tensor | None = None
        start = 0
        for part in tokens.chunk(job.chunks, TOKENS):
            result = job.own(part.contiguous())
            if made is None:
                made = result.new_empty((*result.shape[:TOKENS], tokens.shape[TOKENS], result.shape[-1]))
            made.narrow(TOKENS, start, part.shape[TOKENS]).copy_(result)
            start += part.shape[TOKENS]
        assert made is not None
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        job: _Job = ctx.job
        tokens, *parameters = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        trained = [one for one, is_needed in zip(parameters, needs[1:], strict=True) if is_needed]
        sums: list[Tensor | None] = [None] * len(trained)
        tokens_grad = torch.empty_like(tokens) if needs[0] else None
        start = 0
        with job.again():
            for part in tokens.detach().chunk(job.chunks, TOKENS):
                size = part.shape[TOKENS]
                leaf = part.contiguous().requires_grad_(needs[0])
                wanted = [leaf, *trained] if needs[0] else trained
                found = list(
                    torch.autograd.grad(job.own(leaf), wanted, grad.narrow(TOKENS, start, size), allow_unused=True)
                )
                if tokens_grad is not None:
                    first = found.pop(0)
                    tokens_grad.narrow(TOKENS, start, size).copy_(first) if first is not None else None
                sums = [_add(total, one) for total, one in zip(sums, found, strict=True)]
                start += size
        totals = iter([None if one is None else one.to(of.dtype) for one, of in zip(sums, trained, strict=True)])
        return (None, tokens_grad, *(next(totals) if is_needed else None for is_needed in needs[1:]))


def _add(total: Tensor | None, one: Tensor | None) -> Tensor | None:
    """The sum of gradients, in at least float32."""
    if one is None:
        return total
    if total is None:
        wide = torch.promote_types(one.dtype, torch.float32)
        return one.to(wide)
    return total.add_(one)
