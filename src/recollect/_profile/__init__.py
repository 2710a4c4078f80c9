"""What a step does, on the device or on fake tensors: the bytes it holds, its operators, their places and times."""
