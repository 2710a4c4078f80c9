"""The report as text: what it says, in 80 columns, in a pipe, whatever the names are."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from types import FrameType
from typing import Any

import pytest
from rich.console import Console

from recollect._core.calls import Category, Lifetime, OpCall, Phase, Saved, Storage, Value
from recollect._core.decisions import Decision
from recollect._core.gains import Gain
from recollect._core.profiles import AllocatorEntry, Clock, ModuleEntry, Profile, RuleEntry
from recollect._plan.gains import find_gains
from recollect._report.summary import find_peak
from recollect._report.text import render_text, write_text
from recollect._report.verdict import judge_peak
from tests.report.steps import transformer_step

EMPTY = Profile(storages=(), calls=())
GIB = 2**30


def write(step: Profile, *, width: int = 80, **more: Any) -> str:
    return write_text(step, width=width, **more)


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each section by its title; those of the headline by ''."""
    found: dict[str, list[str]] = {}
    for number, block in enumerate(text.split("\n\n")):
        title, *lines = block.splitlines()
        found["" if not number else title.partition(":")[0]] = lines if number else [title, *lines]
    return found


def words(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


# What it says.


@pytest.mark.parametrize("category", Category)
def test_every_kind_of_memory_is_listed(category: Category) -> None:
    step = dataclasses.replace(EMPTY, storages=(Storage(bytes=GIB, lifetime=Lifetime.STEP, category=category),))
    assert f"{category.value} 1.00 GiB 100%" in words(write(step))


def test_the_whole_report_of_a_small_model() -> None:
    step = transformer_step(2, vocabulary=64, tokens=1024, optimizer="")
    assert write(step, gains=find_gains(step)) == REPORT


REPORT = """\
GPT on cpu: peak 9.21 MiB, in backward of layers.1.mlp.down
(aten.mm_backward.default, model.py:32)
step 2.42 ms, measured on the host: forward 830 µs, backward 1.59 ms
To see if it fits on a GPU, estimate it for one: recollect.profile(...,
dry=True, device="H100").

what would help, best first
  1. recompute layers.* (2 Block): peak 5.71 MiB (-38%) for 805 µs more (+33%)
       recollect.apply(model, {"layers.*": "full"})
  2. recompute layers.*.mlp (2 MLP): peak 7.21 MiB (-22%) for 176 µs more (+7%)
       recollect.apply(model, {"layers.*.mlp": "full"})

why
  81% of the peak, 7.50 MiB, is kept by forward for backward: recomputing more
  lowers it.

alive at the peak
                    bytes  share
  activations    7.50 MiB    81%  ████████████████████████
  temporaries    1.00 MiB    11%  ███
  parameters   384.75 KiB     4%  █
  loss head    256.00 KiB     3%  █
  gradients     80.25 KiB    <1%
  inputs         8.00 KiB    <1%

saved for backward: 8.25 MiB in 17 tensors, largest first
       bytes      tensor              made by
    2.00 MiB  x2  float32[1024, 256]  mm in layers.*.mlp.up, model.py:31; kept
                                      by gelu
    2.00 MiB  x2  float32[1024, 256]  gelu in layers.*.mlp.act, model.py:31;
                                      kept by mm
    1.50 MiB  x2  float32[1024, 192]  mm in layers.*.attn.qkv, model.py:21; kept
                                      by _scaled_dot_product_flash_attention
  512.00 KiB  x2  float32[1024, 64]   native_layer_norm in layers.*.norm,
                                      model.py:38; kept by mm
  512.00 KiB  x2  float32[1024, 64]   _scaled_dot_product_flash_attention in
                                      layers.*.attn, model.py:24; kept by
                                      _scaled_dot_product_flash_attention
  512.00 KiB  x2  float32[1024, 64]   add.Tensor in layers.*, model.py:39; kept
                                      by mm
  512.00 KiB  x2  float32[1024, 64]   add.Tensor in layers.*, model.py:40; kept
                                      by native_layer_norm
  256.00 KiB      float32[1024, 64]   embedding in embed, model.py:60; kept by
                                      native_layer_norm
  256.00 KiB      float32[1024, 64]   native_layer_norm in norm, model.py:64;
                                      kept by mm
  256.00 KiB      float32[1024, 64]   _log_softmax, model.py:66; kept by
                                      _log_softmax, nll_loss_forward

by module
  module                          saved  parameters  forward  backward
  (model)  GPT                 8.25 MiB  384.75 KiB   830 µs   1.59 ms
    embed  Embedding         256.00 KiB   16.00 KiB  2.83 µs   2.83 µs
    layers  ModuleList         7.50 MiB  352.50 KiB   805 µs   1.55 ms
      0 ... 1  Block     x2    7.50 MiB  352.50 KiB   805 µs   1.55 ms
        norm  LayerNorm  x2  512.00 KiB       512 B  10.5 µs   15.7 µs
        attn  Attention  x2    2.00 MiB   96.00 KiB   587 µs   1.17 ms
          qkv  Linear    x2    1.50 MiB   96.00 KiB  50.3 µs    101 µs
        mlp  MLP         x2    4.00 MiB  256.00 KiB   176 µs    331 µs
          up  Linear     x2    2.00 MiB  128.00 KiB  67.1 µs    134 µs
          act  GELU      x2    2.00 MiB         0 B  41.9 µs   62.9 µs
          down  Linear   x2         0 B  128.00 KiB  67.1 µs    134 µs
    norm  LayerNorm          256.00 KiB       256 B  5.25 µs   7.87 µs
    lm_head  Linear                 0 B   16.00 KiB  8.39 µs   16.8 µs

what recomputing would save, most first, each on its own
  recompute             frees   costs  per GiB       peak after
  layers.*       x2  7.00 MiB  805 µs   118 ms  5.71 MiB (-38%)
  layers.*.mlp   x2  4.00 MiB  176 µs  45.1 ms  7.21 MiB (-22%)
  layers.*.attn  x2  2.00 MiB  587 µs   301 ms  7.21 MiB (-22%)

by operator
  operator                    calls       saved        made     time  operations
  mm                              7    3.50 MiB    4.25 MiB   193 µs   193 MFLOP
  gelu                            2    2.00 MiB    2.00 MiB  41.9 µs           -
  add.Tensor                      4    1.00 MiB    1.00 MiB  31.5 µs           -
  native_layer_norm               3  768.00 KiB  768.00 KiB  15.7 µs           -
  _scaled_dot_product_flash_      2  512.00 KiB  512.00 KiB   537 µs   537 MFLOP
  attention
  _log_softmax                    1  256.00 KiB  256.00 KiB  5.24 µs           -
  embedding                       1  256.00 KiB  256.00 KiB  2.83 µs           -
  mm_backward                     7         0 B    3.61 MiB   386 µs   386 MFLOP
  add.Tensor_backward             4         0 B    2.00 MiB  31.5 µs           -
  gelu_backward                   2         0 B    2.00 MiB  62.9 µs           -
  _scaled_dot_product_flash_      2         0 B    1.50 MiB  1.07 ms  1.07 GFLOP
  attention_backward
  native_layer_norm_backward      3         0 B  768.75 KiB  23.6 µs           -
  _log_softmax_backward           1         0 B  256.00 KiB  7.86 µs           -
  nll_loss_forward_backward       1         0 B  256.00 KiB  5.28 µs           -
  embedding_backward              1         0 B   16.00 KiB  2.83 µs           -
  nll_loss_forward                1         0 B         4 B  2.66 µs           -

notes
  no optimizer was given: its state is counted as 0
"""


def test_the_headline_says_what_where_and_how_it_is_known() -> None:
    step = dataclasses.replace(transformer_step(2), device="NVIDIA H200", clock=Clock.ROOFLINE, is_dry=True)
    head = words(" ".join(sections(write(step))[""]))
    assert head.startswith(
        "GPT on NVIDIA H200: peak 5.03 MiB, estimated: nothing was run, in backward "
        "(aten._log_softmax_backward.default, model.py:66)"
    )
    assert re.search(r"step \S+ µs, estimated from operations and bytes moved: forward \S+ µs, backward \S+ µs,", head)
    assert "optimizer" in head


def test_identical_layers_are_one_line() -> None:
    parts = sections(write(transformer_step(32)))
    [line] = [line for line in parts["by module"] if "Block" in line]
    assert line.split()[:5] == ["0", "...", "31", "Block", "x32"]
    [line] = [line for line in parts["saved for backward"] if "gelu in" in line]
    assert line.split() == [
        "4.00",
        "MiB",
        "x32",
        "float32[128,",
        "256]",
        "gelu",
        "in",
        "layers.*.mlp.act,",
        "model.py:31;",
    ]


def test_tables_are_as_long_as_they_may_be() -> None:
    step = transformer_step(4, vocabulary=64)
    text = write(step, gains=find_gains(step), top=2)
    parts = sections(text)
    for title, more in (
        ("by operator", 15),
        ("by module", 11),
        ("what recomputing would save, most first, each on its own", 2),
    ):
        assert parts[title][-1].strip() == f"and {more} more"
        assert len(parts[title]) == 4
    assert parts["saved for backward"][-1].strip() == "and 8 more"


def test_the_largest_modules_are_those_shown_and_their_parents_are_too() -> None:
    lines = sections(write(transformer_step(4, vocabulary=64), top=4))["by module"]
    assert [line.split()[0] for line in lines[1:-1]] == ["(model)", "layers", "0", "mlp"]


def test_gains_are_by_family_and_what_gives_most_is_first() -> None:
    step = transformer_step(4, vocabulary=64)
    lines = sections(write(step, gains=find_gains(step)))["what recomputing would save, most first, each on its own"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["layers.*", "x4"],
        ["layers.*.mlp", "x4"],
        ["layers.*,", "every"],
        ["layers.*.attn", "x4"],
    ]
    assert lines[2].split()[2:4] == ["1.00", "MiB"]
    assert lines[0].split() == ["recompute", "frees", "costs", "per", "GiB", "peak", "after"]


def test_gains_without_times_are_counted_in_operations() -> None:
    step = transformer_step(2, vocabulary=64, has_times=False)
    text = write(step, gains=find_gains(step))
    assert "MFLOP" in text
    assert " µs" not in text
    assert "step " not in text


def test_a_gain_that_does_not_lower_the_peak_says_so() -> None:
    gain = Gain(path="a", kind="A", freed_bytes=5, peak_bytes=EMPTY.peak_bytes, recompute_s=1.0, recompute_flops=1)
    assert "unchanged" in write(EMPTY, gains=[gain])


def test_what_each_entry_of_a_policy_matched() -> None:
    rules = (
        RuleEntry(region="layers.0", regions=4, rule="save_matmuls", decision=Decision.SAVE, values=12, bytes=3 * GIB),
        RuleEntry(region="layers.0", regions=4, rule="no rule", decision=Decision.RECOMPUTE, values=7, bytes=GIB),
    )
    lines = sections(write(dataclasses.replace(transformer_step(4), rules=rules)))[
        "what each entry of a policy matched"
    ]
    assert lines[1].split() == ["layers.0", "x4", "save_matmuls", "save", "12", "3.00", "GiB"]
    assert lines[2].split() == ["layers.0", "x4", "no", "rule", "recompute", "7", "1.00", "GiB"]


def test_notes_are_shown() -> None:
    assert sections(write(transformer_step(2, optimizer="")))["notes"] == [
        "  no optimizer was given: its state is counted as 0"
    ]


def test_two_profiles_are_compared() -> None:
    before = transformer_step(8, tokens=1024)
    after = dataclasses.replace(transformer_step(8, tokens=1024, recomputes=True), clock=Clock.DEVICE)
    lines = sections(write(after, against=before))["before and after"]
    rows = {re.split(r"  +", line.strip())[0]: re.split(r"  +", line.strip())[1:] for line in lines[1:12]}
    one, other = before.peak_bytes, after.peak_bytes
    assert rows["peak"] == [f"{one / 2**20:.2f} MiB", f"{other / 2**20:.2f} MiB", f"{(other - one) / one:+.1%}"]
    assert rows["parameters"][-1] == "same"
    assert rows["activations"][-1].startswith("-9")
    assert rows["step"][-1].startswith("+")
    text = words(" ".join(lines))
    assert "peak before: in backward (aten._log_softmax_backward.default, model.py:66)" in text
    assert "times before are measured on the host, after measured on the device" in text


# What to do about the peak.


def test_a_peak_of_activations_is_lowered_by_recomputing() -> None:
    text = words(write(transformer_step(32, vocabulary=64)))
    assert "is kept by forward for backward: recomputing more lowers it." in text


def test_a_peak_in_the_loss_head_is_said_to_be_there() -> None:
    text = words(write(transformer_step(4, vocabulary=50_000, tokens=1024, recomputes=True, optimizer="")))
    assert "The peak is in the loss head: logits, loss and their gradients are 586." in text
    assert "Compute the loss in chunks of tokens, or make the head and the loss one region." in text


def test_a_peak_in_recomputation_is_said_to_be_there() -> None:
    text = words(write(transformer_step(2, vocabulary=16, tokens=4096, recomputes=True, optimizer="")))
    assert "The peak is in the recomputation of region 'layers.1', not in what is kept between" in text
    assert "Make regions smaller" in text


def test_a_peak_of_what_a_region_keeps_is_lowered_by_recomputing_more() -> None:
    # In the recomputation of one layer, but made of what all of them keep.
    step = transformer_step(32, vocabulary=16, optimizer="")
    text = words(write(step))
    assert "is kept by forward for backward" in text
    peak = find_peak(step)
    again = dataclasses.replace(peak, phase=Phase.RECOMPUTATION, recomputed_bytes=peak.bytes // 4)
    assert "is kept by forward for backward" in judge_peak(again)[0]
    most = dataclasses.replace(peak, phase=Phase.RECOMPUTATION, recomputed_bytes=3 * peak.bytes // 4)
    assert "The peak is in the recomputation" in judge_peak(most)[0]


def test_a_peak_in_the_optimizer_is_said_to_be_there() -> None:
    parameter = Storage(bytes=GIB, category=Category.PARAMETER, lifetime=Lifetime.STEP)
    update = OpCall(op="aten._foreach_add", phase=Phase.OPTIMIZER, workspace_bytes=GIB)
    text = words(write(Profile(storages=(parameter,), calls=(OpCall(op="aten.mm"), update))))
    assert "The peak is in the optimizer's step, not in activations: parameters 1.00 GiB." in text
    assert "`fused=True` or `foreach=False`" in text


def test_a_peak_of_parameters_is_said_to_be_so() -> None:
    text = words(write(transformer_step(2, width=512, tokens=8)))
    assert re.search(r"\d\d% of the peak stays, whatever is recomputed: parameters", text)


def test_a_peak_of_temporaries_is_said_to_be_so() -> None:
    text = words(write(Profile(storages=(), calls=(OpCall(op="aten.cdist", workspace_bytes=GIB),))))
    assert "The peak is made of temporaries: 1.00 GiB that exist only around this call." in text


def test_fragmentation_is_told_from_need() -> None:
    def head(peak: int, reserved: int) -> str:
        entry = AllocatorEntry(device="cuda:0", peak_bytes=peak, reserved_bytes=reserved, total_bytes=80 * GIB)
        return words(write(dataclasses.replace(transformer_step(2), allocators=(entry,))))

    assert (
        "cuda:0: tensors take at most 40.00 GiB, the allocator holds 60.00 GiB of 80.00 GiB. The 20.00 GiB between "
        "(33%) is fragmentation and cache, not tensors: set PYTORCH_ALLOC_CONF=expandable_segments:True"
        in head(40 * GIB, 60 * GIB)
    )
    assert "1.00 GiB (2%) is lost to fragmentation." in head(59 * GIB, 60 * GIB)


# How it looks.


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_none_ends_in_spaces(width: int) -> None:
    step = transformer_step(12, name="A" * 150)
    text = write(step, against=transformer_step(2), gains=find_gains(step), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_numbers_are_whole_in_80_columns() -> None:
    step = transformer_step(12)
    text = write(step, gains=find_gains(step))
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for title in ("by module", "by operator"):
        for line in sections(text)[title][1:]:
            is_rest = len(line.split()) == 1  # of a name that takes two lines
            assert is_rest or len(re.findall(r"\d (?:B|KiB|MiB)\b", line)) == 2


def test_a_pipe_gets_no_colours_and_a_terminal_does() -> None:
    step = transformer_step(2)
    assert "\x1b" not in write(step)
    piped = io.StringIO()
    Console(file=piped, width=80).print(render_text(step))
    assert "\x1b" not in piped.getvalue()
    shown = io.StringIO()
    Console(file=shown, width=80, force_terminal=True, color_system="truecolor").print(render_text(step))
    assert "\x1b" in shown.getvalue()


def test_an_encoding_without_blocks_gets_letters_it_has() -> None:
    step = dataclasses.replace(transformer_step(2), name="Mod\N{LATIN SMALL LETTER E WITH ACUTE}le")
    text = write(step, encoding="ascii")
    assert text.isascii()
    assert "####" in text
    assert "Mod\\xe9le" in text
    assert " us" in text
    assert "\\xb5" not in text
    assert "\N{FULL BLOCK}" in write(step)


@pytest.mark.parametrize("name", ["[red]layer[/red]", "[/]", ":smile:", "[link=http://x]", "a\\[b]", "$x$", "[bold"])
def test_names_are_no_markup(name: str) -> None:
    assert write(rename(name), width=200).count(name) >= 8


def rename(name: str) -> Profile:
    """A step in which all that has a name has this one."""
    call = OpCall(
        op=name, module=name, source=f"{name}:3", region=name, outputs=(Value(storage=0, shape=(4,), dtype="float32"),)
    )
    return Profile(
        storages=(Storage(bytes=16, category=Category.ACTIVATION),),
        calls=(call,),
        saved=(Saved(storage=0, by=0),),
        name=name,
        device=name,
        modules=(ModuleEntry(path="", kind=name), ModuleEntry(path=name, kind=name)),
        rules=(RuleEntry(region=name, rule=name, decision=Decision.SAVE),),
        notes=(name,),
    )


def test_names_do_not_steer_the_terminal() -> None:
    text = write(rename("\x1b[31mred\x07\r"), width=200)
    assert not set(text) & {"\x1b", "\x07", "\r"}
    assert "\\x1b[31mred\\x07\\r" in text


# Profiles with little or much in them.


def test_an_empty_profile_is_one_line() -> None:
    assert write(EMPTY) == "step: peak 0 B, before the first call\n"


@pytest.mark.parametrize(
    "step",
    [
        Profile(storages=(Storage(bytes=8, lifetime=Lifetime.STEP),), calls=()),
        Profile(storages=(), calls=(OpCall(op="aten.mm.default"),)),
        dataclasses.replace(transformer_step(2), saved=()),
        dataclasses.replace(transformer_step(2), modules=()),
        transformer_step(2, has_times=False),
        transformer_step(0),
    ],
    ids=["no calls", "no memory", "nothing saved", "no modules", "no times", "no layers"],
)
def test_a_profile_may_lack_parts(step: Profile) -> None:
    text = write(step, gains=find_gains(step), against=EMPTY)
    assert "before and after" in text
    assert "nan" not in text
    assert "None" not in text
    assert write(EMPTY, against=step)


def test_the_work_grows_with_the_step_not_with_its_square() -> None:
    few, many = (count_lines(transformer_step(layers)) for layers in (60, 240))
    assert len(transformer_step(240).calls) > 4500
    assert many < 5 * few


def count_lines(step: Profile) -> int:
    """How many lines of ours it takes to write the report."""
    step.timeline  # noqa: B018  # worked out once for all
    seen = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        seen += event == "line"
        return count if "recollect" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        write(step)
    finally:
        sys.settrace(before)
    return seen
