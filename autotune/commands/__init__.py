"""One command a file, each of one shape: parse, ask a pure function, print. Heavy imports stay inside the functions."""
