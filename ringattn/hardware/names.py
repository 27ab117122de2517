"""Maps the many spellings of one card or processor in drivers and /proc/cpuinfo to one name: pure functions."""

from __future__ import annotations

import re

# Words that say who sells it, not what it is.
_BRAND_WORDS = frozenset(
    {"nvidia", "corporation", "graphics", "geforce", "tesla", "quadro", "grid", "gpu", "generation", "edition"}
    | {"lc", "ac", "active", "with", "design"}
)
_MEMORY = re.compile(r"\b(\d+ ?g(b|ib)?|hbm\d\w*|gddr\d\w*)\b")
_MIG = re.compile(r"\bmig ((?:\d+c\.)?\d+g\.\d+gb[\w.+-]*)")  # 1c.3g.40gb is a part of the slice 3g.40gb
_VGPU = re.compile(r"\b([a-z]+\d+)([a-z]*)-(?:(\d+)-)?(\d+)([qca]|b4?)$")
_FORM = re.compile(r"\b(sxm|pcie|nvl)\d*\b")

# Cards whose plain name means one form factor; the others carry theirs in the name.
_PLAIN_IS_SXM = frozenset({"h100", "h200", "h800", "b200", "b300"})


def mig_profile(name: str) -> str:
    """Return the MIG slice a CUDA device name ends in, such as ``1g.10gb``; empty for a whole card."""
    lowered = name.lower()
    if match := _MIG.search(lowered):
        return match[1]
    if (match := _VGPU.search(lowered)) and match[3]:  # a vGPU backed by a slice: "GRID A100D-1-10C"
        return f"{match[3]}g.{match[4]}gb"
    return ""


def vgpu_profile(name: str) -> str:
    """Return the type of a virtual GPU that shares a whole card by time, such as ``40c``; empty for any other."""
    match = _VGPU.search(name.lower())
    return f"{match[4]}{match[5]}" if match and not match[3] else ""


def gpu_sku(name: str) -> str:
    """Return the class of card: "NVIDIA H100 80GB HBM3" and "H100 SXM5 80GB" are ``h100-sxm``.

    Memory size is left out (it is a fact of its own), form factor and laptop versions are not: they are other
    silicon, or other clocks. A name no rule knows becomes a slug of itself.
    """
    text = re.sub(r"\((r|tm|c)\)", " ", name.lower())
    text = re.sub(r"\bmig \S+", " ", text)
    text = _whole_card_of_vgpu(text.strip())
    text = re.sub(r"\b(rtx|gtx|titan)(?=[a-z]?\d)", r"\1 ", text)  # a virtual GPU is an "RTXA6000-48Q"
    hbm2 = "hbm2" in text
    text = re.sub(r"[^a-z0-9.+]+", " ", text)
    text = _FORM.sub(r"\1", _MEMORY.sub(" ", text))
    words = [word for word in text.split() if word not in _BRAND_WORDS]
    form = [word for word in words if word in ("sxm", "pcie", "nvl")]
    words = [word for word in words if word not in form] + form[:1]
    if len(words) == 1 and words[0] in _PLAIN_IS_SXM:
        words.append("pcie" if hbm2 and words[0] == "h100" else "sxm")
    return slug("-".join(words))


def _whole_card_of_vgpu(text: str) -> str:
    """Return a vGPU's card: "grid v100dx-32q" is a V100 SXM2. X is SXM, D and L are larger memories."""
    match = _VGPU.search(text)
    if not match:
        return text
    card, letters = match[1], match[2]
    if letters in ("s", "g"):  # L40S, L40G, V100S: part of the card's own name
        return f"{card}{letters}"
    if letters in ("xl", "l"):
        return f"{card} nvl"
    if "x" in letters:
        return f"{card} sxm"
    return f"{card} pcie" if card in ("v100", "p100", "a100", "a800", "h100", "h800") else card


# (vendor_id, family, model) of /proc/cpuinfo: the truth where a cloud's model name says only "AMD EPYC".
_CPU_FAMILIES: dict[tuple[str, int, int], str] = {
    ("AuthenticAMD", 23, 1): "epyc-7001",
    ("AuthenticAMD", 23, 49): "epyc-7002",
    ("AuthenticAMD", 25, 1): "epyc-7003",
    ("AuthenticAMD", 25, 17): "epyc-9004",
    ("AuthenticAMD", 25, 160): "epyc-9004",
    ("AuthenticAMD", 26, 2): "epyc-9005",
    ("AuthenticAMD", 26, 17): "epyc-9005",
    ("GenuineIntel", 6, 63): "xeon-haswell",
    ("GenuineIntel", 6, 79): "xeon-broadwell",
    ("GenuineIntel", 6, 85): "xeon-skylake",  # with Cascade Lake and Cooper Lake, which /proc tells apart by stepping
    ("GenuineIntel", 6, 106): "xeon-ice-lake",
    ("GenuineIntel", 6, 143): "xeon-sapphire-rapids",
    ("GenuineIntel", 6, 207): "xeon-emerald-rapids",
    ("GenuineIntel", 6, 173): "xeon-granite-rapids",
}
# (implementer, part) of an Arm /proc/cpuinfo, which has no model name.
_ARM_PARTS: dict[tuple[int, int], str] = {
    (0x41, 0xD0C): "neoverse-n1",
    (0x41, 0xD40): "neoverse-v1",
    (0x41, 0xD49): "neoverse-n2",
    (0x41, 0xD4F): "neoverse-v2",
    (0x41, 0xD84): "neoverse-v3",
    (0x41, 0xD8E): "neoverse-n3",
    (0x46, 0x001): "a64fx",
    (0xC0, 0xAC3): "ampereone",
}
_EPYC_NUMBER = re.compile(r"epyc (\d)\w\w(\d)\b")
_SERVER_WORDS = ("epyc", "xeon")
_CPU_NOISE = re.compile(
    r"\((r|tm|c)\)|\bcpu\b|\bprocessor\b|@.*$|\bwith .*$|\b\d+-core\b|\b\d+th gen\b|\b(amd|intel|genuine|apple)\b"
)


def cpu_sku(model_name: str, vendor_id: str = "", family: int = -1, model: int = -1) -> str:
    """Return the class of a CPU, such as ``epyc-9004``: from family and model for servers, else from its name."""
    lowered = model_name.lower()
    known = _CPU_FAMILIES.get((vendor_id, family, model))
    if known and any(word in lowered for word in _SERVER_WORDS):
        return known
    if match := _EPYC_NUMBER.search(lowered):
        return f"epyc-{match[1]}00{match[2]}"
    return slug(_CPU_NOISE.sub(" ", lowered))


def arm_model_name(implementer: int, part: int) -> str:
    """Return a name for an Arm core that /proc/cpuinfo gives only numbers for."""
    return _ARM_PARTS.get((implementer, part), f"arm-{implementer:02x}-{part:03x}")


def slug(text: str) -> str:
    """Return ``text`` in ``[a-z0-9.+-]``, fit for a file name; never empty, never hidden."""
    return re.sub(r"[^a-z0-9.+]+", "-", text.lower()).strip("-.")[:60].strip("-.") or "unknown"
