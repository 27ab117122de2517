"""Signatures of profiles: the formats, who is believed to have signed, and what a store accepts."""
