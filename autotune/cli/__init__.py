"""The ringtune command: one file per command, which parses, calls a function and prints."""
