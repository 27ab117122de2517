"""Reads and writes the files of a store: in a folder that hosts mount, or on a server behind a URL."""
