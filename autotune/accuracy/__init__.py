"""The accuracy check: inputs, float64 reference rows, error bounds."""
