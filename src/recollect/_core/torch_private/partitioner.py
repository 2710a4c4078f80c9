"""The notes on nodes by which torch's partitioner is told what to do, and ours.

``CheckpointPolicy`` is torch's own object in all of this library, because the partitioner compares with it and users'
policies return it.
Run on: torch 2.11, 2.13.
"""

from torch.utils.checkpoint import CheckpointPolicy

BLOCKS, VALUES = "recollect_blocks", "recollect_values"
"""Where a node carries the names of the blocks around it, outermost first, and of the value that it gives."""

DECISION, REGION = "recollect_decision", "recollect_region"
"""Where it carries our decision in a word, for passes that come after, and the region that it belongs to."""

GIVEN = "recollect_given"
"""Where it says that a region takes its value from outside of any."""

EXPORTED = "recollect"
"""Where its annotations, which survive `torch.export.save`, say the same of a node in an exported program."""

__all__ = ["BLOCKS", "DECISION", "EXPORTED", "GIVEN", "REGION", "VALUES", "CheckpointPolicy"]
