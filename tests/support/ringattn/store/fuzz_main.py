"""Fuzzes profiles, names and the contents of stores, and prints as JSON what happened.

    python tests/support/ringattn/store/fuzz_main.py FOLDER COUNT [FIRST]

In FOLDER/inside lies the store. Whatever is done may raise our errors alone, may run no code and touch nothing beside
the store and the cache, which an audit hook watches; of the profiles that are accepted every tenth is pushed, and runs
its rows, forward and backward, against the reference. Case N is the same wherever it is run: FIRST repeats one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
import typing
from collections import Counter
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
from fuzz_mutations import as_text, base_plain, mutated_bytes, mutated_plain, name

import autotune.report.summary
import autotune.report.terminal
from autotune.cli.store.candidates import candidates
from autotune.cli.store.listing import fleet_rows, kind_rows, profile_rows
from autotune.cli.store.merge import tidied
from ringattn import RingAttention
from ringattn.errors import RingAttentionError
from ringattn.hardware.facts import detect
from ringattn.planning.plan import rejection_reasons
from ringattn.profile.resolve import resolve
from ringattn.profile.schema import Fingerprint, Profile
from ringattn.profile.yaml_io import dump_profile, load_profile, parse_profile
from ringattn.reference import dilated_attention_reference
from ringattn.store.backends.folder import Folder
from ringattn.store.lease import Lease
from ringattn.store.lookup import find_profiles, stored_profiles
from ringattn.store.names import kind_of
from ringattn.store.signatures.ssh_signature import Signature, SignatureFault
from ringattn.store.store import Store

LIMIT_S = 60  # for one case
FACTS = detect("cpu")
KIND = kind_of(Fingerprint.of(FACTS))
BASE = base_plain(FACTS)
BASE_TEXT = as_text(Random(0), BASE)
# What leases and beacons say.
SMALL_FILE = json.dumps(
    {"node": "a", "kind": "k", "device_name": "d", "world": 1, "tier": "exact", "profile": "p", "why": "", "day": "",
     "term_s": 60}
).encode()  # fmt: skip
ALLOWED = (RingAttentionError, FileNotFoundError, SignatureFault)
# What runs code, starts programs, talks or changes files; paths of the last are looked at.
RUNS = {
    "exec",
    "compile",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "ctypes.dlopen",
}
CHANGES = {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}


class Watch:
    """An audit hook that notes what no profile may cause."""

    def __init__(self, inside: Path) -> None:
        self.inside = f"{inside}{os.sep}"
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self.take)

    def take(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in RUNS:
            if not (event in ("exec", "compile") and _is_pythons_own()):
                self.seen.append(f"{event} {str(arguments)[:200]}")
        elif event in CHANGES and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.fspath(arguments[0])
            path = path.decode(errors="replace") if isinstance(path, bytes) else path
            writes = event != "open" or bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            # A name relative to a folder that is held open is one part, which cannot lead out.
            leads_out = os.sep in path and not f"{Path(path).parent.resolve()}{os.sep}".startswith(self.inside)
            if writes and (leads_out or path in ("..", ".")):
                self.seen.append(f"{event} {path}")


def _is_pythons_own() -> bool:
    """Whether the code that runs is a module's, which something has imported late, or the annotation of a class."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename in ("<frozen importlib._bootstrap>", typing.__file__):
            return True
        frame = frame.f_back
    return False


