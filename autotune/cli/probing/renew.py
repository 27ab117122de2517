"""Profile for other versions of the software: recorded winners are verified, and only those that lost are searched."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringattn.profile.precedence import origin_of, rows_for, rows_with_origin
from ringattn.profile.resolve import tier_of
from ringattn.profile.row_origin import RowOrigin
from ringattn.profile.schema import Profile, Provenance
from ringattn.store.merge import merge_rows
from ringattn.versions import __version__
from ringattn.wording import plural

if TYPE_CHECKING:
    from autotune.probe.request import ProbeObserver, ProbeRequest
    from ringattn.hardware.facts import HardwareFacts


def can_renew(earlier: Profile, facts: HardwareFacts) -> bool:
    """Tell whether rows of an earlier profile may be verified here: it has some, of this very device."""
    of_this = tier_of(earlier, facts)[0] in ("exact", "same-silicon")
    return of_this and any(entry.evidence is not None for entry in earlier.plans)


def renew(earlier: Path, output: Path, request: ProbeRequest, facts: HardwareFacts, observer: ProbeObserver) -> Path:
    """Write the rows of ``earlier`` that hold here, and new ones for those that do not, to ``output``; return it.

    A row that could not be judged stays: it served here until now. One that lost and is not measured again, since a
    row near it is, goes. Raises what a verification and a probe raise.
    """
    from autotune.probe import tuning
    from ringattn.profile.yaml_io import load_profile, save_profile

    old = load_profile(earlier)
    verified = tuning.verify_profile(earlier, request, observer)
    lost = {cell.workload for cell in verified.cells if cell.stale}
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    held = {cell.workload for cell in verified.cells} - lost
    rows = {
        entry.workload: replace(entry, origin=RowOrigin(origin_of(old, entry).effort, today))
        if entry.workload in held
        else entry
        for entry in rows_with_origin(old)
        if entry.workload not in lost
    }
    if lost:
        again = tuple((workload, 1) for workload in sorted(lost, key=str))
        searched = tuning.run_probe(replace(request, output=output, recorded=again), observer)
        assert searched.profile is not None, "a probe that measured nothing raises"
        again_rows = rows_with_origin(searched.profile)
        rows = merge_rows(rows, {entry.workload: entry for entry in again_rows if entry.workload in lost})
    judged = f"{plural(len(held), 'row')} of {old.provenance.date or 'an earlier day'} verified"
    provenance = Provenance(
        tool_version=__version__,
        date=today,
        effort=old.provenance.effort,
        seed=request.seed,
        notes=(f"{judged}, {len(lost)} searched again, {len(verified.inconclusive)} not judged",),
    )
    renewed = replace(old, software=facts.software, plans=rows_for(provenance, rows.values()), provenance=provenance)
    save_profile(renewed, output)
    return output
