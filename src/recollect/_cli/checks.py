"""What is checked of a machine: versions, devices, memory, compilers, and every place where the library meets torch."""

import enum
import os
import pkgutil
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

import torch

import recollect
import recollect._compile
import recollect._core.torch_private
from recollect._core.units import format_bytes
from recollect._profile.links import try_pinning

OLDEST, NEWEST = (2, 11), (2, 13)
"""Versions of torch that the library is run on."""

_MOST_TRIED_BYTES = 4 * 2**30


class CheckState(enum.Enum):
    """What a check found. ABSENT is not a fault: the machine does without it."""

    OK = "ok"
    ABSENT = "absent"
    LIMITED = "limited"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of the thing.
        state: whether it is as it should be.
        found: what there is.
        advice: what to do, if something is to be done.
    """

    name: str
    state: CheckState
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """An accelerator.

    Attributes:
        name: as torch writes it, ``"cuda:0"``.
        model: what it is, ``"NVIDIA H200"``.
        free_bytes: of its memory.
        total_bytes: of its memory.
        capability: the generation of an NVIDIA device, ``"9.0"``; empty for others.
    """

    name: str
    model: str
    free_bytes: int
    total_bytes: int
    capability: str = ""


Checking = Callable[[], Iterator[Check]]


def check_recollect() -> Iterator[Check]:
    """This library: reports of what does not work begin with its version."""
    yield Check(name="recollect", state=CheckState.OK, found=recollect.__version__)


def check_python() -> Iterator[Check]:
    """The interpreter."""
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Check(name="Python", state=CheckState.OK, found=found)


def check_torch() -> Iterator[Check]:
    """torch, and whether it is a version that the library is run on."""
    yield judge_torch(torch.__version__)


def judge_torch(version: str) -> Check:
    """Whether a version of torch is one that the library is run on.

    >>> judge_torch("2.13.0+cpu").state, judge_torch("2.10.1").state, judge_torch("3.0").state
    (<CheckState.OK: 'ok'>, <CheckState.BROKEN: 'broken'>, <CheckState.LIMITED: 'limited'>)
    """
    numbers = re.findall(r"\d+", version)
    pair = (int(numbers[0]), int(numbers[1]))
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if pair < OLDEST:
        advice = f"install torch {span}"
        return Check(name="torch", state=CheckState.BROKEN, found=f"{version}, older than {span}", advice=advice)
    if pair > NEWEST:
        advice = f"if something breaks, install torch {span}"
        return Check(name="torch", state=CheckState.LIMITED, found=f"{version}, newer than {span}", advice=advice)
    return Check(name="torch", state=CheckState.OK, found=version)


def check_seam() -> Iterator[Check]:
    """The modules in which the library uses private names of torch: each must import."""
    failures = []
    packages = (recollect._core.torch_private, recollect._compile)  # noqa: SLF001 (our own)
    names = [
        info.name for package in packages for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    if failures:
        advice = f"install torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, or report this"
        yield Check(name="torch internals", state=CheckState.BROKEN, found="\n".join(failures), advice=advice)
    else:
        yield Check(name="torch internals", state=CheckState.OK, found=f"all {len(names)} modules import")


def list_devices() -> list[Accelerator]:
    """The accelerators of this machine."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return []
    module, found = torch.get_device_module(accelerator.type), []
    for index in range(torch.accelerator.device_count()):
        model = module.get_device_name(index) if hasattr(module, "get_device_name") else accelerator.type
        free, total = torch.accelerator.get_memory_info(index)
        is_cuda = accelerator.type == "cuda"
        capability = ".".join(map(str, torch.cuda.get_device_capability(index))) if is_cuda else ""
        name = f"{accelerator.type}:{index}"
        found.append(Accelerator(name=name, model=model, free_bytes=free, total_bytes=total, capability=capability))
    return found


def check_devices() -> Iterator[Check]:
    """Every accelerator, with its memory and capability."""
    devices = list_devices()
    if not devices:
        advice = "steps run on the CPU; `recollect profile --dry --device H200` estimates for a device that is not here"
        yield Check(name="accelerator", state=CheckState.ABSENT, found="none", advice=advice)
    for device in devices:
        found = f"{device.model}, {format_bytes(device.free_bytes)} free of {format_bytes(device.total_bytes)}"
        if device.capability:
            found += f", capability {device.capability}"
        yield Check(name=device.name, state=CheckState.OK, found=found)


def check_host_memory() -> Iterator[Check]:
    """Memory of the host, and the limit of the container if that is less."""
    total, available = host_memory()
    if total is None:
        yield Check(name="host memory", state=CheckState.LIMITED, found="unknown: this system does not say")
        return
    found = f"{format_bytes(available or total)} available of {format_bytes(total)}"
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text("ascii").strip() if limit.is_file() else "max"
    if allowed.isdigit() and int(allowed) < total:
        found += f"; this container may use {format_bytes(int(allowed))}"
    yield Check(name="host memory", state=CheckState.OK, found=found)


