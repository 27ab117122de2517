"""Workers that share a search: their leases, their time, and what each has left to do."""
