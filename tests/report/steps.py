"""Steps as a profiler would see them, made by hand: what reports are tried on."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from recollect._core.calls import Category, Lifetime, OpCall, Phase, Saved, Storage, Value
from recollect._core.profiles import Clock, ModuleEntry, Profile

_FLOPS_PER_S = 1e12
_BYTES_PER_S = 1e11


@dataclass
class Tensor:
    """A value, and what computes its gradient."""

    value: Value
    is_parameter: bool = False
    name: str = ""
    needs_grad: bool = True


@dataclass
class Node:
    """A forward call, and what its gradient needs."""

    call: int
    inputs: list[Tensor]
    output: Tensor
    saved: list[Tensor]


class Building:
    """A step that is written down call by call; `backward` adds the gradients of what was called."""

    def __init__(self, *, has_times: bool = True, dtype_bytes: int = 4) -> None:
        self.storages: list[Storage] = []
        self.calls: list[OpCall] = []
        self.saved: list[Saved] = []
        self.modules: list[ModuleEntry] = []
        self.parameters: list[Tensor] = []
        self.nodes: list[Node] = []
        self.has_times, self.dtype_bytes = has_times, dtype_bytes

    def module(self, path: str, kind: str) -> str:
        self.modules.append(ModuleEntry(path=path, kind=kind))
        return path

    def tensor(
        self, *shape: int, category: Category = Category.TEMPORARY, name: str = "", lifetime: Lifetime = Lifetime.VALUE
    ) -> Tensor:
        size = math.prod(shape) * self.dtype_bytes
        self.storages.append(Storage(bytes=size, category=category, name=name, lifetime=lifetime))
        value = Value(storage=len(self.storages) - 1, shape=shape, dtype="float32", bytes=size)
        return Tensor(value, is_parameter=category is Category.PARAMETER, name=name)

    def parameter(self, name: str, *shape: int) -> Tensor:
        made = self.tensor(*shape, category=Category.PARAMETER, name=name, lifetime=Lifetime.STEP)
        self.parameters.append(made)
        return made

    def given(self, name: str, *shape: int) -> Tensor:
        made = self.tensor(*shape, category=Category.INPUT, name=name, lifetime=Lifetime.STEP)
        made.needs_grad = False
        return made

    def call(
        self,
        op: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        *,
        module: str = "",
        source: str = "",
        phase: Phase = Phase.FORWARD,
        flops: int = 0,
        forward: int | None = None,
        region: str = "",
        workspace_bytes: int = 0,
    ) -> int:
        moved = sum(tensor.value.bytes for tensor in (*inputs, *outputs))
        seconds = max(flops / _FLOPS_PER_S, moved / _BYTES_PER_S) if self.has_times else None
        self.calls.append(
            OpCall(
                op=op,
                phase=phase,
                inputs=tuple(tensor.value for tensor in inputs),
                outputs=tuple(tensor.value for tensor in outputs),
                module=module,
                source=source,
                flops=flops,
                seconds=seconds,
                forward=forward,
                region=region,
                workspace_bytes=workspace_bytes,
            )
        )
        return len(self.calls) - 1

    def run(
        self,
        op: str,
        inputs: list[Tensor],
        *shape: int,
        saved: list[Tensor] | None = None,
        saves_output: bool = False,
        category: Category = Category.ACTIVATION,
        module: str = "",
        source: str = "",
        flops: int = 0,
        region: str = "",
    ) -> Tensor:
        """A forward call with one output, which is an activation if anybody saves it."""
        output = self.tensor(*shape)
        number = self.call(op, inputs, [output], module=module, source=source, flops=flops, region=region)
        kept = [*(saved or []), *([output] if saves_output else [])]
        if category is Category.LOSS_HEAD:
            self._mark(output.value.storage, category)
        self.nodes.append(Node(number, inputs, output, kept))
        if not region:
            for tensor in kept:
                self.keep(tensor, number, category)
        return output

    def keep(self, tensor: Tensor, by: int, category: Category = Category.ACTIVATION) -> None:
        index = tensor.value.storage
        if self.storages[index].category is Category.TEMPORARY:
            self._mark(index, category)
        self.saved.append(Saved(storage=index, by=by))

    def _mark(self, storage: int, category: Category) -> None:
        was = self.storages[storage]
        self.storages[storage] = Storage(bytes=was.bytes, category=category, name=was.name, lifetime=was.lifetime)

    def backward(self) -> None:
        """The gradients of all forward calls, last first; regions are run again just before their own."""
        gradients: dict[int, Tensor] = {}
        again: dict[int, Tensor] = {}
        regions: dict[str, list[Node]] = {}
        for node in self.nodes:
            regions.setdefault(self.calls[node.call].region, []).append(node)
        ran: set[str] = set()
        readers: dict[int, int] = {}
        for node in reversed(self.nodes):
            forward = self.calls[node.call]
            if forward.region and forward.region not in ran:
                ran.add(forward.region)
                self._recompute(regions[forward.region], again)
            saved = [again.get(tensor.value.storage, tensor) for tensor in node.saved]
            needs = [tensor for tensor in node.inputs if tensor.needs_grad]
            out = gradients.pop(node.output.value.storage, None)
            made = [self._gradient(tensor, node) for tensor in needs]
            number = self.call(
                f"{forward.op.removesuffix('.default')}_backward.default",
                [*saved, *([out] if out else [])],
                made,
                module=forward.module,
                source=forward.source,
                phase=Phase.BACKWARD,
                flops=2 * forward.flops,
                forward=node.call,
                region=forward.region,
            )
            readers[node.call] = number
            gradients.update((tensor.value.storage, grad) for tensor, grad in zip(needs, made, strict=True))

        self.saved = [dataclasses.replace(edge, reader=readers.get(edge.by)) for edge in self.saved]

    def _gradient(self, of: Tensor, node: Node) -> Tensor:
        shape = of.value.shape
        if of.is_parameter:
            return self.tensor(*shape, category=Category.GRADIENT, lifetime=Lifetime.RETURNED, name=of.name)
        is_head = self.storages[node.output.value.storage].category is Category.LOSS_HEAD
        return self.tensor(*shape, category=Category.LOSS_HEAD if is_head else Category.TEMPORARY)

    def _recompute(self, nodes: list[Node], again: dict[int, Tensor]) -> None:
        for node in nodes:
            forward = self.calls[node.call]
            output = self.tensor(*node.output.value.shape, category=Category.ACTIVATION)
            inputs = [again.get(tensor.value.storage, tensor) for tensor in node.inputs]
            self.call(
                forward.op,
                inputs,
                [output],
                module=forward.module,
                source=forward.source,
                phase=Phase.RECOMPUTATION,
                flops=forward.flops,
                forward=node.call,
                region=forward.region,
            )
            again[node.output.value.storage] = output

    def optimize(self) -> None:
        """One call of AdamW for each parameter, with two numbers of state for each of its own."""
        gradients = {
            storage.name: at for at, storage in enumerate(self.storages) if storage.category is Category.GRADIENT
        }
        for parameter in self.parameters:
            state = [
                self.tensor(
                    *parameter.value.shape,
                    category=Category.OPTIMIZER,
                    lifetime=Lifetime.STEP,
                    name=f"{parameter.name}.{part}",
                )
                for part in ("exp_avg", "exp_avg_sq")
            ]
            at = gradients.get(parameter.name)
            gradient = [Tensor(Value(storage=at))] if at is not None else []
            self.call(
                "aten._fused_adamw_.default",
                [parameter, *gradient, *state],
                [],
                source="train.py:12",
                phase=Phase.OPTIMIZER,
            )


def transformer_step(
    layers: int = 4,
    *,
    vocabulary: int = 1024,
    width: int = 64,
    tokens: int = 128,
    recomputes: bool = False,
    optimizer: str = "AdamW",
    has_times: bool = True,
    name: str = "GPT",
) -> Profile:
    """A GPT: embedding, alike layers of attention and MLP, a head and a loss; backward, and an optimizer's step.

    Args:
        layers: how many.
        vocabulary: how wide the logits are: with a large one the peak is in the loss head.
        width: of the residual stream.
        tokens: of the batch.
        recomputes: whether each layer is a region.
        optimizer: the name of one, or ``""`` for none.
        has_times: whether calls have times.
        name: of the model's class.
    """
    step = Building(has_times=has_times)
    step.module("", name)
    ids, targets = step.given("ids", tokens), step.given("targets", tokens)
    embed = step.module("embed", "Embedding")
    table = step.parameter("embed.weight", vocabulary, width)
    x = step.run("aten.embedding.default", [table, ids], tokens, width, saved=[ids], module=embed, source="model.py:60")
    step.module("layers", "ModuleList")
    for number in range(layers):
        x = _layer(step, x, f"layers.{number}", tokens, width, region=f"layers.{number}" if recomputes else "")
    norm = step.module("norm", "LayerNorm")
    scale = step.parameter("norm.weight", width)
    head = Category.LOSS_HEAD
    x = step.run(
        "aten.native_layer_norm.default",
        [x, scale],
        tokens,
        width,
        saved=[x],
        module=norm,
        source="model.py:64",
        category=head,
    )
    lm_head = step.module("lm_head", "Linear")
    weight = step.parameter("lm_head.weight", vocabulary, width)
    flops = 2 * tokens * width * vocabulary
    logits = step.run(
        "aten.mm.default",
        [x, weight],
        tokens,
        vocabulary,
        saved=[x, weight],
        category=head,
        module=lm_head,
        source="model.py:65",
        flops=flops,
    )
    logs = step.run(
        "aten._log_softmax.default",
        [logits],
        tokens,
        vocabulary,
        saves_output=True,
        category=head,
        source="model.py:66",
    )
    step.run(
        "aten.nll_loss_forward.default", [logs, targets], saved=[logs, targets], category=head, source="model.py:66"
    )
    step.backward()
    if optimizer:
        step.optimize()
    return Profile(
        storages=tuple(step.storages),
        calls=tuple(step.calls),
        saved=tuple(step.saved),
        modules=tuple(step.modules),
        name=name,
        device="cpu",
        clock=Clock.HOST if has_times else None,
        optimizer=optimizer,
        torch="2.13.0",
        notes=() if optimizer else ("no optimizer was given: its state is counted as 0",),
    )


def _layer(step: Building, x: Tensor, path: str, tokens: int, width: int, *, region: str) -> Tensor:
    step.module(path, "Block")
    norm, attn = step.module(f"{path}.norm", "LayerNorm"), step.module(f"{path}.attn", "Attention")
    qkv, mlp = step.module(f"{path}.attn.qkv", "Linear"), step.module(f"{path}.mlp", "MLP")
    up, act = step.module(f"{path}.mlp.up", "Linear"), step.module(f"{path}.mlp.act", "GELU")
    down = step.module(f"{path}.mlp.down", "Linear")
    if region:
        step.keep(x, len(step.calls))

    def linear(given: Tensor, name: str, out: int, source: str) -> Tensor:
        weight = step.parameter(f"{name}.weight", out, given.value.shape[1])
        flops = 2 * tokens * given.value.shape[1] * out
        saved = [given, weight]
        return step.run(
            "aten.mm.default",
            [given, weight],
            tokens,
            out,
            saved=saved,
            module=name,
            source=source,
            flops=flops,
            region=region,
        )

    scale = step.parameter(f"{norm}.weight", width)
    normed = step.run(
        "aten.native_layer_norm.default",
        [x, scale],
        tokens,
        width,
        saved=[x],
        module=norm,
        source="model.py:38",
        region=region,
    )
    packed = linear(normed, qkv, 3 * width, "model.py:21")
    mixed = step.run(
        "aten._scaled_dot_product_flash_attention.default",
        [packed],
        tokens,
        width,
        saved=[packed],
        saves_output=True,
        module=attn,
        source="model.py:24",
        flops=4 * tokens * tokens * width,
        region=region,
    )
    x = step.run("aten.add.Tensor", [x, mixed], tokens, width, module=path, source="model.py:39", region=region)
    wide = linear(x, up, 4 * width, "model.py:31")
    bent = step.run(
        "aten.gelu.default", [wide], tokens, 4 * width, saved=[wide], module=act, source="model.py:31", region=region
    )
    narrow = linear(bent, down, width, "model.py:32")
    del mlp
    return step.run("aten.add.Tensor", [x, narrow], tokens, width, module=path, source="model.py:40", region=region)
