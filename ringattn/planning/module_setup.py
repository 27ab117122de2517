"""The edge at init: the device, its facts, the profiles found for it. The only place the runtime reads them."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ringattn.arguments import check_dropout, input_dtype, integer, is_finite, is_integer, shown
from ringattn.errors import InputError
from ringattn.geometry.pattern import heads_without_rows
from ringattn.hardware.facts import HardwareFacts, detect
from ringattn.hardware.kernel_faults import join_faults
from ringattn.kernels.registry import KERNELS
from ringattn.planning.validation.validation_memory import user_memory
from ringattn.profile.locations import FILE_VARIABLE, Located
from ringattn.profile.resolve import Resolution, Source, resolve
from ringattn.profile.schema import PlanEntry, Policy, Profile
from ringattn.store.lookup import find_profiles
from ringattn.tunable_rules import CHECKPOINTS
from ringattn.versions import TESTED_TORCH, newer_than_tested
from ringattn.wording import plural
from ringattn.workload import LONGEST, Pattern, check_score_options

from .heuristic import Wishes
from .matching import entries_for, further_entries
from .plan import DROPOUT_IN_ONE_BLOCK, several_blocks
from .table import ModuleShape
from .unmeasured_workloads import remedy

logger = logging.getLogger("ringattn")
_said: set[str] = set()
_GIVEN = "<profile argument>"
_ONE_LEVEL = logging.WARNING - logging.INFO


def say_once(level: int, message: str, of_first: str = "") -> None:
    """Log a message once a process, with what the first to say it adds: a model builds a module per layer.

    Ranks of a job that are not the first on their host log it one level lower, a warning as INFO.
    """
    if message not in _said:
        _said.add(message)
        whole = f"{message}; {of_first}" if of_first else message
        logger.log(level if _speaks_for_host() else level - _ONE_LEVEL, whole)


def _speaks_for_host() -> bool:
    """Return whether this process is the first rank on its host, or no rank.

    Profiles, packages and versions are a host's, so that eight ranks of one would say the same eight times.
    """
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID")
    if local_rank:
        return local_rank == "0"
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_rank() == 0


@dataclass(frozen=True, slots=True)
class ModuleSetup:
    """Facts found at init: the device and its facts, the entries that match the module, the policy for the rest.

    ``named``: the profile was named by the user, so that its plans must run.
    """

    device: torch.device
    facts: HardwareFacts
    resolution: Resolution | None
    entries: tuple[PlanEntry, ...]
    policy: Policy
    named: bool
    trace: tuple[str, ...]
    shape: ModuleShape

    def place_of(self, entry: PlanEntry) -> str:
        """Return the file and key path of one of ``entries``."""
        source = self.source_of(entry)
        return f"{source.path}: plans[{source.profile.plans.index(entry)}]"

    def source_of(self, entry: PlanEntry) -> Source:
        """Return the profile that one of ``entries`` is of."""
        assert self.resolution is not None
        first, *others = self.resolution.sources
        return next((source for source in others if entry in source.profile.plans), first)

    def announce(self, dropout: float = 0.0) -> None:
        """Say once a process which profile serves: INFO for a profile, WARNING for the bare heuristic.

        And at WARNING that this torch is newer than any that was tested, that a module with this ``dropout`` cannot
        train, and which heads never attend to anything.
        """
        torch_version = dict(self.facts.software).get("torch", "")
        if newer_than_tested(torch_version):
            tested = ".".join(map(str, TESTED_TORCH))
            say_once(
                logging.WARNING,
                f"torch {torch_version} is newer than what this was tested with, torch {tested}; `ringtune doctor` "
                "runs every kernel once here",
            )
        if self.entries:
            for path, tier in {source.path: source.tier for source in map(self.source_of, self.entries)}.items():
                say_once(logging.INFO, f"profile {path}, tier {tier}")
        elif self.resolution is not None:  # None: the heuristic was asked for
            asked = replace(self.shape.workload(1, "bf16", True), window=self.shape.window)
            # Of training with dropout no row is measured, and the others serve in eval mode.
            told = remedy(asked, "--mode infer", what="one for eval()") if dropout else remedy(asked, what="one")
            say_once(
                logging.WARNING,
                f"{self.shape} on {self.facts.device_name}: no plan was measured for this workload, using the "
                f"heuristic; {told}",
            )
        several = several_blocks(self.shape.pattern, self.shape.world)
        if dropout and several:
            # Not refused: what was trained elsewhere may be run in eval mode, where dropout is nothing.
            say_once(
                logging.WARNING,
                f"{self.shape}: dropout is {dropout:g}, and this module refuses calls in training mode, since "
                f"{DROPOUT_IN_ONE_BLOCK}, not over {several}; set it to 0.0 to train; eval() ignores it",
            )
        warn_of_empty_heads(self.shape)


def warn_of_empty_heads(shape: ModuleShape) -> None:
    """Say once, naming them, which heads never attend to anything: by definition they are 0, but hardly on purpose."""
    empty = heads_without_rows(shape.pattern, shape.heads, shape.kv_heads, shape.max_seq_len)
    if empty:
        listed = ", ".join(map(str, empty[:8])) + (f" and {len(empty) - 8} more" if len(empty) > 8 else "")
        say_once(
            logging.WARNING,
            f"{shape}: of {plural(shape.heads, 'head')} no branch lets {listed} select a position, so "
            "their output is 0; give a branch a dilation rate no larger than its segments and sequences are long",
        )


def set_up(profile: Any, device: Any, shape: ModuleShape) -> ModuleSetup:
    """Read the device and the profiles; see ``RingAttention`` for what may be asked and what is raised."""
    target = device_of(device)
    return set_up_for(detect(target), profile, target, shape)


def set_up_for(facts: HardwareFacts, profile: Any, target: torch.device, shape: ModuleShape) -> ModuleSetup:
    """Return the same for a device of which these are the facts, also one that is not here."""
    named = isinstance(profile, (Profile, Path)) or (isinstance(profile, str) and profile != "auto")
    if not (profile is None or named or profile == "auto"):
        raise InputError(f"profile is {profile!r}; use 'auto', a path, a Profile, or None for the heuristic alone")
    path = None if profile is None or profile == "auto" or isinstance(profile, Profile) else profile
    bare = profile is None or isinstance(profile, Profile)
    located, notes = find_profiles(path, facts, world=shape.world, heuristics_only=bare)
    if isinstance(profile, Profile):
        located = (Located(_GIVEN, profile, "argument"), *located)
    resolution = resolve(located, facts, world=shape.world)
    measured = resolution.profile
    entries: tuple[PlanEntry, ...] = ()
    memory = user_memory()
    facts = replace(facts, faults=join_faults(facts.faults, memory.faults(facts, shape.head_dim)))
    notes = (*notes, memory.note) if memory.note else notes
    trace = (*notes, *resolution.trace, *(f"{fault.combination}: {fault.reason}" for fault in facts.faults))
    for note in notes:
        say_once(logging.WARNING, note)
    if measured is not None:
        module = replace(shape.workload(1, "fp32", train=False), window=shape.window)
        entries, note = entries_for(measured, module)
        trace = (*trace, note)
        for source in resolution.beside:
            found, note = entries_for(source.profile, module)
            if found := further_entries(entries, found):
                entries = (*entries, *found)
                trace = (*trace, f"{source.path}: {note}; {len(found)} of them for what was not measured before it")
    policy = resolution.heuristic.policy if measured is None or measured.policy is None else measured.policy
    assert policy is not None
    return ModuleSetup(
        device=target,
        facts=facts,
        resolution=None if profile is None else resolution,
        entries=entries,
        policy=policy,
        named=named or (profile == "auto" and bool(os.environ.get(FILE_VARIABLE))),
        trace=trace,
        shape=shape,
    )


def device_of(device: Any) -> torch.device:
    """Return the device asked for: None is the current CUDA device, else the CPU."""
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
    try:
        target = torch.device("cuda", int(device)) if is_integer(device) else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"device is {device!r}; use a torch device such as 'cuda:0' or 'cpu'") from error
    if target.type == "cuda" and target.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if target.type == "cpu" else target  # "cpu:0" is no other device, but compares unequal


def wishes_of(backend: Any, dtype: Any, checkpoint: str | None) -> Wishes:
    """Return the user's explicit choices as kernel, dtype and checkpoint names; InputError for what does not exist."""
    forward = backward = None
    if isinstance(backend, str):
        forward = backward = backend
    elif isinstance(backend, (tuple, list)) and len(backend) == 2:
        forward, backward = backend
    elif backend is not None:
        raise InputError(f"backend is {backend!r}; use a kernel name, or (forward name, backward name)")
    for name in (forward, backward):
        if name is not None and (not isinstance(name, str) or name not in KERNELS):
            raise InputError(f"backend is {backend!r}; the kernels are {', '.join(KERNELS)}")
    if checkpoint is not None and checkpoint not in CHECKPOINTS:
        raise InputError(f"checkpoint is {checkpoint!r}; use one of {', '.join(CHECKPOINTS)}, or None")
    return Wishes(forward, backward, _dtype_wish(dtype), checkpoint)


