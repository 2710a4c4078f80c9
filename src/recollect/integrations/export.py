"""Regions in programs of `torch.export`.

An exported program keeps its regions: compiled, it recomputes like the model. `torch.export.save` writes them, and
`restore_regions` restores them after `torch.export.load`.
"""

from __future__ import annotations

from torch.export import ExportedProgram

from recollect._compile.exported import restore
from recollect._core.argument_text import describe_argument

__all__ = ["restore_regions"]


def restore_regions(program: ExportedProgram) -> list[str]:
    """Restore the regions of a loaded program, each with what its policy decided.

    They act when the program is compiled (``torch.compile(program.module())``); run uncompiled, it recomputes nothing.

    Args:
        program: the program from `torch.export.load`; it is changed in place.

    Returns:
        The names of the regions, in order; an empty list for a program exported without any.

    >>> import io, torch, recollect
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    >>> _ = recollect.apply(model, {"0": recollect.Decision.RECOMPUTE})
    >>> file = io.BytesIO()
    >>> torch.export.save(torch.export.export(model, (torch.ones(2, 4),)), file)
    >>> program = torch.export.load(file)
    >>> restore_regions(program)
    ['0']
    """
    if not isinstance(program, ExportedProgram):
        message = f"restore_regions expects a program from torch.export.load, not {describe_argument(program)}"
        raise TypeError(message)
    return restore(program.graph_module)
