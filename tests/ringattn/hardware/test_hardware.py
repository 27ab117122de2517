"""Facts from readings: one name for one card, what a container may use, and clear refusals."""

from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machine_samples import A100, A100_40, EPYC, H100, H100_PCIE, H200, gpu

from ringattn.errors import DeviceError
from ringattn.hardware import facts as hardware
from ringattn.hardware.cpu import CpuReading, cpu_arch, isa_flags, parse_cpuinfo, read_cpu, usable_cores, usable_memory
from ringattn.hardware.facts import CudaReading, cpu_facts, cuda_facts, cudnn_version, detect, fingerprint_name
from ringattn.hardware.names import cpu_sku, gpu_sku, mig_profile, slug

# Every row is one kind of card, by the names that drivers, clouds and data sheets give it.
CARDS = {
    "h100-sxm": [
        "NVIDIA H100 80GB HBM3",
        "H100 SXM5 80GB",
        "NVIDIA H100 SXM5",
        "NVIDIA-H100-80GB-HBM3",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100XM-80C",
        "nvidia h100",
    ],
    "h100-pcie": ["NVIDIA H100 PCIe", "H100-PCIE-80GB", "NVIDIA H100 80GB HBM2e", "GRID H100-80C"],
    "h100-nvl": ["NVIDIA H100 NVL", "H100 NVL 94GB"],
    "h200-sxm": ["NVIDIA H200", "H200 SXM5 141GB", "NVIDIA H200 141GB HBM3e"],
    "h200-nvl": ["NVIDIA H200 NVL"],
    "b200-sxm": ["NVIDIA B200"],
    "b300-sxm": ["NVIDIA B300 SXM6 AC"],
    "gh200": ["NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"],
    "a100-sxm": [
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100-SXM4-40GB",
        "A100-SXM4-40GB",
        "A100 SXM 80GB",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "GRID A100X-40C",
        "GRID A100DX-80C",
    ],
    "a100-pcie": ["A100-PCIE-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "GRID A100D-1-10C"],
    "v100-sxm": ["Tesla V100-SXM2-32GB", "Tesla V100-SXM2-16GB", "NVIDIA V100-SXM3-32GB", "GRID V100DX-32Q"],
    "v100-pcie": ["Tesla V100-PCIE-16GB", "GRID V100D-32Q"],
    "v100s-pcie": ["Tesla V100S-PCIE-32GB"],
    "p100-pcie": ["Tesla P100-PCIE-16GB", "NVIDIA P100-PCIE-12GB"],
    "p100-sxm": ["Tesla P100-SXM2-16GB"],
    "t4": ["Tesla T4", "NVIDIA T4", "GRID T4-16Q"],
    "a10g": ["NVIDIA A10G"],
    "a10": ["NVIDIA A10", "NVIDIA A10-24Q"],
    "a40": ["NVIDIA A40", "NVIDIA A40-48Q"],
    "l4": ["NVIDIA L4"],
    "l40s": ["NVIDIA L40S", "NVIDIA L40S-48Q"],
    "rtx-4090": [
        "NVIDIA GeForce RTX 4090",
        "GeForce RTX 4090",
        "RTX 4090",
        "NVIDIA GeForce RTX(TM) 4090 24GB",
        "RTX4090",
    ],
    "rtx-4090-d": ["NVIDIA GeForce RTX 4090 D"],
    "rtx-4090-laptop": ["NVIDIA GeForce RTX 4090 Laptop GPU"],
    "rtx-2080-ti": ["NVIDIA GeForce RTX 2080 Ti", "GeForce RTX 2080 Ti"],
    "rtx-4070-ti-super": ["NVIDIA GeForce RTX 4070 Ti SUPER"],
    "gtx-1080-ti": ["NVIDIA GeForce GTX 1080 Ti", "GeForce GTX 1080 Ti"],
    "rtx-a6000": ["NVIDIA RTX A6000", "Quadro RTX A6000", "NVIDIA RTXA6000-48Q"],
    "rtx-6000-ada": ["NVIDIA RTX 6000 Ada Generation"],
    "rtx-6000": ["Quadro RTX 6000", "NVIDIA Quadro RTX 6000"],
    "rtx-pro-6000-blackwell-workstation": ["NVIDIA RTX PRO 6000 Blackwell Workstation Edition"],
    "titan-v": ["NVIDIA TITAN V", "TITAN V"],
}


@pytest.mark.parametrize(("sku", "name"), [(sku, name) for sku, names in CARDS.items() for name in names])
def test_every_spelling_of_a_card_is_that_card(sku: str, name: str) -> None:
    assert gpu_sku(name) == sku


@pytest.mark.parametrize(
    ("name", "mig"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "1g.10gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", "1g.5gb+me"),
        ("NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb", "1c.3g.40gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb+gfx", "1g.24gb+gfx"),
        ("NVIDIA H200 MIG 7g.141gb-me", "7g.141gb-me"),
        ("GRID A100D-3-40C", "3g.40gb"),
        ("GRID A100D-7-80C MIG 7g.80gb", "7g.80gb"),
        ("NVIDIA H100 80GB HBM3", ""),
        ("GRID V100D-32Q", ""),
    ],
)
def test_mig_profile_is_read_off_the_name(name: str, mig: str) -> None:
    assert mig_profile(name) == mig


