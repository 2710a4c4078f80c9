"""Refuses a device that is not here, before anything is built for it."""

import argparse

import torch


def refuse_missing(parser: argparse.ArgumentParser, device: str) -> None:
    """End with a line about it instead of torch's traceback."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch finds no CUDA device on this machine")
