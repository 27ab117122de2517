"""The ringtune command: one file per command, each parses, asks a function, prints."""
