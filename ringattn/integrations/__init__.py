"""Attention of other libraries' models; a library is imported when its integration is called, and not before."""
