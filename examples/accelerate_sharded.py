"""A Transformers model that Accelerate shards with FSDP2, with its layers recomputed.

    torchrun --nproc-per-node 2 examples/accelerate_sharded.py
    torchrun --nproc-per-node 8 examples/accelerate_sharded.py --layers 32 --dim 4096 --length 4096 --policy selective

On GPUs it uses NCCL. On the CPU it uses gloo, and Accelerate copies the model (DDP) instead of sharding it.
`accelerate launch` works in place of `torchrun`.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

import recollect

VOCABULARY = 256


def make_model(layers: int, dim: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=dim,
        intermediate_size=4 * dim,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config).train()


def train(args: argparse.Namespace) -> list[float]:
    """Train for some steps; gives the losses, which are the same with regions and without."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    model = make_model(args.layers, args.dim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if args.policy != "none":
        handle = recollect.apply(model, policy=args.policy)
        accelerator.print(handle)

    torch.manual_seed(1 + accelerator.process_index)
    steps = torch.arange(args.length, device=accelerator.device)
    losses = []
    for step in range(args.steps):
        start = torch.randint(VOCABULARY, (args.batch_size, 1), device=accelerator.device)
        tokens = (start + steps) % VOCABULARY
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


def parse(options: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="full", help="full, selective, or none")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args(options)


if __name__ == "__main__":
    train(parse())
    distributed.destroy_process_group()
