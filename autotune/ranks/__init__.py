"""Several ranks tuned as one: a process on each of them (``relay``), and the coordinator that asks them (``fleet``)."""
