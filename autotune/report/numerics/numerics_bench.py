"""Bench of a worker that compares single kernels with float64."""

from __future__ import annotations

import torch

from autotune.measure.bench import BenchSettings
from ringattn.device_errors import is_sticky
from ringattn.hardware.kernel_faults import Combination, Verdict
from ringattn.kernels.registry import KERNELS
from ringattn.planning.validation.accuracy_check import Case, config_of, make_case, verdict_on


class KernelBench:
    """Checks one kernel at a time; the case of the last shape is kept for the next kernel."""

    def __init__(self, settings: BenchSettings) -> None:
        self._device = torch.device(settings.device)
        self._last: tuple[tuple[object, ...], Case] | None = None

    def check_kernel(self, asked: Combination, rows: int) -> Verdict:
        """Return the verdict on one kernel and direction; out of memory and a lost device are raised."""
        with torch.no_grad():
            case = self._case(asked, rows)
            try:
                kernel = KERNELS[asked.kernel].load(config_of(asked))
            except Exception as error:  # a broken package may raise anything: all of it is the answer
                if is_sticky(error):
                    raise
                return Verdict(message=" ".join(f"{type(error).__name__}: {error}".split())[:300])
            return verdict_on(kernel, asked, case)

    def _case(self, asked: Combination, rows: int) -> Case:
        shape = (asked.head_dim, asked.dtype, asked.causal, asked.grouped, rows)
        if self._last is None or self._last[0] != shape:
            self._last = None
            case = make_case(
                asked.head_dim,
                asked.dtype,
                causal=asked.causal,
                grouped=asked.grouped,
                rows=rows,
                device=self._device,
                exact_on=self._device,
            )
            self._last = (shape, case)
        return self._last[1]

    def unmonitored(self) -> tuple[str, ...]:
        return ()
