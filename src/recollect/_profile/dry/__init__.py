"""The dry half: a step on fake tensors, with the kernels, workspaces and times of a device that is not here."""
