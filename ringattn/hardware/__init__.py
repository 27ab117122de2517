"""Facts of this machine: the only device queries."""
