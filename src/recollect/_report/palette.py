"""The colours of reports, and the order in which memory is stacked: one for the page, plots and pictures."""

from __future__ import annotations

from recollect._core.calls import Category, Phase

STACK = (
    Category.OTHER,
    Category.LIBRARY,
    Category.PARAMETER,
    Category.OPTIMIZER,
    Category.BUFFER,
    Category.INPUT,
    Category.GRADIENT,
    Category.ACTIVATION,
    Category.LOSS_HEAD,
    Category.OFFLOADED,
    Category.TEMPORARY,
)
"""From the ground up: what stays all the time is at the bottom, what comes and goes is at the top."""

# The light colours of `page/page.css`, which a test compares with these. They differ in lightness as well as in hue.
COLOURS = dict(
    zip(
        STACK,
        (
            "#bcc2c8",
            "#5c6570",
            "#262f4c",
            "#8293d7",
            "#a1958d",
            "#8d5b1d",
            "#296e84",
            "#d88015",
            "#75138b",
            "#3f7d20",
            "#2d90f7",
        ),
        strict=True,
    )
)
PHASES = dict(zip(Phase, ("#e3e7ec", "#cbd3dc", "#f3c98b", "#b8c2ce"), strict=True))
PAPER, INK, SOFT, FAINT, RULE, LESS, MORE = (
    "#ffffff",
    "#1b1f24",
    "#4c545e",
    "#66707b",
    "#dfe3e7",
    "#0d6b5e",
    "#a33b12",
)
