"""Modules and functions in the place of torch's attention, over ``RingAttention``."""