def _dtype_wish(dtype: Any) -> str | None:
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    return "tf32" if isinstance(dtype, str) and dtype == "tf32" else input_dtype(dtype, also="None, 'auto', 'tf32' or ")


def group_size(process_group: Any) -> int:
    """Return the ranks of None (one), a ProcessGroup or a 1-D DeviceMesh; InputError where this rank is in none."""
    if process_group is None:
        return 1
    if isinstance(process_group, int) and process_group == torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise InputError("this rank is no member of process_group; build the module on the members alone")
    dimensions = getattr(process_group, "ndim", 1)
    if dimensions != 1:
        raise InputError(f"process_group is a DeviceMesh of {dimensions} dimensions; give one of them, mesh['name']")
    size = getattr(process_group, "size", None)
    if not callable(size):
        raise InputError(f"process_group is {process_group!r}; use a ProcessGroup or a one-dimensional DeviceMesh")
    return int(size())


def check_scores(
    causal: bool, pattern: Pattern, window: Any, softcap: Any, head_dim: int, head_dim_v: Any, world: int
) -> tuple[int, float, int]:
    """Return window, softcap and head_dim_v of a module, 0 where there is none; InputError unless they make sense."""
    window = 0 if window is None else integer("window", window, most=LONGEST)
    if softcap is None:
        softcap = 0.0
    elif softcap == 0:
        raise InputError("softcap is 0; it must be a finite number > 0, or None for no cap")
    check_score_options(causal, pattern, window, softcap)
    head_dim_v = 0 if head_dim_v in (None, head_dim) else integer("head_dim_v", head_dim_v)
    if head_dim_v and (world > 1 or not pattern.dense):
        where = f"over {world} ranks keys and values travel together" if world > 1 else f"{pattern} merges its branches"
        raise InputError(f"head_dim_v is {head_dim_v} and head_dim {head_dim}; {where}: pad the smaller with zeros")
    return window, float(softcap), head_dim_v


def check_module(causal: bool, scale: float | None, dropout: float, process_group: Any) -> None:
    """Raise InputError, naming the argument, unless these make sense."""
    if not isinstance(causal, bool):
        raise InputError(f"causal is {causal!r}; it must be True or False")
    if scale is not None and not (is_finite(scale) and float(scale) > 0):
        # Kernels set masked logits to -inf before they scale: times 0 or less that is NaN or inf.
        raise InputError(
            f"scale is {shown(scale)}; it must be a finite number > 0, or None for 1/sqrt(head_dim); to turn logits "
            "around, negate q"
        )
    check_dropout("dropout", dropout)
    group_size(process_group)
