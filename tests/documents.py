"""The README and the pages of docs/: their blocks, and how their commands run in a test."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from patience import LIMIT_S

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
# What makes a real probe end in seconds (one small cell); everything else of a command runs as it is written.
SHORT_PROBE = shlex.split(
    "--effort quick --budget 30 --mode infer --seq-len 128 --heads 2 --head-dim 32 "
    "--segment-lengths 64 --dilation-rates 1 --device cpu"
)
# Longer: messages between processes take turns on the cores of a small machine.
SHORT_RING = shlex.split(
    "--effort quick --budget 30 --mode infer --seq-len 1024 --heads 2 --head-dim 32 "
    "--segment-lengths 8192 --dilation-rates 1 --device cpu"
)
ONE_TEST = "-q -p no:cacheprovider tests/autotune/cli/probing/test_progress.py"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: str  # the file, from the root of the repository
    language: str
    text: str


def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def blocks_of(page: Path) -> list[Block]:
    return [Block(str(page.relative_to(ROOT)), kind, text) for kind, text in FENCE.findall(text_of(page))]


def blocks(language: str, *pages: Path) -> list[Block]:
    return [block for page in pages for block in blocks_of(page) if block.language == language]


def commands(*pages: Path) -> list[str]:
    """Every command of the console blocks, once, in the order in which a reader meets them."""
    lines = [line.split("#")[0].strip() for block in blocks("console", *pages) for line in block.text.splitlines()]
    return list(dict.fromkeys(line for line in lines if line))


def as_run(command: str) -> list[str]:
    """How a command of a page runs here: with this Python, installing nothing, in seconds."""
    words = shlex.split(command)
    if words[0] == "make":
        extra = ["NO_INSTALL=1", f"PYTHON={sys.executable}", f"PROBE_ARGS={shlex.join(SHORT_PROBE)}"]
        return [*words, "--directory", str(ROOT), *extra, f"PYTEST_ARGS={ONE_TEST}"]
    if words[:2] == ["pip", "install"]:
        checks_only = ["--dry-run", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        target = [str(ROOT) if word == "." else word for word in words[2:]]
        return [sys.executable, "-m", "pip", "install", *checks_only, *target]
    if words[0] == "torchrun":
        assert words[-3:] == ["-m", "autotune", "probe"]
        return [sys.executable, "-m", "torch.distributed.run", *words[1:], *SHORT_RING]
    assert words[0] == "ringtune", f"a page runs {command!r}; say here how a test can"
    if words[1] == "probe":
        shape_is_given = not {"--heads", "--model", "--like"}.isdisjoint(words)
        words += ["--dry-run"] if shape_is_given else SHORT_RING if "--nproc" in words else SHORT_PROBE
    return [sys.executable, "-m", "autotune", *words[1:]]


def run(command: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    """``command`` in the folder ``home``, which is also the user's home."""
    environ = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "CI")}
    environ |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=home, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
