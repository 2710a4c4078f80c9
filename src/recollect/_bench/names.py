"""What can be measured, by name. No torch here: help does not wait for it."""

MODELS = ("Llama", "ResNet", "GPT", "MoE", "ViT", "U-Net")
"""In the order in which they are measured and shown: those that are to be complete first come first."""
TITLES = {"MoE": "Mixtral-like", "ResNet": "ResNet-50"}
SIZES = ("small", "large")
MODES = ("eager", "compiled")
WITH_LENGTH = ("Llama", "GPT", "MoE")
"""Those whose inputs have a length; of the others only the batch can grow."""
