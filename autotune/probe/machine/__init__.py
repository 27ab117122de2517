"""The machine that a probe runs on: its environment, also over ranks, and the lock of its device."""
