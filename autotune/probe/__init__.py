"""One probe from its request to the profile that is written."""
