"""Training on bytes, and measuring how each encoding extrapolates."""