@pytest.mark.parametrize(
    ("sku", "arguments"),
    [
        ("epyc-9004", ("AMD EPYC", "AuthenticAMD", 25, 17)),
        ("epyc-9004", ("AMD EPYC 9654 96-Core Processor", "AuthenticAMD", 25, 17)),
        ("epyc-9004", ("AMD EPYC 9R14",)),
        ("epyc-7003", ("AMD EPYC 7B13", "AuthenticAMD", 25, 1)),
        ("epyc-7003", ("AMD EPYC-Milan Processor", "AuthenticAMD", 25, 1)),
        ("epyc-7002", ("AMD EPYC 7742 64-Core Processor",)),
        ("xeon-sapphire-rapids", ("Intel(R) Xeon(R) Platinum 8480+", "GenuineIntel", 6, 143)),
        ("xeon-sapphire-rapids", ("Intel Xeon Processor (SapphireRapids)", "GenuineIntel", 6, 143)),
        ("xeon-broadwell", ("Intel(R) Xeon(R) CPU @ 2.20GHz", "GenuineIntel", 6, 79)),
        ("core-i9-13900k", ("13th Gen Intel(R) Core(TM) i9-13900K", "GenuineIntel", 6, 183)),
        ("core-i7-8650u", ("Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz",)),
        ("ryzen-9-7950x", ("AMD Ryzen 9 7950X 16-Core Processor", "AuthenticAMD", 25, 97)),
        ("neoverse-v2", ("neoverse-v2",)),
    ],
)
def test_cpu_class(sku: str, arguments: tuple[Any, ...]) -> None:
    assert cpu_sku(*arguments) == sku


@given(st.text(max_size=200))
def test_any_name_becomes_a_safe_one(name: str) -> None:
    for text in (gpu_sku(name), cpu_sku(name), slug(name)):
        assert text
        assert len(text) <= 60
        assert not text.startswith((".", "-"))
        assert set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789.+-")


# --- GPU facts --------------------------------------------------------------------------------------------------


def test_cuda_facts_in_the_units_of_their_names() -> None:
    reading = CudaReading("NVIDIA  H100 80GB HBM3", (9, 0), 132, 85_017_493_504, 52_428_800, 4, 699_500, 18)
    facts = cuda_facts(reading, (("torch", "2.11.0"), ("cuda", "13.0")), ("triton",))
    assert facts == hardware.HardwareFacts(
        vendor="nvidia",
        device_name="NVIDIA H100 80GB HBM3",
        sku="h100-sxm",
        arch="sm_90",
        sm_count=132,
        memory_mib=81079,
        l2_mib=50,
        power_limit_w=700,
        device_count=4,
        link="nv18",
        software=(("cuda", "13.0"), ("torch", "2.11.0")),
        packages=("triton",),
    )


@pytest.mark.parametrize(("nvlinks", "link"), [(None, ""), (0, "pcie"), (12, "nv12")])
def test_link(nvlinks: int | None, link: str) -> None:
    assert gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80, nvlinks=nvlinks, count=2).link == link
    assert gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80, nvlinks=nvlinks, count=1).link == "", "one of many"


