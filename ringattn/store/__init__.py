"""Stores of profiles that many machines share: a folder or a URL, one name for each content."""
