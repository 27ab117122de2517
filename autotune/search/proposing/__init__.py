"""Proposes plans: samplers, the surrogate behind the own one, and what is enqueued."""
