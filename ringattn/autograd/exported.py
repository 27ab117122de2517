"""Saves a module's configuration inside a program of torch.export, and runs it where that is loaded.

A saved program knows no module of the process that loads it, so its operators carry all that plans follow from: the
shape, the rows of the profile, the policy and the facts of the machine that exported. From these the loader derives the
plan of the exporting module for any length, and runs it or says why it cannot run here.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ringattn.dtypes import DTYPE_NAMES
from ringattn.errors import InputError, PlanError, ProfileError
from ringattn.hardware.facts import detect
from ringattn.planning.module_setup import say_once
from ringattn.planning.plan import build_plan
from ringattn.planning.table import PlanTable, Question, table_of
from ringattn.profile.plain_data import from_plain, to_plain
from ringattn.profile.schema import Choice, PlanEntry
from ringattn.runtime.inputs import check_length
from ringattn.runtime.packed.documents import TENSORS_ALONE, Extent
from ringattn.runtime.packed.documents_program import load_program
from ringattn.runtime.packed.over_documents import OverDocuments
from ringattn.runtime.program import Program

_FORMAT = 1
_SOURCE = "exported program"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration(Question):
    """Everything that decides the plans of a module on one rank; ``facts`` are those of the machine that exported."""

    format: int
    scale: float

    def __post_init__(self) -> None:
        if self.format != _FORMAT:
            raise InputError(f"format is {self.format}, and this version reads {_FORMAT}; export the module again")


def configuration_text(table: PlanTable, scale: float) -> str:
    """Return the configuration of a module with this table as JSON; equal texts give equal plans."""
    asked = {field.name: getattr(table, field.name) for field in fields(Question)}
    entries = tuple(_lean(entry, evidence=table.prefer is not None) for entry in table.entries)
    configuration = Configuration(**asked | {"entries": entries}, format=_FORMAT, scale=scale)
    return json.dumps(to_plain(configuration), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _lean(entry: PlanEntry, *, evidence: bool) -> PlanEntry:
    """Return the entry without what decides no plan: reports, and evidence where no preference weighs it."""

    def lean(choice: Choice) -> Choice:
        return choice if evidence else Choice(choice.tunables)

    return replace(
        entry,
        choice=entry.choice and lean(entry.choice),
        captured=entry.captured and lean(entry.captured),
        runners_up=tuple(map(lean, entry.runners_up)),
        auto=entry.auto and lean(entry.auto),
        front=tuple(map(lean, entry.front)),
        torch=None,
        singles=(),
        failures=(),
    )


class ExportedAttention:
    """Plans of an exported module, which run the operators of a loaded program on one device."""

    def __init__(self, text: str, device: torch.device) -> None:
        """Read a configuration; ProfileError where it is none, DeviceError for a device that cannot run it."""
        try:
            plain = json.loads(text)
        except ValueError:
            raise ProfileError(_SOURCE, "holds a configuration that is not JSON; export the module again") from None
        c: Configuration = from_plain(Configuration, plain, _SOURCE)
        deterministic = c.conditions.deterministic or torch.are_deterministic_algorithms_enabled()
        self._conditions = replace(c.conditions, deterministic=deterministic)
        self._here = detect(device)
        self._scale = c.scale
        self._table = table_of(c.question)
        self.traced: dict[object, Program] = {}

    def program_for(self, q: Tensor, k: Tensor, v: Tensor, train: bool, extent: Extent = TENSORS_ALONE) -> Program:
        """Return the program of the exported plan for these tensors; PlanError where it cannot run on this machine."""
        (batch, length), tokens = q.shape[:2], 0
        if extent.documents is not None:
            batch, length, tokens = extent.documents.sizes(batch, length)
        check_length(length, self._table.shape.max_seq_len)
        row = self._table.plan_at(length, DTYPE_NAMES[q.dtype], train, batch, packed_tokens=tokens)
        plan = row.runnable()
        note = self._table.fallback_note(row)
        if note.text:
            say_once(logging.WARNING, *note)
        try:
            here = build_plan(plan.workload, plan.tunables, self._here, conditions=self._conditions)
        except PlanError as error:
            raise PlanError(
                f"the exported plan for {plan.workload} cannot run here", error.rejected, "Export the module here"
            ) from None
        program = load_program(here, self._scale)
        if isinstance(program, OverDocuments):
            assert extent.documents is not None
            return program.over(extent.documents, *q.shape[:2])
        return program
