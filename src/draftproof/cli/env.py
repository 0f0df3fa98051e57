"""`draftproof env`: show versions, hardware, memory, models and settings, as a bug report needs them."""

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import click

from draftproof.cli.models import BUNDLED_MEMORY, bundled_model, hub_models, megabytes

HELP = """Show what a bug report needs: versions, processor, GPUs, memory, models and environment variables.

Shows no tokens or passwords, and writes your home directory as ~.

\b
Examples:
  draftproof env
  draftproof env --json
"""

PACKAGES: Final = ("draftproof", "torch", "transformers", "triton", "numpy", "tokenizers", "huggingface-hub")
INSTRUCTION_SETS: Final = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "sve", "sve2", "bf16", "i8mm",
)  # fmt: skip
"""Flags of /proc/cpuinfo on which the speed of matrix products depends, on x86 and ARM."""

VARIABLES: Final = re.compile(
    r"(HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE|HF_ENDPOINT|TRANSFORMERS_OFFLINE|XDG_CACHE_HOME|OMP_NUM_THREADS|"
    r"MKL_NUM_THREADS|OMP_WAIT_POLICY|KMP_\w+|CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|PYTORCH_\w*CONF|"
    r"TORCH_LOGS|TRITON_\w+|DRAFTPROOF_\w+)"
)
"""Environment variables to show, by their whole name. None of them holds a token."""

SECRET_NAME: Final = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL")
CREDENTIALS: Final = re.compile(r"(?<=://)[^/@\s]*@")
"""The user name and password in a URL."""

Section = dict[str, Any]


@click.command(help=HELP, short_help="Show versions, hardware and models for a bug report.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def env(as_json: bool) -> None:
    found = environment()
    click.echo(json.dumps(found, indent=2, ensure_ascii=False) if as_json else "\n".join(_report(found)))


def environment() -> dict[str, Section]:
    """Collect all facts by section. A fact that cannot be found out is replaced by the error; nothing is raised."""
    sections: Mapping[str, Callable[[], Section]] = {
        "versions": _versions,
        "processor": _processor,
        "memory": _memory,
        "torch": _torch,
        "models": _models,
        "environment": _variables,
    }
    return {name: _attempt(section) for name, section in sections.items()}


def _attempt(section: Callable[[], Section]) -> Section:
    try:
        return {name: _private(value) for name, value in section().items()}
    except Exception as error:  # a broken installation is exactly what this command is for
        return {"error": _private(f"{type(error).__name__}: {error}")}


def _private(value: Any) -> Any:
    """Return a value without the home directory and without credentials in URLs."""
    if not isinstance(value, str):
        return value
    home = str(Path.home())
    hidden = value if home == os.sep else value.replace(home, "~")
    return CREDENTIALS.sub("…@", hidden)


def _versions() -> Section:
    return {
        **{package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "installed in": sys.prefix,
        "platform": platform.platform(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> Section:
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    known = [flag for flag in INSTRUCTION_SETS if flag in flags]
    usable = getattr(os, "sched_getaffinity", None)
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "threads": os.cpu_count(),
        "threads usable by this process": len(usable(0)) if usable else os.cpu_count(),
        "instruction sets": " ".join(known) or "unknown",
    }


def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; nothing where there is no such file."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def _memory() -> Section:
    kilobytes = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in _lines_of("/proc/meminfo"))
        if value.strip()
    }
    if "MemTotal" in kilobytes:
        total, available = (_gigabytes(1024 * kilobytes[name]) for name in ("MemTotal", "MemAvailable"))
    else:
        total, available = _gigabytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), "unknown"
    limit = next(iter(_lines_of("/sys/fs/cgroup/memory.max")), "max")
    return {
        "total": total,
        "available": available,
        **({"limit of this container": _gigabytes(int(limit))} if limit.isdecimal() else {}),
        "needed by smollm2": BUNDLED_MEMORY,
    }


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _torch() -> Section:
    import torch

    cuda = torch.cuda.is_available()
    devices = {f"cuda:{i}": _device(i) for i in range(torch.cuda.device_count())} if cuda else {}
    return {
        "threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "built for cuda": torch.version.cuda or "no",
        "cuda available": "yes" if cuda else "no",
        **devices,
    }


def _device(index: int) -> str:
    import torch

    name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # for example a device that another process uses exclusively
        return f"{name}, capability {major}.{minor}, memory unknown ({error})"
    return f"{name}, capability {major}.{minor}, {_gigabytes(total)}, {_gigabytes(free)} free"


def _models() -> Section:
    bundled = bundled_model()
    state = f"{bundled['state']}, {megabytes(bundled['bytes'])}, {bundled['path']}"
    hub = {model["name"]: f"{model['state']}, {megabytes(model['bytes'])}" for model in hub_models()}
    return {bundled["name"]: state, **hub}


def _variables() -> Section:
    names = sorted(name for name in os.environ if VARIABLES.fullmatch(name) and not SECRET_NAME.search(name))
    return {name: os.environ[name] for name in names}


def _report(found: Mapping[str, Section]) -> Iterator[str]:
    """Yield the lines of the text form: a heading per section, then one line per fact."""
    for title, section in found.items():
        yield title
        width = max((len(name) for name in section), default=0)
        for name, value in section.items():
            yield f"  {name:<{width}}  {value}"
        if not section:
            yield "  none set" if title == "environment" else "  none"
