"""Describes this machine in frozen facts; ``detect()`` is the only device query at run time.

Readings (what drivers and files say) are kept apart from the pure functions that make facts out of them.
torch is imported only when a device is looked at.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringattn.errors import DeviceError

from .cpu import CpuReading, cpu_arch, isa_flags, parse_cpuinfo, read_cpu, usable_cores, usable_memory
from .identity import pci_bus
from .kernel_faults import KernelFault
from .names import arm_model_name, cpu_sku, gpu_sku, mig_profile, slug, vgpu_profile
from .nvml import open_nvml

if TYPE_CHECKING:
    import torch

MIB = 2**20

# Optional import name -> the distributions that may carry it.
OPTIONAL_PACKAGES: dict[str, tuple[str, ...]] = {
    "triton": ("triton", "pytorch-triton"),
    "flash_attn": ("flash-attn",),
    "flash_attn_interface": ("flash-attn-3", "flash-attn-interface"),
    "flash_attn.cute": ("flash-attn-4",),
    "xformers": ("xformers",),
}
_BOX_SIZES_GIB = (
    2, 3, 4, 5, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 94, 96, 128, 141, 144, 180, 192, 288,
)  # fmt: skip
_UNMEASURED = {"xpu": "Intel GPUs (XPU)", "mps": "Apple GPUs (MPS)", "hip": "AMD GPUs (ROCm)"}


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """Facts of one device that decisions depend on, without a host, user, path or serial number.

    ``vendor`` is "nvidia" or "cpu". ``device_name`` is what the driver or /proc/cpuinfo says, ``sku`` the class of
    card, one for its many spellings. ``arch`` is "sm_90", "x86_64", "aarch64". ``sm_count`` is the number of streaming
    multiprocessors, or for a CPU the cores usable under affinity and cgroup quota. ``l2_mib`` is the device's
    last-level cache (of a CPU the largest that core 0 sees). ``mig`` is the MIG profile or empty, ``vgpu`` the type of
    a virtual GPU that shares a whole card by time, or empty.
    ``power_limit_w`` None and ``link`` "" mean unknown; else ``link`` is "pcie" or "nv18" (18 NVLinks), of several.
    ``isa`` (CPU) holds the flags that matter, sorted; ``threads`` torch's intra-op threads (CPU). ``software`` is
    sorted (name, version) pairs. ``packages`` are optional import names that can be found; finding imports none.
    ``faults`` are kernels known to be wrong here, as far as a module's head dimension goes; ``detect`` looks for none.
    """

    vendor: str
    device_name: str
    sku: str
    arch: str
    sm_count: int
    memory_mib: int
    l2_mib: int
    mig: str = ""
    vgpu: str = ""
    power_limit_w: int | None = None
    device_count: int = 1
    link: str = ""
    isa: tuple[str, ...] = ()
    threads: int = 0
    software: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()
    faults: tuple[KernelFault, ...] = ()


@dataclass(frozen=True, slots=True)
class CudaReading:
    """Raw answers of torch, and of NVML where it is importable, about one NVIDIA device."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    device_count: int
    power_limit_mw: int | None = None
    nvlinks: int | None = None


# --- pure -------------------------------------------------------------------------------------------------------


def cuda_facts(
    reading: CudaReading, software: tuple[tuple[str, str], ...] = (), packages: tuple[str, ...] = ()
) -> HardwareFacts:
    """Return the facts of an NVIDIA device."""
    return HardwareFacts(
        vendor="nvidia",
        device_name=" ".join(reading.name.split()),
        sku=gpu_sku(reading.name),
        arch=f"sm_{reading.capability[0]}{reading.capability[1]}",
        sm_count=reading.sm_count,
        memory_mib=reading.memory_bytes // MIB,
        l2_mib=reading.l2_bytes // MIB,
        mig=mig_profile(reading.name),
        vgpu=vgpu_profile(reading.name),
        power_limit_w=None if reading.power_limit_mw is None else round(reading.power_limit_mw / 1000),
        device_count=reading.device_count,
        link=_link_of(reading),
        software=tuple(sorted(software)),
        packages=packages,
    )