class Fuzz:
    def __init__(self, folder: Path) -> None:
        self.inside = folder / "inside"
        self.outside = folder / "outside"
        self.shared = self.inside / "store"
        for made in (self.shared, self.outside):
            made.mkdir(parents=True, exist_ok=True)
        (self.outside / "secret").write_text("secret")
        os.environ.update(XDG_CACHE_HOME=str(self.inside / "cache"), XDG_CONFIG_HOME=str(self.inside / "config"))
        self.store = Store(Folder(self.shared))
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.watch = Watch(self.inside)

    def run(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            random = Random(number)
            kind = random.choices(("profile", "bytes", "name", "contents"), (10, 5, 4, 1))[0]
            self.counts[kind] += 1
            signal.alarm(LIMIT_S)
            try:
                self.watch.on = True
                getattr(self, kind)(random, number)
            except ALLOWED:
                self.counts[f"{kind} refused"] += 1
            except BaseException:  # noqa: BLE001  whatever it is, it is what is looked for
                self.watch.on = False
                self.faults.append(f"case {number}, {kind}: {traceback.format_exc()[-1500:]}")
            finally:
                self.watch.on = False
                signal.alarm(0)
            self.faults += [f"case {number}, {kind}: {seen}" for seen in self.watch.seen]
            self.watch.seen.clear()
            if len(self.faults) > 20:
                break
        left = {path.name: path.read_text() for path in self.outside.iterdir()}
        if left != {"secret": "secret"}:
            self.faults.append(f"outside the store there is {left}")

    # --- kinds of cases ----------------------------------------------------------------------------------------

    def profile(self, random: Random, number: int) -> None:
        self.accepted(parse_profile(as_text(random, mutated_plain(random, BASE)), "p.yaml"), random)

    def bytes(self, random: Random, number: int) -> None:
        self.accepted(parse_profile(mutated_bytes(random, BASE_TEXT), "p.yaml"), random)

    def name(self, random: Random, number: int) -> None:
        text, backend = name(random), self.store.backend
        acts = (
            lambda: backend.read(text, 100),
            lambda: backend.put(text, b"x"),
            lambda: backend.create(text, b"x"),
            lambda: backend.delete(text),
            lambda: self.store.named(text),
            lambda: self.store.names(text),
            lambda: load_profile(self.shared / "profiles" / text.replace("\0", "")),
            lambda: Lease(backend, text).acquire(),
        )
        random.choice(acts)()

    def contents(self, random: Random, number: int) -> None:
        """A store in which anybody wrote: read as the runtime and the commands read it."""
        self.watch.on = False
        folder = self.shared / "profiles" / random.choice((KIND, KIND, "other", "cpu-other"))
        folder.mkdir(parents=True, exist_ok=True)
        content = as_text(random, mutated_plain(random, BASE))
        if random.random() < 0.3:
            content = mutated_bytes(random, content)
        named = f"x{random.choice((1, 1, 1, 4))}-{hashlib.sha256(content).hexdigest()}.yaml"
        if random.random() < 0.2:
            named = random.choice((f"x1-{'0' * 64}.yaml", "h100.yaml", "x", "é", "\n", "x0-1.yaml", f"{named}.sig"))
        target = folder / named
        how = random.random()
        if os.path.lexists(target):
            pass  # what is there already may be a link
        elif how < 0.8:
            target.write_bytes(content)
        else:
            random.choice((lambda: target.symlink_to(self.outside / "secret"), lambda: os.mkfifo(target), target.mkdir,
                           lambda: target.symlink_to(self.outside), lambda: target.symlink_to(target)))()  # fmt: skip
        for where, text in (("leases", f"{KIND}-x1/{random.randrange(10**8):08d}"), ("beacons", f"{KIND}/n.json")):
            path = self.shared / where / text
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(mutated_bytes(random, SMALL_FILE))
        self.watch.on = True
        stored_profiles.cache_clear()
        notes: list[str] = []
        located, _ = find_profiles(None, FACTS, places=[str(self.shared)])
        resolve(located, FACTS)
        candidates(FACTS, 1, (str(self.shared),), notes)
        (
            kind_rows(self.store, notes),
            fleet_rows(self.store, notes, timedelta(days=1)),
            profile_rows(self.store, KIND, notes),
        )
        Lease(self.store.backend, f"{KIND}-x1").acquire()
        if random.random() < 0.1:
            tidied(self.store)
        try:
            Signature.parse(mutated_bytes(random, content)).check(content)
        except SignatureFault:
            self.counts["signatures refused"] += 1
        if not all(note.isprintable() and len(note) < 2000 for note in notes):
            raise AssertionError(notes)
        if len(list(folder.iterdir())) > 8:
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink()
            for path in (self.shared / "leases" / f"{KIND}-x1").iterdir():
                path.unlink()

    # --- what is accepted --------------------------------------------------------------------------------------

    def accepted(self, profile: Profile, random: Random) -> None:
        self.counts["accepted"] += 1
        if random.random() > 0.1:
            return
        if parse_profile(dump_profile(profile), "p.yaml") != profile:
            raise AssertionError("it is not read back as it was written")
        autotune.report.terminal.terminal_summary(profile)
        for entry in profile.plans:
            if entry.choice is not None and entry.workload.world <= 64:
                rejection_reasons(entry.workload, entry.choice.tunables, FACTS)
        if profile.source == "measured" and profile.plans:
            names = self.store.push(profile)
            for made in names:
                if self.store.profile(made).source != "measured":
                    raise AssertionError(made)
            self.store.forget(names)
        for entry in random.sample(profile.plans, min(2, len(profile.plans))):
            self.forward(profile, entry.workload)

    def forward(self, profile: Profile, asked: Any) -> None:
        if asked.world > 1 or asked.seq_len * asked.batch * asked.heads * asked.head_dim > 2**18 or asked.seq_len > 512:
            return
        try:
            attn = RingAttention(
                asked.heads,
                asked.head_dim,
                asked.kv_heads,
                [b.segment for b in asked.pattern.branches] or None,
                [b.rate for b in asked.pattern.branches] or None,
                causal=asked.causal,
                head_offset=asked.pattern.head_offset,
                profile=profile,
                device="cpu",
            )
        except RingAttentionError:
            self.counts["modules refused"] += 1
            return
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[
            asked.dtype
        ]
        if attn.plan_for(asked.seq_len, asked.dtype, asked.train).tunables.compile:
            self.counts["left to torch's compiler"] += 1  # which takes a minute here, and writes where it likes
            return
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(asked.batch, asked.seq_len, heads, asked.head_dim).to(dtype).requires_grad_(asked.train)
            for heads in (asked.heads, asked.kv_heads, asked.kv_heads)
        )
        out = attn(q, k, v)
        if asked.train:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        wanted, _ = dilated_attention_reference(*(x.detach().double() for x in (q, k, v)), asked.pattern, asked.causal)
        if not torch.allclose(out.detach().double(), wanted, rtol=0.05, atol=0.05):
            raise AssertionError(f"wrong numbers for {asked}")
        self.counts["forwards"] += 1


def main() -> None:
    folder, count = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    began = time.monotonic()
    fuzz = Fuzz(folder)
    fuzz.forward(parse_profile(BASE_TEXT, "base"), parse_profile(BASE_TEXT, "base").plans[0].workload)  # imports
    fuzz.run(first, count)
    taken_s = round(time.monotonic() - began, 1)
    print(json.dumps({"counts": dict(sorted(fuzz.counts.items())), "taken_s": taken_s, "faults": fuzz.faults}))


if __name__ == "__main__":
    main()
