"""Tasks: texts and their answers, from files, from the Hub, or from the papers' benchmarks."""