def _link_of(reading: CudaReading) -> str:
    """Return what joins the devices that are visible: one alone is the same in whatever machine it is."""
    if reading.nvlinks is None or reading.device_count == 1:
        return ""
    return f"nv{reading.nvlinks}" if reading.nvlinks else "pcie"


def cpu_facts(
    reading: CpuReading, software: tuple[tuple[str, str], ...] = (), packages: tuple[str, ...] = ()
) -> HardwareFacts:
    """Return the facts of a CPU."""
    model = parse_cpuinfo(reading.cpuinfo)
    name = model.name
    if not name and model.implementer >= 0:
        name = arm_model_name(model.implementer, model.part)
    name = name or reading.fallback_name or reading.machine or "unknown"
    return HardwareFacts(
        vendor="cpu",
        device_name=name,
        sku=cpu_sku(name, model.vendor_id, model.family, model.model),
        arch=cpu_arch(reading.machine),
        sm_count=usable_cores(reading.affinity, reading.quotas),
        memory_mib=max(1, usable_memory(reading.memory_bytes, reading.memory_limits) // MIB),
        l2_mib=reading.last_level_cache_bytes // MIB,
        isa=isa_flags(model.flags),
        threads=reading.threads,
        software=tuple(sorted(software)),
        packages=packages,
    )


def fingerprint_name(facts: HardwareFacts) -> str:
    """Return a file name (without suffix) for this kind of device: ``nvidia-h100-sxm-80g``, ``cpu-epyc-9004-2c``."""
    if facts.vendor == "cpu":
        threads = f"-{facts.threads}t" if facts.threads not in (0, facts.sm_count) else ""
        return slug(f"cpu-{facts.sku}-{facts.sm_count}c{threads}")
    part = f"-mig-{facts.mig}" if facts.mig else f"-vgpu-{facts.vgpu}" if facts.vgpu else ""
    return slug(f"{facts.vendor}-{facts.sku}-{_nominal_gib(facts.memory_mib)}g{part}")


def _nominal_gib(memory_mib: int) -> int:
    """Return the advertised size, of which drivers keep up to 4 %."""
    gib = memory_mib / 1024
    return next((size for size in _BOX_SIZES_GIB if 0.96 * size <= gib <= size), round(gib))


# --- the edge ---------------------------------------------------------------------------------------------------


def detect(device: torch.device | str | int | None = None) -> HardwareFacts:
    """Return the facts of ``device``: "cuda", "cuda:1", 1, "cpu" or a torch.device.

    None is the current CUDA device, else the CPU.
    Raises DeviceError for a device that is absent, and for kinds nobody has measured (ROCm, XPU, MPS).
    """
    import torch

    if device is None:
        wanted = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        wanted = _requested(device)
    if wanted.type == "cpu":
        return cpu_facts(read_cpu(torch.get_num_threads()), _common_software(), found_packages())
    if wanted.type == "cuda":
        _check_cuda(wanted)
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        packages = found_packages()
        reading, driver = _read_cuda(index)
        return cuda_facts(reading, _cuda_software(packages, driver), packages)
    if wanted.type in _UNMEASURED:
        raise _unmeasured(str(wanted), wanted.type)
    raise DeviceError(f"device is {str(wanted)!r}; use 'cuda', 'cuda:N' or 'cpu'")


class Gpu(NamedTuple):
    """Compute capability as one number (90 for sm_90), bytes of L2 cache, and multiprocessors."""

    sm: int
    l2_bytes: int
    sm_count: int = 1


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the properties that a kernel picks its tiles by; those of sm_80 for a CPU, where Triton interprets."""
    import torch

    if device.type != "cuda":
        return Gpu(80, 0)
    properties = torch.cuda.get_device_properties(device)
    sm = properties.major * 10 + properties.minor
    return Gpu(sm, properties.L2_cache_size, properties.multi_processor_count)


def _requested(device: Any) -> torch.device:
    import torch

    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise DeviceError(f"device is {device!r}; use 'cuda', 'cuda:N', N, 'cpu', a torch.device or None")
    try:
        # torch takes a bare number for whatever accelerator its build has.
        return torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    except RuntimeError:
        raise DeviceError(f"device is {device!r}; use 'cuda', 'cuda:N' or 'cpu'") from None


def _check_cuda(wanted: torch.device) -> None:
    import torch

    if torch.version.hip is not None:
        raise _unmeasured(str(wanted), "hip")
    if torch.version.cuda is None:
        raise DeviceError(
            f"device is '{wanted}', but torch {torch.__version__} has no CUDA; install a CUDA build, or use 'cpu'"
        )
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or count == 0:
        raise DeviceError(f"device is '{wanted}', but torch sees no CUDA device; check nvidia-smi, or use 'cpu'")
    if wanted.index is not None and wanted.index >= count:
        raise DeviceError(
            f"device is '{wanted}', but the last CUDA device here is cuda:{count - 1}; use that or a lower number"
        )


def _unmeasured(device: str, kind: str) -> DeviceError:
    return DeviceError(
        f"device is '{device}': {_UNMEASURED[kind]} have not been measured yet and are not supported; "
        "use an NVIDIA GPU or the device cpu"
    )


def _read_cuda(index: int) -> tuple[CudaReading, str]:
    """Read a card, and the version of its driver."""
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    nvml = _read_nvml(pci_bus(properties))
    reading = CudaReading(
        name=properties.name,
        capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        device_count=torch.cuda.device_count(),
        power_limit_mw=nvml.power_limit_mw,
        nvlinks=nvml.nvlinks,
    )
    return reading, nvml.driver


@dataclass(frozen=True, slots=True)
class NvmlReading:
    """Driver version, and power limit and active NVLinks of a card; empty or None where the driver gives none."""

    driver: str = ""
    power_limit_mw: int | None = None
    nvlinks: int | None = None


@cache  # a call costs tens of milliseconds, and a model has a module a layer
def _read_nvml(bus: str) -> NvmlReading:
    """Ask the driver about itself and the card on a PCI bus."""
    nvml = open_nvml()
    if nvml is None:
        return NvmlReading()
    card = nvml.card_on_bus(bus)
    found = NvmlReading(nvml.driver(), nvml.power_limit_mw(card), nvml.active_links(card))
    nvml.close()
    return found


def _common_software() -> tuple[tuple[str, str], ...]:
    import torch

    return (("python", ".".join(platform.python_version_tuple()[:2])), ("torch", str(torch.__version__)))


def _cuda_software(packages: tuple[str, ...], driver: str) -> tuple[tuple[str, str], ...]:
    import torch

    software = dict(_common_software())
    software["cuda"] = str(torch.version.cuda)
    backend: Any = torch.backends.cudnn
    if (cudnn := backend.version()) is not None:
        software["cudnn"] = cudnn_version(cudnn)
    if driver:
        software["driver"] = driver
    for package in packages:
        software[package] = _package_version(package)
    return tuple(sorted(software.items()))


def cudnn_version(number: int) -> str:
    """Return cuDNN's version from the number it gives itself: 91002 is 9.10.2, 8902 was 8.9.2."""
    major = number // 10000 if number >= 90000 else number // 1000
    rest = number - major * (10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def found_packages() -> tuple[str, ...]:
    """Return the OPTIONAL_PACKAGES that could be imported here, importing none of them."""
    return tuple(name for name in OPTIONAL_PACKAGES if _is_findable(name))


def _is_findable(name: str) -> bool:
    parent, _, child = name.partition(".")
    try:
        spec = importlib.util.find_spec(parent)
    except ValueError:  # a stand-in without a spec sits in sys.modules
        return False
    if spec is None:
        return False
    if not child:
        return spec.origin is not None  # a folder without __init__.py holds some other package's parts
    # find_spec("flash_attn.cute") would import flash_attn, and with it CUDA code.
    return any((Path(place) / child / "__init__.py").is_file() for place in spec.submodule_search_locations or ())


def _package_version(name: str) -> str:
    for distribution in OPTIONAL_PACKAGES[name]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
