"""The environment of a result: device, package versions, digests of the sources; and whether the engine can run here.

Nothing heavy is imported for it. `code_version` is a digest of all sources that a record depends on, `kernel_digest`
one of the attention kernels alone.
"""

import hashlib
import os
import platform
import sys
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from engine.runtime.options import Backend
from harness.config.errors import ConfigError, UserError
from harness.config.schema import EngineConfig, EngineDevice
from harness.console import install_hint
from harness.workers import version_in
from paged_kernels.native import why_unavailable

# Packages that a record depends on; a change to the report or the command line makes no new points.
_OURS = ("replay", "cost", "compiled", "workload", "oracle", "measure", "calibrate", "point", "metrics")
ROOTS = ("engine", "traces", "paged_kernels", *(f"harness.{package}" for package in _OURS))
SOURCES = (".py", ".c", ".h", ".so")  # ".so": the policy core, where it is compiled
ENGINE = ("torch", "transformers")  # the extra `engine`
SERVER = (*ENGINE, "fastapi", "uvicorn", "prometheus_client")  # the extra `serve`
_SHARE = 0.8  # of the machine's memory: the model, its activations and Python need the rest
PACKAGES = ("torch", "transformers", "triton", "numpy", "scipy", "simpy", "hydra-core")


@lru_cache(maxsize=1)
def versions() -> dict[str, str | None]:
    """Installed versions, None where a package is absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    core = find_spec("engine.core.sequence")  # what runs: code for another Python may lie beside
    return {**found, "policy core": "compiled" if str(core and core.origin).endswith(".so") else "python"}


def missing(packages: tuple[str, ...]) -> list[str]:
    """Those of the packages that are not installed. Imports none of them."""
    return [name for name in packages if find_spec(name) is None]


def check_installed(extra: str, packages: tuple[str, ...]) -> None:
    """Raise UserError, one line, if a package of an extra is missing. It is no ConfigError: it is not of one point."""
    if found := missing(packages):
        raise UserError(
            f"the engine needs packages that {sys.executable} does not have ({', '.join(found)}): "
            f"{install_hint(extra)}; a sweep with measure=false predicts without the engine"
        )


@lru_cache(maxsize=8)
def code_version(roots: tuple[str, ...] = ROOTS) -> str:
    """A digest of the source files of the packages `roots`; points are run again when it changes."""
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(one for one in _package_folder(root).rglob("*") if one.suffix in SOURCES):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _package_folder(name: str) -> Path:
    """The folder of a package, given by its dotted name."""
    package, _, rest = name.partition(".")
    spec = find_spec(package)  # does not import: paged_kernels would import torch
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {package} is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder.joinpath(*rest.split(".")) if rest else folder


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The CPU's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def gpu_names() -> tuple[str, ...]:
    """Names of the NVIDIA devices that the driver shows."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for one in files for line in one.read_text(encoding="utf-8", errors="replace").splitlines()]
    return tuple(line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))


def engine_device(device: EngineDevice) -> str:
    """`cuda` or `cpu`; `auto` is resolved for this machine."""
    if device is EngineDevice.auto:
        return "cuda" if gpu_names() else "cpu"
    return str(device)


def device_identity(device: EngineDevice) -> str:
    """The name of the device that the engine runs on: the GPU, or the CPU with its number of cores."""
    on_gpu = engine_device(device) == "cuda" and gpu_names()
    return gpu_names()[0] if on_gpu else f"{cpu_name()}, {os.cpu_count()} cores"


def environment(device: str, clock: str) -> dict[str, object]:
    """The record's environment section; `device` is the name of the one that the engine runs on."""
    return {
        **versions(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpu": ", ".join(gpu_names()) or None,
        "device": device,
        "load_average": round(os.getloadavg()[0], 2),
        "code": code_version(),
        "clock": clock,
    }


def kernel_digest(folder: Path | None = None) -> str:
    """A digest of the sources of `paged_kernels`, without references and other providers.

    A record with another digest is stale: it was made with other kernels.
    """
    root = folder or _package_folder("paged_kernels")
    digest = hashlib.sha256()
    for path in digested_files(root):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def digested_files(root: Path) -> list[Path]:
    """The source files below `root` that a kernel's speed depends on, sorted."""
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not path.relative_to(root).as_posix().startswith(("reference", "providers", "case"))
    ]


def check_memory(pool_bytes: int, engine: EngineConfig) -> None:
    """Check that the machine's memory holds the pool; a CUDA device is not checked here.

    Raises:
        ConfigError: it does not.
    """
    advice = "Take fewer tokens; a sweep with measure=false predicts alone"
    _check_fits(pool_bytes, engine, "cache.pool_tokens", "the pool takes", advice)


def check_weights(weight_bytes: int, engine: EngineConfig) -> None:
    """Check the same for a model's weights."""
    _check_fits(
        weight_bytes, engine, "model", "its weights take", "A sweep with measure=false predicts without them"
    )


def _check_fits(size: int, engine: EngineConfig, key: str, what: str, remedy: str) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if engine_device(engine.device) == "cpu" and size > _SHARE * memory:
        raise ConfigError(
            key,
            f"{what} {size / 1e9:,.1f} GB, this machine has {memory / 1e9:,.1f} GB; "
            f"allowed: {_SHARE:.0%} of that. {remedy}",
        )


def check_engine(engine: EngineConfig) -> None:
    """Check that the engine is installed, its device and its kernels.

    Raises:
        UserError: torch or transformers is missing.
        ConfigError: the device does not exist, or the kernels do not run on it.
    """
    check_installed("engine", ENGINE)
    if engine.device is EngineDevice.cuda and not gpu_names():
        raise ConfigError(
            "engine.device",
            "cuda, but the NVIDIA driver shows no device on this machine; use engine.device=cpu (or auto), "
            "and a sweep with measure=false predicts alone",
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if engine.backend is Backend.triton and engine_device(engine.device) == "cpu" and not interpreted:
        reason = "triton kernels need a CUDA device and this run is on the CPU; use engine.backend=torch"
        raise ConfigError("engine.backend", reason)
    if engine.backend is Backend.native:
        _check_native(engine)
    if engine.cuda_graphs and (engine_device(engine.device) == "cpu" or engine.backend is Backend.torch):
        raise ConfigError(
            "engine.cuda_graphs",
            "true, but only triton kernels on a CUDA device can be recorded; leave it out, or use engine=cuda",
        )


def _check_native(engine: EngineConfig) -> None:
    reason = why_unavailable() if engine_device(engine.device) == "cpu" else "this run is on a GPU"
    if reason:
        raise ConfigError(
            "engine.backend", f"native kernels are compiled for CPUs: {reason}; use engine.backend=auto"
        )


def engine_kernels(engine: EngineConfig) -> list[str]:
    """The kernels of the engine on this machine: that of attention (`auto` resolved), and on a CPU that of all else.

    They depend on the C compiler and on `PAGETWIN_NATIVE`, too.
    """
    if engine_device(engine.device) != "cpu":
        return ["triton" if engine.backend is Backend.auto else str(engine.backend)]
    rest = "torch" if why_unavailable() else "native"
    return [rest if engine.backend is Backend.auto else str(engine.backend), rest]


def engine_code(engine: EngineConfig, vllm_python: str | None) -> list[str]:
    """What computes on the measured side: vLLM with its version, or the kernels of our engine."""
    if engine.on_vllm:
        return [f"vllm {_version_of_vllm(vllm_python)}"]
    return engine_kernels(engine)


@cache
def _version_of_vllm(python: str | None) -> str | None:
    return version_in(python or sys.executable, "vllm")
