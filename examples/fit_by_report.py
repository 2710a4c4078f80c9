"""From "out of memory" to a step that fits: profile, read the report, apply what it suggests, compare.

    python examples/fit_by_report.py

Writes `before.html` and `compare.html` into the current folder.
"""

import torch
from torch import nn

import recollect
from recollect import policies


def make_model(layers: int = 6, dim: int = 64) -> nn.Module:
    block = [nn.TransformerEncoderLayer(dim, 4, 4 * dim, 0.0, batch_first=True, norm_first=True) for _ in range(layers)]
    return nn.Sequential(*block)


def main() -> None:
    torch.manual_seed(0)
    model, x = make_model(), torch.randn(8, 128, 64)

    before = recollect.profile(model, x, name="plain")
    recollect.report(before, "before.html")
    print(f"plain: {before.peak_bytes / 2**20:.1f} MiB at the peak")

    policy = policies.first_match(policies.save_matmuls, policies.save_attention)
    for name, rules in {"full": "full", "keep products and attention": policy, "selective": "selective"}.items():
        with recollect.apply(model, rules):
            for _ in range(2):
                model(x).sum().backward()
                model.zero_grad()
            after = recollect.profile(model, x, name=name)
        less = 1 - after.peak_bytes / before.peak_bytes
        print(f"{name}: {after.peak_bytes / 2**20:.1f} MiB at the peak, {less:.0%} less")
        if name == "full":
            recollect.report(after, "compare.html", against=before)


if __name__ == "__main__":
    main()
