"""Commands that look at this machine: what it can run, and where time goes."""
