"""Training: the optimiser that keeps tasks apart."""