def test_arch_of_two_digit_major_versions() -> None:
    assert gpu("NVIDIA B200", (10, 0), 148, 178).arch == "sm_100"
    assert gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 31).arch == "sm_120"


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (H100, "nvidia-h100-sxm-80g"),
        (H100_PCIE, "nvidia-h100-pcie-80g"),
        (H200, "nvidia-h200-sxm-141g"),
        (A100, "nvidia-a100-sxm-80g"),
        (A100_40, "nvidia-a100-sxm-40g"),
        (gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 23.6), "nvidia-rtx-4090-24g"),
        (gpu("NVIDIA GeForce GTX 1080 Ti", (6, 1), 28, 10.9), "nvidia-gtx-1080-ti-11g"),
        (gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 16, 9.75), "nvidia-h100-sxm-10g-mig-1g.10gb"),
        (EPYC, "cpu-epyc-9004-8c"),
        (replace(EPYC, threads=4), "cpu-epyc-9004-8c-4t"),
    ],
)
def test_fingerprint_name(facts: hardware.HardwareFacts, name: str) -> None:
    assert fingerprint_name(facts) == name


@pytest.mark.parametrize(("number", "version"), [(91002, "9.10.2"), (90100, "9.1.0"), (8902, "8.9.2"), (7605, "7.6.5")])
def test_cudnn_version(number: int, version: str) -> None:
    assert cudnn_version(number) == version


# --- CPU facts --------------------------------------------------------------------------------------------------

X86_CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
flags\t\t: fpu sse2 fma avx2 avx512f avx512_bf16 amx_tile

