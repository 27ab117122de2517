"""Runs a plan under autograd and torch.compile, with what each checkpoint mode saves."""
