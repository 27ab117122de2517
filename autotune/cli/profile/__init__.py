"""Commands that read a profile: print it, draw it, explain it, check it, name it."""
