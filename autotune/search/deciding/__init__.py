"""Decides among measured plans: contenders, finalists, re-timing and the choice."""
