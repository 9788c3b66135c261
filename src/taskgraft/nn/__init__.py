"""Pure torch: the bottleneck operation, the banks that hold every task's weights, norms and heads."""