processor\t: 1
vendor_id\t: AuthenticAMD
model name\t: another
"""
ARM_CPUINFO = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd asimdhp sve bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def a_cpu(**changes: Any) -> CpuReading:
    reading = CpuReading("x86_64", X86_CPUINFO, "", 16, (), 64 * 2**30, (), 32 * 2**20, 8)
    return replace(reading, **changes)


def test_cpu_facts_x86() -> None:
    facts = cpu_facts(a_cpu(quotas=(3.5,), memory_limits=(8 * 2**30,)))
    assert (facts.vendor, facts.arch, facts.device_name, facts.sku) == ("cpu", "x86_64", "AMD EPYC", "epyc-9004")
    assert (facts.sm_count, facts.memory_mib, facts.l2_mib, facts.threads) == (3, 8192, 32, 8)
    assert facts.isa == ("avx2", "avx512_bf16", "avx512f", "fma")


def test_cpu_facts_arm_and_systems_without_cpuinfo() -> None:
    arm = cpu_facts(a_cpu(machine="aarch64", cpuinfo=ARM_CPUINFO))
    assert (arm.arch, arm.sku, arm.isa) == ("aarch64", "neoverse-v1", ("neon", "neon_bf16", "neon_fp16", "sve"))
    mac = cpu_facts(a_cpu(machine="arm64", cpuinfo="", fallback_name="arm"))
    assert (mac.arch, mac.device_name, mac.isa) == ("aarch64", "arm", ())
    assert cpu_arch("AMD64") == "x86_64"


def test_cpuinfo_takes_the_first_processor_and_bad_numbers_are_absent() -> None:
    assert parse_cpuinfo(X86_CPUINFO).name == "AMD EPYC"
    assert parse_cpuinfo("model : x\ncpu family: ²\n").family == -1
    assert parse_cpuinfo("").flags == frozenset()
    assert isa_flags(frozenset({"sse2", "amx_bf16"})) == ("amx_bf16",)


@pytest.mark.parametrize(
    ("affinity", "quotas", "cores"), [(8, (), 8), (8, (2.0,), 2), (8, (2.9, 4.0), 2), (8, (0.5,), 1), (2, (16.0,), 2)]
)
def test_usable_cores(affinity: int, quotas: tuple[float, ...], cores: int) -> None:
    assert usable_cores(affinity, quotas) == cores


def test_usable_memory() -> None:
    assert usable_memory(100, ()) == 100
    assert usable_memory(100, (70, 80)) == 70
    assert usable_memory(0, (70,)) == 70
    assert usable_memory(0, ()) == 0


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cgroup_v2_limits_of_every_level_count(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/c\n",
            "sys/fs/cgroup/kubepods/cpu.max": "600000 100000\n",
            "sys/fs/cgroup/kubepods/pod1/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/kubepods/pod1/c/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kubepods/pod1/memory.max": "1073741824\n",
            "sys/fs/cgroup/kubepods/memory.max": "max\n",
            "proc/meminfo": "MemTotal:       8388608 kB\nMemFree: 1 kB\n",
            "proc/cpuinfo": X86_CPUINFO,
            "sys/devices/system/cpu/cpu0/cache/index0/size": "32K\n",
            "sys/devices/system/cpu/cpu0/cache/index3/size": "24M\n",
        },
    )
    reading = read_cpu(threads=4, root=root)
    assert sorted(reading.quotas) == [2.5, 6.0]
    assert reading.memory_limits == (2**30,)
    assert (reading.memory_bytes, reading.last_level_cache_bytes) == (8 * 2**30, 24 * 2**20)
    assert cpu_facts(replace(reading, affinity=32)).sm_count == 2


def test_cgroup_v1_limits_also_where_only_the_mount_is_visible(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:cpuset:/\n1:name=systemd:/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "536870912\n",
        },
    )
    reading = read_cpu(threads=1, root=root)
    assert reading.quotas == (1.5,)
    assert reading.memory_limits == (2**29,)


def test_unlimited_and_missing_files_limit_nothing(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "1:cpu:/../..\n0::/\nnonsense\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    reading = read_cpu(threads=1, root=root)
    assert (reading.quotas, reading.memory_limits) == ((), ())
    assert cpu_facts(reading).memory_mib >= 1


# --- detect -----------------------------------------------------------------------------------------------------


def test_detect_cpu_reads_this_machine() -> None:
    facts = detect("cpu")
    assert facts == detect(torch.device("cpu"))
    assert facts.vendor == "cpu"
    assert facts.threads == torch.get_num_threads()
    assert facts.sm_count >= 1
    assert facts.memory_mib > 0
    assert dict(facts.software)["torch"] == torch.__version__
    assert facts.software == tuple(sorted(facts.software))


def test_threads_are_a_fact() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert detect("cpu").threads == before + 1
    finally:
        torch.set_num_threads(before)


class FakeNvmlError(Exception):
    pass


def fake_nvml(**overrides: Any) -> types.ModuleType:
    """A pynvml that knows one card, of 18 links, on bus 1B; every override replaces one function."""

    def handle(bus: str) -> str:
        if bus != "00000000:1B:00.0":
            raise FakeNvmlError
        return "the card"

    def link_state(handle: str, link: int) -> int:
        if link >= 18:
            raise FakeNvmlError
        return 1

    module = types.ModuleType("pynvml")
    functions = {
        "NVMLError": FakeNvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByPciBusId": handle,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetNvLinkState": link_state,
        "nvmlSystemGetDriverVersion": lambda: "580.1.2",
    }
    for name, function in {**functions, **overrides}.items():
        setattr(module, name, function)
    return module


@pytest.fixture
def two_h100(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch as on a machine with two H100, the second one current; no NVML."""
    properties = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=85_017_493_504,
        L2_cache_size=52_428_800,
        pci_domain_id=0,
        pci_bus_id=0x1B,
        pci_device_id=0,
        uuid="GPU-0d1a2b3c",
    )
    asked: list[int] = []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: (asked.append(index), properties)[1])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # cannot be imported
    hardware._read_nvml.cache_clear()
    yield asked
    hardware._read_nvml.cache_clear()


@pytest.mark.parametrize(
    ("device", "index"), [(None, 1), ("cuda", 1), ("cuda:0", 0), (0, 0), (1, 1), (torch.device("cuda:1"), 1)]
)
def test_detect_cuda(two_h100: list[int], device: Any, index: int) -> None:
    facts = detect(device)
    assert two_h100 == [index]
    assert (facts.vendor, facts.sku, facts.arch, facts.sm_count) == ("nvidia", "h100-sxm", "sm_90", 132)
    assert (facts.memory_mib, facts.l2_mib, facts.device_count) == (81079, 50, 2)
    assert facts.power_limit_w is None
    software = dict(facts.software)
    assert (software["cuda"], software["cudnn"]) == ("13.0", "9.10.2")
    assert "driver" not in software
    assert "0d1a2b3c" not in repr(facts)


