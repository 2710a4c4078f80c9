"""One function, four policies: what each keeps, and a check that the gradients are equal.

python examples/policies_side_by_side.py
"""

import torch
from torch import Tensor

import recollect
from recollect import Decision, Site, policies


def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = recollect.name(torch.nn.functional.gelu(x @ up), "hidden")
    return x + torch.nn.functional.dropout(hidden @ down, 0.1)


def keep_expensive(site: Site) -> Decision:
    return Decision.SAVE if site.flops > 1_000_000 else Decision.RECOMPUTE


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 128, requires_grad=True)
    up, down = torch.randn(128, 512, requires_grad=True), torch.randn(512, 128, requires_grad=True)
    torch.manual_seed(1)
    wanted = torch.autograd.grad(block(x, up, down).sum(), (x, up, down))
    for name, policy in {
        "full recomputation": None,
        "save_matmuls": policies.save_matmuls,
        "save_names('hidden')": policies.save_names("hidden"),
        "a function of your own": keep_expensive,
    }.items():
        region = recollect.checkpoint(block, policy=policy, name="block")
        torch.manual_seed(1)
        found = torch.autograd.grad(region(x, up, down).sum(), (x, up, down))
        equal = all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        print(f"{name}: gradients {'equal' if equal else 'DIFFER'}")
        if policy is not None:
            print(recollect.explain(region), end="\n\n")


if __name__ == "__main__":
    main()
