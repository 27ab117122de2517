"""Packed documents: where they lie, and plans that run over them."""