def test_detect_asks_nvml_where_it_is_installed(two_h100: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    facts = detect("cuda:0")
    assert (facts.power_limit_w, facts.link) == (700, "nv18")
    assert dict(facts.software)["driver"] == "580.1.2"


def refuse(*_: object) -> Any:
    raise FakeNvmlError


@pytest.mark.parametrize(
    ("function", "power", "link"),
    [
        ("nvmlInit", None, ""),
        ("nvmlDeviceGetHandleByPciBusId", None, ""),
        ("nvmlDeviceGetEnforcedPowerLimit", 700, "nv18"),
        ("nvmlDeviceGetNvLinkState", 700, ""),
        ("nvmlSystemGetDriverVersion", 700, "nv18"),
    ],
)
def test_what_nvml_refuses_is_unknown(
    two_h100: list[int], monkeypatch: pytest.MonkeyPatch, function: str, power: int | None, link: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{function: refuse}))
    facts = detect("cuda:0")
    assert facts.power_limit_w == (None if function.endswith("PowerLimit") else power)
    assert facts.link == link
    assert ("driver" in dict(facts.software)) is (function not in ("nvmlInit", "nvmlSystemGetDriverVersion"))


@pytest.mark.parametrize("device", ["cuda:2", 7])
def test_absent_cuda_device(two_h100: list[int], device: Any) -> None:
    with pytest.raises(DeviceError, match="the last CUDA device here is cuda:1"):
        detect(device)


def test_cuda_build_without_a_card(two_h100: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect(None).vendor == "cpu"
    with pytest.raises(DeviceError, match="torch sees no CUDA device"):
        detect("cuda")


def test_build_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(DeviceError, match="has no CUDA"):
        detect("cuda")


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", 0])
def test_rocm_is_never_taken_for_nvidia(two_h100: list[int], monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(DeviceError, match=r"AMD GPUs \(ROCm\) have not been measured"):
        detect(device)
    assert two_h100 == []


@pytest.mark.parametrize(
    ("device", "named"),
    [
        ("mps", r"Apple GPUs \(MPS\)"),
        ("xpu", r"Intel GPUs \(XPU\)"),
        ("xpu:1", r"device is 'xpu:1'"),
        ("hip", r"AMD GPUs \(ROCm\)"),
        ("meta", "device is 'meta'"),
        ("gpu", "device is 'gpu'"),
        (-1, "device is -1"),
        (True, "device is True"),
        (1.5, r"device is 1\.5"),
    ],
)
def test_refused_devices_get_one_line_with_a_remedy(device: Any, named: str) -> None:
    with pytest.raises(DeviceError, match=named) as caught:
        detect(device)
    assert "\n" not in str(caught.value)
    assert "cpu" in str(caught.value)


# --- optional packages ------------------------------------------------------------------------------------------


def test_packages_are_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = "raise RuntimeError('imported')\n"
    write(tmp_path, {"flash_attn/__init__.py": bomb, "flash_attn/cute/__init__.py": bomb, "xformers/__init__.py": bomb})
    monkeypatch.syspath_prepend(str(tmp_path))
    found = hardware.found_packages()
    assert {"flash_attn", "flash_attn.cute", "xformers"} <= set(found)
    assert "flash_attn_interface" not in found


def test_a_namespace_folder_of_one_package_is_not_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"flash_attn/cute/__init__.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    found = hardware.found_packages()
    assert "flash_attn.cute" in found
    assert "flash_attn" not in found


def test_a_stand_in_without_a_spec_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.ModuleType("xformers")
    stand_in.__spec__ = None
    monkeypatch.setitem(sys.modules, "xformers", stand_in)
    assert "xformers" not in hardware.found_packages()


def test_versions_of_packages_are_software(two_h100: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "found_packages", lambda: ("flash_attn.cute", "xformers"))
    versions = {"flash-attn-4": "4.0.0b36", "xformers": "0.0.35"}
    monkeypatch.setattr(hardware.importlib.metadata, "version", versions.__getitem__)
    facts = detect("cuda:0")
    assert facts.packages == ("flash_attn.cute", "xformers")
    assert {("flash_attn.cute", "4.0.0b36"), ("xformers", "0.0.35")} <= set(facts.software)


def test_a_package_without_metadata_has_an_unknown_version() -> None:
    assert hardware._package_version("flash_attn_interface") == "unknown"


def test_modules_of_facts_and_profiles_import_no_torch() -> None:
    code = (
        "import sys, types, pathlib\n"
        "package = types.ModuleType('ringattn')\n"
        f"package.__path__ = [{str(Path(hardware.__file__).parents[1])!r}]\n"
        "sys.modules['ringattn'] = package\n"
        "import ringattn.hardware.facts, ringattn.profile.yaml_io, ringattn.profile.resolve\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