def host_memory() -> tuple[int | None, int | None]:
    """Bytes of the host's memory: all, and those that are free or can be freed. None where the system does not tell."""
    table = Path("/proc/meminfo")
    if table.is_file():
        rows = dict(row.split(":", 1) for row in table.read_text("ascii").splitlines())
        total, available = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        return total, available
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    except (AttributeError, ValueError, OSError):
        return None, None


def check_pinning() -> Iterator[Check]:
    """How much host memory can be locked for fast copies: the limit that is set, and what could be had."""
    limit = _locked_limit()
    said = f"limit on locked memory (ulimit -l): {'none' if limit is None else format_bytes(limit)}"
    if not torch.accelerator.is_available():
        yield Check(name="pinned memory", state=CheckState.ABSENT, found=f"nothing to copy to; {said}")
        return
    available = host_memory()[1]
    most = _MOST_TRIED_BYTES if available is None else min(_MOST_TRIED_BYTES, available // 4)
    pinned = try_pinning(most)
    if pinned:
        yield Check(
            name="pinned memory", state=CheckState.OK, found=f"{format_bytes(pinned)} allocated as a test; {said}"
        )
    else:
        advice = (
            "raise the limit (`ulimit -l unlimited`; docker: --ulimit memlock=-1), otherwise copies use pageable memory"
        )
        yield Check(
            name="pinned memory", state=CheckState.LIMITED, found=f"none could be allocated; {said}", advice=advice
        )


def _locked_limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def check_compile() -> Iterator[Check]:
    """Whether regions can be parts of graphs here: torch's compiler loads, and there is a compiler of C++."""
    try:
        backends = torch.compiler.list_backends()
    except Exception as error:
        advice = "eager mode still works"
        found = f"torch's compiler does not load: {type(error).__name__}: {error}"
        yield Check(name="torch.compile", state=CheckState.LIMITED, found=found, advice=advice)
        return
    compiler = find_program(os.environ.get("CXX"), "g++", "clang++", "cl")
    if "inductor" not in backends:
        yield Check(name="torch.compile", state=CheckState.LIMITED, found=f"no Inductor among {', '.join(backends)}")
    elif compiler is None:
        advice = "install g++ or clang++, or set CXX; eager mode still works"
        yield Check(name="torch.compile", state=CheckState.LIMITED, found="Inductor, no C++ compiler", advice=advice)
    else:
        yield Check(name="torch.compile", state=CheckState.OK, found=f"Inductor, {compiler}")


def find_program(*names: str | None) -> str | None:
    """The path of the first program that is there.

    >>> find_program("no such program", None) is None
    True
    """
    return next((path for name in names if name and (path := shutil.which(name))), None)


def check_triton() -> Iterator[Check]:
    """Triton, which compiled code on devices is written in."""
    version = _version_of("triton") or _version_of("triton-rocm") or _version_of("pytorch-triton")
    if version:
        compiler = find_program(os.environ.get("CC"), "gcc", "clang", "cl")
        advice = "" if compiler else "install gcc or clang, or set CC: Triton builds its launchers with it"
        yield Check(
            name="Triton", state=CheckState.OK if compiler else CheckState.LIMITED, found=version, advice=advice
        )
    elif torch.accelerator.is_available():
        advice = "pip install triton, for torch.compile on this device"
        yield Check(name="Triton", state=CheckState.LIMITED, found="not installed", advice=advice)
    else:
        yield Check(name="Triton", state=CheckState.ABSENT, found="not installed, and no device to use it")


def check_distributed() -> Iterator[Check]:
    """The ways in which processes can talk to each other."""
    from torch import distributed

    if not distributed.is_available():
        yield Check(name="distributed", state=CheckState.ABSENT, found="this torch was built without it")
        return
    ways = {
        "nccl": distributed.is_nccl_available(),
        "gloo": distributed.is_gloo_available(),
        "mpi": distributed.is_mpi_available(),
        "ucc": distributed.is_ucc_available(),
    }
    yield Check(name="distributed", state=CheckState.OK, found=", ".join(name for name, there in ways.items() if there))


_EXTRAS = (
    ("scipy", "plan", "budgets"),
    ("rich", "report", "text"),
    ("typer", "cli", "commands"),
    ("matplotlib", "plot", "plots"),
)
_TRAINERS = ("transformers", "accelerate", "lightning", "peft", "trl", "diffusers", "timm", "bitsandbytes")


def check_extras() -> Iterator[Check]:
    """The libraries that some functions need, and the extra that installs each."""
    for name, extra, use in _EXTRAS:
        version = _version_of(name)
        advice = "" if version else f'pip install "recollect[{extra}]", for {use}'
        state = CheckState.OK if version else CheckState.ABSENT
        yield Check(name=name, state=state, found=version or "not installed", advice=advice)
    trainers = [f"{name} {version}" for name in _TRAINERS if (version := _version_of(name))]
    state = CheckState.OK if trainers else CheckState.ABSENT
    yield Check(name="trainers", state=state, found=", ".join(trainers) or "none installed")


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


CHECKS: tuple[Checking, ...] = (
    check_recollect,
    check_python,
    check_torch,
    check_seam,
    check_compile,
    check_triton,
    check_distributed,
    check_extras,
    check_devices,
    check_host_memory,
    check_pinning,
)
